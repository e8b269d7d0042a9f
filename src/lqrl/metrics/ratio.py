"""Means that are exact over micro-batches and ranks, because sums and counts are kept apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lqrl.types import Ratio


class MeanRatio(Metric):
    """Accumulates a `Ratio`: the sum of all totals over the sum of all counts."""

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, ratio: Ratio) -> None:
        """Add one ratio."""
        self.total += ratio.total.double()
        self.count += ratio.count.double()

    def compute(self) -> Tensor:
        """A scalar; 0 when nothing was counted."""
        return Ratio(self.total, self.count).value.float()


class TokenFraction(MeanRatio):
    """Share of trained tokens with a property: clipped, truncated, ACR active."""

    def update(self, flags: Tensor, mask: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add the ``[B, T]`` bool ``flags`` where the bool ``mask`` is true."""
        super().update(Ratio((flags & mask).sum(), mask.sum()))
