"""The mathematics of the update: tensors in, tensors out, fp32 inside; no Lightning, no engine."""

from lqrl.algorithms.advantages import GRPO, RLOO, AdvantageFn, DrGRPO
from lqrl.algorithms.correction import (
    Correction,
    CorrectionOutput,
    NoCorrection,
    SequenceTIS,
    TokenMIS,
    TokenTIS,
    mismatch_metrics,
)
from lqrl.algorithms.kl import KLPenalty, k1, k2, k3
from lqrl.algorithms.logprobs import LogprobsAndEntropy, chunked_logprobs, head_logits, logprobs_with_entropy
from lqrl.algorithms.losses import ClippedLoss, GSPOLoss, PolicyLoss, ReinforceLoss, TBPOLoss
from lqrl.algorithms.reduce import Reduction

__all__ = [
    "GRPO",
    "RLOO",
    "AdvantageFn",
    "ClippedLoss",
    "Correction",
    "CorrectionOutput",
    "DrGRPO",
    "GSPOLoss",
    "KLPenalty",
    "LogprobsAndEntropy",
    "NoCorrection",
    "PolicyLoss",
    "Reduction",
    "ReinforceLoss",
    "SequenceTIS",
    "TBPOLoss",
    "TokenMIS",
    "TokenTIS",
    "chunked_logprobs",
    "head_logits",
    "k1",
    "k2",
    "k3",
    "logprobs_with_entropy",
    "mismatch_metrics",
]
