"""Policy losses: the surrogate objective a token, clipped, corrected for the rollout mismatch, and reduced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lqrl.algorithms.correction import SequenceTIS
from lqrl.algorithms.kl import LOG_RATIO_BOUND, k3
from lqrl.algorithms.reduce import Reduction, masked_max, masked_ratio, sequence_mean
from lqrl.types import ClipRange, LossOutput, Ratio, TrainBatch


class PolicyLoss(ABC):
    """A loss and what it asks of the learner.

    Attributes:
        reduction: how token losses are reduced; the learner sums its ``count`` into ``denom``.
        accepts_clip_scale: whether ACR's ``clip_scale`` may be set; losses on sequence ratios refuse it.
        uses_clip_range: whether ``clip_range`` is read; if not, scheduling it would change nothing.
        corrects_mismatch: whether the loss weighs the rollout mismatch itself; combine it with `NoCorrection` only.
    """

    reduction: Reduction
    accepts_clip_scale: ClassVar[bool]
    uses_clip_range: ClassVar[bool]
    corrects_mismatch: ClassVar[bool]

    @abstractmethod
    def __call__(self, logprobs: Tensor, batch: TrainBatch, *, denom: Tensor, clip_range: ClipRange) -> LossOutput:
        """Loss of one micro-batch.

        Args:
            logprobs: ``[B, T]`` the policy's now, differentiable.
            batch: the same rows; whole sequences.
            denom: ``reduction.count`` summed over the optimizer step, see `Reduction`.
            clip_range: the current widths.

        Raises:
            ValueError: when ``batch`` lacks a column that the loss reads.
        """
        ...


@dataclass(frozen=True)
class ClippedLoss(PolicyLoss):
    """PPO's clipped surrogate with clip-higher, dual clip and the Adaptive Clipping Range.

    With ``R = pi / pi_old``, advantage ``A``, correction's weight ``w`` and clip scale ``c`` (or 1), a token's loss is
    ``-w * min(R A, clip(R, 1 - low, (1 + high) * c) A)``: PPO (arXiv 1707.06347, eq. 7), asymmetric widths from DAPO
    (arXiv 2503.14476), weight and scale from QuRL (arXiv 2602.13953, eq. 9). The scale changes tokens with ``A > 0``
    only. For ``A < 0`` the dual clip (arXiv 1912.09729) bounds the loss, before ``w``, by ``-dual * A``.

    Attributes:
        reduction: DAPO's token mean by default.
    """

    reduction: Reduction = field(default_factory=Reduction)

    accepts_clip_scale: ClassVar[bool] = True
    uses_clip_range: ClassVar[bool] = True
    corrects_mismatch: ClassVar[bool] = False

    def __call__(self, logprobs: Tensor, batch: TrainBatch, *, denom: Tensor, clip_range: ClipRange) -> LossOutput:
        """See `PolicyLoss`. Without ``correction_weights`` every weight is 1."""
        advantages = batch.advantages
        log_ratio = _log_ratio(logprobs, _old_logprobs(batch, self), batch.loss_mask)
        ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        low, high = 1 - clip_range.low, 1 + clip_range.high
        if batch.clip_scale is not None:
            high = high * batch.clip_scale
        objective = torch.minimum(ratio * advantages, ratio.clamp(min=low).clamp(max=high) * advantages)
        metrics = _policy_metrics(log_ratio, batch.loss_mask) | _clip_metrics(ratio, low, high, batch)
        if clip_range.dual is not None:
            floor = clip_range.dual * advantages
            cut = (advantages < 0) & (objective < floor)
            objective = torch.where(cut, floor, objective)
            metrics["policy/dual_clip_fraction"] = masked_ratio(cut, batch.loss_mask)
        return _reduce(self.reduction, _weighted(objective, batch), batch, denom, metrics)


@dataclass(frozen=True)
class GSPOLoss(PolicyLoss):
    """Group Sequence Policy Optimization (arXiv 2507.18071): PPO's clip on the sequence ratio.

    ``s = exp(mean_t log(pi / pi_old))``; a token sees ``s_t = sg[s] * pi / sg[pi]`` (GSPO-token): the value of ``s``,
    the gradient of the token. Widths are distances from 1 of the *sequence* ratio, three orders below a token's, and
    belong to this class; ``clip_range`` is not read.

    Attributes:
        clip_low: the paper's 3e-4.
        clip_high: the paper's 4e-4.
        reduction: mean over sequences of token means, the paper's.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    reduction: Reduction = field(default_factory=lambda: Reduction("seq_mean_token_mean"))

    accepts_clip_scale: ClassVar[bool] = False
    uses_clip_range: ClassVar[bool] = False
    corrects_mismatch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_widths(self, clip_low=self.clip_low, clip_high=self.clip_high)

    def __call__(self, logprobs: Tensor, batch: TrainBatch, *, denom: Tensor, clip_range: ClipRange) -> LossOutput:
        """See `PolicyLoss`.

        Raises:
            ValueError: also when the batch has a ``clip_scale``: ACR is defined for token ratios.
        """
        _refuse_clip_scale(batch, self, "TokenTIS(acr=False) or SequenceTIS")
        advantages = batch.advantages
        log_ratio = _log_ratio(logprobs, _old_logprobs(batch, self), batch.loss_mask)
        ratio = _sequence_ratio(log_ratio, batch.loss_mask)
        low, high = 1 - self.clip_low, 1 + self.clip_high
        objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        metrics = _policy_metrics(log_ratio, batch.loss_mask) | _clip_metrics(ratio, low, high, batch)
        return _reduce(self.reduction, _weighted(objective, batch), batch, denom, metrics)


@dataclass(frozen=True)
class TBPOLoss(PolicyLoss):
    """Trust-Band Policy Optimization of QaRL (arXiv 2604.07853): sequence ratios, and a band for negatives.

    With ``s`` as in `GSPOLoss` and ``w = min(exp(mean_t log(pi_old / pi_behavior)), mismatch_cap)``, both a row's, the
    objective is ``w * min(s A, min(s, 1 + seq_clip_high) A)`` for ``A >= 0``, and for ``A < 0`` it is ``w s A`` inside
    ``1 - band_low <= s <= 1 + band_high``, nothing outside. Error tokens of a quantized rollout, improbable under both
    policies, are so cut off on the side that PPO leaves open.

    The constants were read in notes and in third-party code. The printed objective was not: that a dropped sequence
    stays in the denominator, and the mean over sequences of token means, are inferred.

    Attributes:
        band_low: band of negatives, below 1.
        band_high: band of negatives, above 1.
        seq_clip_high: clip of positives, above 1.
        mismatch_cap: largest mismatch weight.
        reduction: mean over sequences of token means.
    """

    band_low: float = 3e-4
    band_high: float = 7e-4
    seq_clip_high: float = 4e-4
    mismatch_cap: float = 2.0
    reduction: Reduction = field(default_factory=lambda: Reduction("seq_mean_token_mean"))

    accepts_clip_scale: ClassVar[bool] = False
    uses_clip_range: ClassVar[bool] = False
    corrects_mismatch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_widths(self, band_low=self.band_low, band_high=self.band_high, seq_clip_high=self.seq_clip_high)
        SequenceTIS(self.mismatch_cap)

    def __call__(self, logprobs: Tensor, batch: TrainBatch, *, denom: Tensor, clip_range: ClipRange) -> LossOutput:
        """See `PolicyLoss`; ``batch.correction_weights`` are not read.

        Raises:
            ValueError: also when the batch has a ``clip_scale``.
        """
        _refuse_clip_scale(batch, self, "NoCorrection")
        advantages, mask = batch.advantages, batch.loss_mask
        old_logprobs = _old_logprobs(batch, self)
        log_ratio = _log_ratio(logprobs, old_logprobs, mask)
        ratio = _sequence_ratio(log_ratio, mask)
        mismatch = SequenceTIS(self.mismatch_cap)(old_logprobs, batch.behavior_logprobs, mask)

        high = 1 + self.seq_clip_high
        clipped = torch.minimum(ratio * advantages, ratio.clamp(max=high) * advantages)
        outside = (ratio < 1 - self.band_low) | (ratio > 1 + self.band_high)
        dropped = outside & (advantages < 0)
        objective = mismatch.weights * torch.where(advantages < 0, ratio * advantages, clipped).masked_fill(dropped, 0)
        metrics = _policy_metrics(log_ratio, mask) | {
            "policy/clip_high_fraction": masked_ratio((ratio > high) & (advantages > 0), mask),
            "tbpo/dropped_fraction": masked_ratio((dropped & mask).any(1), mask.any(1)),
            "tbpo/mismatch_weight": masked_ratio(mismatch.weights[:, 0], mask.any(1)),
        }
        return _reduce(self.reduction, objective, batch, denom, metrics)


@dataclass(frozen=True)
class ReinforceLoss(PolicyLoss):
    """``-w * A * log pi``: the policy gradient itself, for one optimizer step a rollout.

    Attributes:
        reduction: token mean by default.
    """

    reduction: Reduction = field(default_factory=Reduction)

    accepts_clip_scale: ClassVar[bool] = True
    uses_clip_range: ClassVar[bool] = False
    corrects_mismatch: ClassVar[bool] = False

    def __call__(self, logprobs: Tensor, batch: TrainBatch, *, denom: Tensor, clip_range: ClipRange) -> LossOutput:
        """See `PolicyLoss`."""
        objective = logprobs.float().masked_fill(~batch.loss_mask, 0) * batch.advantages
        return _reduce(self.reduction, _weighted(objective, batch), batch, denom, {})


def _old_logprobs(batch: TrainBatch, loss: PolicyLoss) -> Tensor:
    if batch.old_logprobs is None:
        raise ValueError(
            f"{type(loss).__name__} compares with batch.old_logprobs, which is None: run the proximal pass before the "
            "update, or set them to logprobs.detach() when each rollout is used for one step"
        )
    return batch.old_logprobs


def _refuse_clip_scale(batch: TrainBatch, loss: PolicyLoss, instead: str) -> None:
    if batch.clip_scale is not None:
        raise ValueError(
            f"{type(loss).__name__} clips sequence ratios, ACR's clip_scale is for token ratios; use {instead}"
        )


def _check_widths(loss: PolicyLoss, **widths: float) -> None:
    for name, width in widths.items():
        if width < 0:
            raise ValueError(f"{type(loss).__name__}.{name} is a distance from 1 and must be >= 0, got {width}")


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]`` ``log(pi / pi_old)``; 0, without gradient, outside the mask."""
    return (logprobs.float() - old_logprobs.float()).masked_fill(~mask, 0)


def _sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]`` each row's geometric mean ratio, with the gradient of the token's own ``log pi``."""
    mean = sequence_mean(log_ratio.detach(), mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (mean + (log_ratio - log_ratio.detach())).exp()


def _weighted(objective: Tensor, batch: TrainBatch) -> Tensor:
    return objective if batch.correction_weights is None else objective * batch.correction_weights


def _reduce(
    reduction: Reduction, objective: Tensor, batch: TrainBatch, denom: Tensor, metrics: dict[str, Ratio]
) -> LossOutput:
    loss = reduction(-objective, batch.loss_mask, denom=denom)
    value = Ratio(loss.detach() * denom.clamp_min(1), reduction.count(batch.loss_mask))
    return LossOutput(loss, {"policy/loss": value} | metrics)


@torch.no_grad()
def _policy_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, Ratio]:
    """Token ratios of the policy to the old one; ``ratio_max`` over several batches is the mean of their maxima."""
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return {
        "policy/ratio_mean": masked_ratio(ratio, mask),
        "policy/ratio_max": masked_max(ratio, mask),
        "policy/approx_kl": masked_ratio(k3(-log_ratio), mask),
    }


@torch.no_grad()
def _clip_metrics(ratio: Tensor, low: float, high: float | Tensor, batch: TrainBatch) -> dict[str, Ratio]:
    """Share of trained tokens whose gradient the clip removes, by side."""
    return {
        "policy/clip_low_fraction": masked_ratio((ratio < low) & (batch.advantages < 0), batch.loss_mask),
        "policy/clip_high_fraction": masked_ratio((ratio > high) & (batch.advantages > 0), batch.loss_mask),
    }
