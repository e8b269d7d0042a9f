"""Estimators of the KL divergence from sampled tokens, and the penalty that keeps a policy near its reference.

The estimators take ``x = log p - log q`` of tokens drawn from ``p`` and average to ``KL(p || q)`` (k2 approximately).
Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lqrl.algorithms.reduce import Reduction, masked_ratio
from lqrl.types import LossOutput

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus or minus this before ``exp``: e^20 is 5e8, far outside any clip range, and finite."""

_SERIES_BELOW = 0.25
"""Under this |x| five terms of k3's series are right to 4e-7, while ``expm1(-x) + x`` cancels."""


def k1(x: Tensor) -> Tensor:
    """``x``: unbiased, of either sign, high variance."""
    return x


def k2(x: Tensor) -> Tensor:
    """``x^2 / 2``: biased but small in variance; its gradient is the unbiased one of ``KL(p || q)``."""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """``exp(-x) - 1 + x``: unbiased and never negative; accurate for every ``x`` in fp32.

    Written out in fp32, ``exp(-x) - 1 + x`` is 0 at ``x = 1e-4`` and noise below; aligned engines live there.
    """
    x = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # x^2/2 - x^3/6 + x^4/24 - x^5/120 + x^6/720
    series = x.square() / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6))))
    return torch.where(x.abs() < _SERIES_BELOW, series, torch.expm1(-x) + x)


@dataclass(frozen=True)
class KLPenalty:
    """Adds ``coefficient * KL(policy || reference)`` to the loss, estimated a token.

    As a differentiated loss the estimators are not interchangeable: the gradient of k2 averages to that of
    ``KL(policy || reference)``, the gradient of k3 to that of the other direction, ``KL(reference || policy)`` (the
    usual choice, GRPO, arXiv 2402.03300, eq. 4), and the gradient of k1 to zero. k1 is therefore refused here; it
    belongs in the reward.

    Attributes:
        coefficient: weight of the penalty.
        estimator: ``k2`` or ``k3``.

    Raises:
        ValueError: for another estimator or a negative coefficient.
    """

    coefficient: float
    estimator: Literal["k2", "k3"] = "k3"

    def __post_init__(self) -> None:
        if self.coefficient < 0:
            raise ValueError(f"KLPenalty.coefficient must be >= 0, got {self.coefficient}")
        if self.estimator == "k1":
            raise ValueError("KLPenalty: k1's gradient averages to 0; use k2 or k3, or subtract k1 from the reward")
        if self.estimator not in ("k2", "k3"):
            raise ValueError(f"KLPenalty.estimator must be k2 or k3, got {self.estimator!r}")

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, denom: Tensor, reduction: Reduction
    ) -> LossOutput:
        """Penalty of ``[B, T]`` log-probs, reduced like the policy loss that it is added to.

        Args:
            logprobs: ``[B, T]`` the policy's, differentiable.
            ref_logprobs: ``[B, T]`` the reference model's.
            mask: ``[B, T]`` bool, trained tokens.
            denom: see `Reduction`.
            reduction: the policy loss's.

        Returns:
            The loss; ``kl/ref_k1`` and ``kl/ref_k3`` a trained token.
        """
        x = (logprobs.float() - ref_logprobs.float()).masked_fill(~mask, 0)
        token_kl = k2(x) if self.estimator == "k2" else k3(x)
        with torch.no_grad():
            metrics = {"kl/ref_k1": masked_ratio(k1(x), mask), "kl/ref_k3": masked_ratio(k3(x), mask)}
        return LossOutput(self.coefficient * reduction(token_kl, mask, denom=denom), metrics)
