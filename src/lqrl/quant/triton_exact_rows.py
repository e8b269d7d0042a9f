"""Norms and SiLU of exact mode on CUDA.

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
from lqrl.quant.triton_use import power_of_two, tiles

_TILE = 2048  # elements of a program, where a row has fewer
_WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x_ptr, weight_ptr, out_ptr, inverse_ptr, rows, eps,
    WIDTH: tl.constexpr, BF16: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    offsets = row[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    mean = tl.math.div_rn(tl.sum(x * x, 1), WIDTH * 1.0)
    inverse = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    normed = x * inverse[:, None]
    if BF16:
        normed = rounded_to_bf16(normed)
    out = normed * weight[None, :]
    tl.store(out_ptr + offsets, to_bf16(out) if BF16 else out, mask=mask)


@triton.jit
def _silu(x_ptr, out_ptr, size, BF16: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    out = tl.math.div_rn(x, 1.0 + tl.exp(-x))
    tl.store(out_ptr + offsets, to_bf16(out) if BF16 else out, mask=offsets < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`lqrl.quant.exact.rms_norm` of contiguous tensors."""
    width = x.shape[-1]
    out, inverse = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    block, rows = power_of_two(width), inverse.numel()
    together = max(1, _TILE // block)
    if rows and width:
        with torch.cuda.device_of(x):
            _rms_norm[(tiles(rows, together),)](
                _aligned(x), _aligned(weight), out, inverse, rows, eps,
                WIDTH=width, BF16=x.dtype == torch.bfloat16, ROWS=together, BLOCK=block,
                num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out, inverse


def silu(x: Tensor) -> Tensor:
    """`lqrl.quant.exact.silu` of a contiguous tensor."""
    out, block = torch.empty_like(x), 1024
    if x.numel():
        with torch.cuda.device_of(x):
            _silu[(tiles(x.numel(), block),)](
                x, out, x.numel(), BF16=x.dtype == torch.bfloat16, BLOCK=block,
                num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % 16 == 0 else x.clone()
