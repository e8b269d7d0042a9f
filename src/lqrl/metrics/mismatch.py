"""Distance between the engine that sampled and the learner that scores, over batches and ranks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from lqrl.algorithms.kl import k1, k3


class MismatchKL(Metric):
    """Token mean of ``KL(behavior || old)``, estimated by k1 or k3.

    Args:
        estimator: ``k3`` is never negative and has the smaller variance.

    Raises:
        ValueError: for another estimator.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    total: Tensor
    tokens: Tensor

    def __init__(self, estimator: Literal["k1", "k3"] = "k3") -> None:
        super().__init__()
        if estimator not in ("k1", "k3"):
            raise ValueError(f"MismatchKL.estimator must be k1 or k3, got {estimator!r}")
        self.estimator = estimator
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> None:
        """Add the ``[B, T]`` tokens where the bool ``mask`` is true."""
        x = behavior_logprobs.float()[mask] - old_logprobs.float()[mask]
        self.total += (k1(x) if self.estimator == "k1" else k3(x)).double().sum()
        self.tokens += mask.sum()

    def compute(self) -> Tensor:
        """A scalar in nats a token; 0 before the first token."""
        return (self.total / self.tokens.clamp_min(1)).float()


class EffectiveSampleSize(Metric):
    """``(sum w)^2 / (n * sum w^2)``: the share of ``n`` samples that importance weights ``w`` leave (1 if equal)."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    weight: Tensor
    square: Tensor
    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("square", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, weights: Tensor, mask: Tensor) -> None:
        """Add the ``weights`` (any shape, not truncated) where the bool ``mask`` is true."""
        kept = weights.double()[mask]
        self.weight += kept.sum()
        self.square += kept.square().sum()
        self.samples += mask.sum()

    def compute(self) -> Tensor:
        """A scalar in [0, 1]; 0 before the first sample."""
        tiny = torch.finfo(torch.float64).tiny
        return (self.weight.square() / (self.samples * self.square).clamp_min(tiny)).float()
