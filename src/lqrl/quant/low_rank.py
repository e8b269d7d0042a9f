"""The low-rank path beside a linear layer: one arithmetic for learner and engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lqrl.quant import exact as exact_rows


class _ExactLinear(torch.autograd.Function):
    """``x @ weight.T`` in one order of summation; the gradient of the plain product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return exact_rows.linear(x, exact_rows.pack(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        d_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return d_x, rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None


def low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, exact: bool = False) -> Tensor:
    """``y + (x @ a.T @ b.T) * scaling``, each step rounded to the dtype of ``x``, in the order that peft has.

    Args:
        y: ``[..., N]``, the layer's own output.
        x: ``[..., K]``, its input.
        a: ``[r, K]``.
        b: ``[N, r]``.
        scaling: ``alpha / r``.
        exact: a row's bits depend on that row alone, see `lqrl.modeling.exact`.
    """
    if exact:
        narrow: Tensor = _ExactLinear.apply(x, a)
        return y + _ExactLinear.apply(narrow, b) * scaling
    return y + F.linear(F.linear(x, a), b) * scaling


class Factor(nn.Module):
    """One factor of an engine's low-rank path: a buffer ``weight``, zero until it is loaded."""

    weight: Tensor

    def __init__(self, rows: int, columns: int, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(rows, columns, dtype=like.dtype, device=like.device))
