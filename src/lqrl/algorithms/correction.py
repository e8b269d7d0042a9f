"""Corrections of the rollout mismatch: the engine that sampled is not the learner that scores.

Throughout, ``rho = pi_old / pi_behavior`` of a sampled token: the learner before the update over the engine. Weights
are detached constants. Metrics describe the raw ratios, before anything is truncated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lqrl.algorithms.kl import LOG_RATIO_BOUND, k1, k3
from lqrl.algorithms.reduce import masked_max, masked_ratio, sequence_mean
from lqrl.types import Ratio


@dataclass(frozen=True)
class CorrectionOutput:
    """What a correction tells the loss.

    Attributes:
        weights: ``[B, T]`` float32; multiplies each token's objective; meaningless outside the mask.
        keep: ``[B, T]`` bool, within the mask; tokens that stay in the loss. Rejected ones have weight 0: left in
            ``loss_mask`` they still count in the denominator, ``loss_mask & keep`` takes them out.
        clip_scale: ``[B, T]`` float32 >= 1, multiplies the upper clip bound, or ``None``.
        metrics: see `mismatch_metrics`, and ``correction/truncated_low_fraction``,
            ``correction/truncated_high_fraction`` (share of tokens whose ratio was cut), ``acr/active_fraction``.
    """

    weights: Tensor
    keep: Tensor
    clip_scale: Tensor | None = None
    metrics: dict[str, Ratio] = field(default_factory=dict)


class Correction(ABC):
    """Weighs tokens by how differently learner and engine see them."""

    @abstractmethod
    def __call__(self, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> CorrectionOutput:
        """Correct ``[B, T]`` tokens where the bool ``mask`` is true."""
        ...


def mismatch_metrics(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> dict[str, Ratio]:
    """How far the learner is from the engine on ``[B, T]`` sampled tokens, from raw ratios.

    Returns:
        ``mismatch/k1``, ``mismatch/k3``: KL(behavior || old) a token.
        ``mismatch/ratio_mean``, ``mismatch/ratio_square_mean``: moments of ``rho``; the first is 1 without mismatch.
        ``mismatch/ess``: effective sample size as a share, see `effective_share`, which is for several batches.
        ``mismatch/log_ratio_max``: the largest.
    """
    log_ratio = _log_ratio(old_logprobs, behavior_logprobs, mask)
    ratio = _exp(log_ratio)
    mean, square_mean = masked_ratio(ratio, mask), masked_ratio(ratio.square(), mask)
    effective = mean.total.square() / square_mean.total.clamp_min(torch.finfo(torch.float32).tiny)
    return {
        "mismatch/k1": masked_ratio(k1(-log_ratio), mask),
        "mismatch/k3": masked_ratio(k3(-log_ratio), mask),
        "mismatch/ratio_mean": mean,
        "mismatch/ratio_square_mean": square_mean,
        "mismatch/ess": Ratio(effective, mean.count),
        "mismatch/log_ratio_max": masked_max(log_ratio, mask),
    }


def effective_share(metrics: dict[str, float]) -> dict[str, float]:
    """``metrics`` with the effective sample size of all their tokens, ``mean^2 / mean of squares`` of the ratios.

    The moments add up over micro-batches and ranks. The mean of the micro-batches' own shares is an upper bound, and
    follows how the batch was cut.
    """
    mean, square_mean = metrics.get("mismatch/ratio_mean"), metrics.get("mismatch/ratio_square_mean")
    if not mean or not square_mean:
        return metrics
    return metrics | {"mismatch/ess": mean * mean / square_mean}


@dataclass(frozen=True)
class NoCorrection(Correction):
    """Trusts the engine's samples as if the learner had drawn them; still measures the mismatch."""

    def __call__(self, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> CorrectionOutput:
        """Weights of 1."""
        weights = torch.ones_like(old_logprobs, dtype=torch.float32)
        return CorrectionOutput(weights, mask, metrics=_metrics(old_logprobs, behavior_logprobs, mask))


@dataclass(frozen=True)
class TokenTIS(Correction):
    """Token-level truncated importance sampling, with the Adaptive Clipping Range (ACR) of QuRL.

    Weights are ``min(rho, cap)`` (FlashRL; QuRL, arXiv 2602.13953, eq. 5). Truncation equals importance sampling from a
    lifted behavior policy, and shrinks the trust region of the truncated tokens by ``r = min(1, cap / rho)`` (eq. 8).
    ACR gives it back: the upper clip bound becomes ``(1 + high) / r = (1 + high) * max(1, rho / cap)`` (eq. 9). The
    lower bound does not move, and where ``rho <= cap`` ACR is TIS, bit for bit.

    The equations were read in notes and in third-party code, which agree; the paper's cap was not seen, 2.0 is
    FlashRL's for small models. Log-ratios are clamped to +-20, as in that code.

    Attributes:
        cap: largest weight.
        acr: whether the upper clip bound adapts.

    Raises:
        ValueError: when ``cap`` is not positive.
    """

    cap: float = 2.0
    acr: bool = True

    def __post_init__(self) -> None:
        _check_cap("TokenTIS", self.cap)

    def __call__(self, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> CorrectionOutput:
        """Weights in ``(0, cap]`` and, with ACR, the scale of the upper clip bound."""
        rho = _exp(_log_ratio(old_logprobs, behavior_logprobs, mask))
        above = rho > self.cap
        metrics = _metrics(old_logprobs, behavior_logprobs, mask, cut_high=above, widened=above if self.acr else None)
        clip_scale = (rho / self.cap).clamp_min(1) if self.acr else None
        return CorrectionOutput(rho.clamp_max(self.cap), mask, clip_scale, metrics)


@dataclass(frozen=True)
class SequenceTIS(Correction):
    """Sequence-level truncated importance sampling: all tokens of a row share ``min(rho_seq, cap)``.

    ``rho_seq`` is the geometric mean of the row's token ratios (QaRL, arXiv 2604.07853, as read in notes). With
    ``length_normalized=False`` it is their product, the unbiased weight, whose spread grows with length: at a log-ratio
    noise of 0.02 a token the effective sample size falls to 9 % at 8192 tokens.

    Attributes:
        cap: largest weight.
        length_normalized: geometric mean instead of product.

    Raises:
        ValueError: when ``cap`` is not positive.
    """

    cap: float = 2.0
    length_normalized: bool = True

    def __post_init__(self) -> None:
        _check_cap("SequenceTIS", self.cap)

    def __call__(self, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> CorrectionOutput:
        """Weights in ``(0, cap]``, constant along a row."""
        log_rho = sequence_mean(_log_ratio(old_logprobs, behavior_logprobs, mask), mask)
        if not self.length_normalized:
            log_rho = log_rho * mask.sum(1, keepdim=True)
        rho = _exp(log_rho).expand(mask.shape)
        metrics = _metrics(old_logprobs, behavior_logprobs, mask, cut_high=rho > self.cap)
        return CorrectionOutput(rho.clamp_max(self.cap), mask, metrics=metrics)


@dataclass(frozen=True)
class TokenMIS(Correction):
    """Token-level masked importance sampling: weight ``rho`` inside the band, rejection outside (IcePop).

    Attributes:
        ratio_low: smallest ratio kept.
        ratio_high: largest ratio kept.

    Raises:
        ValueError: when the band is empty or does not hold 1.
    """

    ratio_low: float = 0.5
    ratio_high: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.ratio_low <= 1 <= self.ratio_high:
            raise ValueError(
                f"TokenMIS needs 0 <= ratio_low <= 1 <= ratio_high, got {self.ratio_low} and {self.ratio_high}; "
                "otherwise tokens without mismatch would be rejected"
            )

    def __call__(self, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> CorrectionOutput:
        """Weights in ``[ratio_low, ratio_high]``, or 0 where ``keep`` is false."""
        rho = _exp(_log_ratio(old_logprobs, behavior_logprobs, mask))
        below, above = rho < self.ratio_low, rho > self.ratio_high
        metrics = _metrics(old_logprobs, behavior_logprobs, mask, cut_low=below, cut_high=above)
        return CorrectionOutput(rho.masked_fill(below | above, 0), mask & ~below & ~above, metrics=metrics)


def _log_ratio(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]`` raw ``log rho``, detached; 0 outside the mask."""
    return (old_logprobs.detach().float() - behavior_logprobs.detach().float()).masked_fill(~mask, 0)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _metrics(
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cut_low: Tensor | None = None,
    cut_high: Tensor | None = None,
    widened: Tensor | None = None,
) -> dict[str, Ratio]:
    """Mismatch and, always under the same names, the share of tokens that a correction touched."""
    none = torch.zeros_like(mask)
    return mismatch_metrics(old_logprobs, behavior_logprobs, mask) | {
        "correction/truncated_low_fraction": masked_ratio(none if cut_low is None else cut_low, mask),
        "correction/truncated_high_fraction": masked_ratio(none if cut_high is None else cut_high, mask),
        "acr/active_fraction": masked_ratio(none if widened is None else widened, mask),
    }


def _check_cap(owner: str, cap: float) -> None:
    if cap <= 0:
        raise ValueError(f"{owner}.cap must be positive, got {cap}; 2.0 is the usual cap, NoCorrection switches it off")
