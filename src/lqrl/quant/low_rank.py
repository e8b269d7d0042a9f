"""The low-rank path beside a linear layer: one arithmetic for learner and engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """``y + (x @ a.T @ b.T) * scaling``, each step rounded to the dtype of ``x``, in the order that peft has.

    Args:
        y: ``[..., N]``, the layer's own output.
        x: ``[..., K]``, its input.
        a: ``[r, K]``.
        b: ``[N, r]``.
        scaling: ``alpha / r``.
    """
    return y + F.linear(F.linear(x, a), b) * scaling


class Factor(nn.Module):
    """One factor of an engine's low-rank path: a buffer ``weight``, zero until it is loaded."""

    weight: Tensor

    def __init__(self, rows: int, columns: int, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(rows, columns, dtype=like.dtype, device=like.device))
