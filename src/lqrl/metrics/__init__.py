"""Torchmetrics that reduce exactly over ranks: every state is a sum."""

from lqrl.metrics.mismatch import EffectiveSampleSize, MismatchKL
from lqrl.metrics.pass_at_k import PassAtK
from lqrl.metrics.ratio import MeanRatio, TokenFraction

__all__ = ["EffectiveSampleSize", "MeanRatio", "MismatchKL", "PassAtK", "TokenFraction"]
