"""Norms and SiLU of exact mode on CUDA, alone or with the sum before and the product after them.

The squares of a row are added in an order that its width alone decides: one compiled kernel a width and dtype, whose
tensors always begin at a multiple of 16 bytes, because the compiler gives other elements to a thread where they do not.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.triton_casts import rounded_to_bf16, to_bf16
from lqrl.quant.triton_overlap import next_may_begin
from lqrl.quant.triton_use import power_of_two, tiles

_TILE = 2048  # elements of a program, where a row has fewer
WARPS = 4
"""Of every program; the order of sums depends on it."""


@triton.jit
def norm_factor(x: tl.tensor, eps: float, WIDTH: tl.constexpr) -> tl.tensor:
    """``1 / sqrt(mean(x^2) + eps)`` of each row of fp32 ``[ROWS, BLOCK]``, 0 beyond its ``WIDTH``."""
    mean = tl.math.div_rn(tl.sum(x * x, 1), WIDTH * 1.0)
    return tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))


@triton.jit
def normed_rows(
    x_ptr: tl.tensor, delta_ptr: tl.tensor, sum_ptr: tl.tensor, weight_ptr: tl.tensor, inverse_ptr: tl.tensor,
    row: tl.tensor, rows: int, eps: float,
    WIDTH: tl.constexpr, ADD: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The norm of some rows, fp32 ``[ROWS, BLOCK]`` before the last rounding; their factors are kept.

    ``ADD``: of the rounded sum of ``x`` and ``delta``, which is kept too.
    """
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    offsets = row[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if BF16:
            x = rounded_to_bf16(x)
        tl.store(sum_ptr + offsets, to_bf16(x) if BF16 else x, mask=mask)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    inverse = norm_factor(x, eps, WIDTH)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    normed = x * inverse[:, None]
    if BF16:
        normed = rounded_to_bf16(normed)
    return normed * weight[None, :]


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x_ptr, delta_ptr, sum_ptr, weight_ptr, out_ptr, inverse_ptr, rows, eps,
    WIDTH: tl.constexpr, ADD: tl.constexpr, BF16: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    next_may_begin()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = normed_rows(
        x_ptr, delta_ptr, sum_ptr, weight_ptr, inverse_ptr, row, rows, eps, WIDTH, ADD, BF16, BLOCK
    )  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], to_bf16(out) if BF16 else out, mask=mask)


@triton.jit
def gated(
    x_ptr: tl.tensor, up_ptr: tl.tensor, column: tl.tensor, width: int, GATED: tl.constexpr, BF16: tl.constexpr
) -> tl.tensor:
    """SiLU of the columns of one row, fp32 before the last rounding; ``GATED``: times ``up``, after rounding."""
    mask = column < width
    x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out = tl.math.div_rn(x, 1.0 + tl.exp(-x))
    if GATED:
        if BF16:
            out = rounded_to_bf16(out)
        out *= tl.load(up_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return out


@triton.jit
def _silu(
    x_ptr, x_stride, up_ptr, up_stride, out_ptr, width, GATED: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    next_may_begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = gated(x_ptr + row * x_stride, up_ptr + row * up_stride, column, width, GATED, BF16)
    tl.store(out_ptr + row * width + column, to_bf16(out) if BF16 else out, mask=column < width)


def rows_together(block: int) -> int:
    """Rows of ``block`` elements that one program norms."""
    return max(1, _TILE // block)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`lqrl.quant.exact.rms_norm` of contiguous tensors."""
    _, out, inverse = _norm(x, None, weight, eps)
    return out, inverse


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`lqrl.quant.exact.add_rms_norm` of contiguous tensors."""
    total, out, _ = _norm(x, delta, weight, eps)
    return total, out


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, which is ``x`` without ``delta``; the normed rows; and their factors."""
    width = x.shape[-1]
    out, inverse = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    total = x if delta is None else torch.empty_like(x)
    block, rows = power_of_two(width), inverse.numel()
    together = rows_together(block)
    if rows and width:
        with torch.cuda.device_of(x):
            _rms_norm[(tiles(rows, together),)](
                aligned(x), aligned(x if delta is None else delta), total, aligned(weight), out, inverse, rows, eps,
                WIDTH=width, ADD=delta is not None, BF16=x.dtype == torch.bfloat16, ROWS=together, BLOCK=block,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return total, out, inverse


def silu(x: Tensor) -> Tensor:
    """`lqrl.quant.exact.silu` of a contiguous tensor."""
    if not x.numel():
        return torch.empty_like(x)
    return _gated(x.view(-1, x.shape[-1] if x.ndim else 1), None).view(x.shape)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`lqrl.quant.exact.silu_mul` of ``[M, N]`` tensors with elements of a row side by side."""
    return _gated(gate, up)


def _gated(gate: Tensor, up: Tensor | None) -> Tensor:
    (rows, width), block = gate.shape, 1024
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    other = gate if up is None else up
    if out.numel():
        with torch.cuda.device_of(gate):
            _silu[(rows, tiles(width, block))](
                gate, gate.stride(0), other, other.stride(0), out, width,
                GATED=up is not None, BF16=gate.dtype == torch.bfloat16, BLOCK=block,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy of it that begins at a multiple of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
