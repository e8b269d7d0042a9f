"""Keys and values as a low-bit cache holds them, and as it gives them back: the rules of `lqrl.quant.numerics.kv`.

The embedded engine's kernels store codes by these functions; a learner that reads through the cache's rounding takes
`round_trip`, one pass over its keys instead of one for each step of the rule. Bits are those of the eager code.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.numerics.kv import KV_SCALE_FLOOR
from lqrl.quant.triton_casts import from_e4m3, to_bf16, to_e4m3, to_integer
from lqrl.quant.triton_use import power_of_two, tiles

if TYPE_CHECKING:
    from lqrl.quant.kv import KVCacheMethod

PLAIN, INT8, FP8, LAYER = (tl.constexpr(kind) for kind in range(4))
"""Codes: none, int8 or e4m3 with a scale for each token and head, e4m3 with one for the layer."""
_FLOOR = tl.constexpr(KV_SCALE_FLOOR)
_ELEMENTS = 2048  # of a program


def kind_of(method: KVCacheMethod | None) -> int:
    """Which codes the kernels make for a cache of this format."""
    if method is None:
        return PLAIN.value
    if not method.per_token:
        return LAYER.value
    return INT8.value if method.code_dtype == torch.int8 else FP8.value


@triton.jit
def row_scales(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The scale of each row of fp32 ``x``, 0 beyond its columns; NaN where an element is NaN or inf."""
    # Bits of magnitudes are ordered as the numbers are, NaN above inf.
    magnitude = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    amax = magnitude.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.math.div_rn(amax, 127.0 if KIND == INT8 else 448.0), _FLOOR)
    return tl.where(magnitude >= 0x7F800000, float("nan"), scale)


@triton.jit
def codes_of(x: tl.tensor, scale: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Codes of fp32 ``x``, int8 or the bits of e4m3; ``scale`` has one element for each row."""
    if KIND == INT8:
        codes = to_integer(x * tl.math.div_rn(1.0, scale)[:, None])
        return tl.where((scale == scale)[:, None], codes, 0).to(tl.int8)
    elif KIND == FP8:
        codes = to_e4m3(x * tl.math.div_rn(1.0, scale)[:, None])
        return tl.where((scale == scale)[:, None], codes, 0x7F).to(tl.uint8)
    else:
        finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        return tl.where(finite, to_e4m3(tl.math.div_rn(x, scale[:, None])), 0x7F).to(tl.uint8)


@triton.jit
def _round_trip(
    x_ptr, out_ptr, scale_ptr, rows,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BF16: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    offsets = row[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = tl.zeros((BR,), tl.float32) + tl.load(scale_ptr) if KIND == LAYER else row_scales(x, KIND)
    codes = codes_of(x, scale, KIND)
    x = (codes.to(tl.float32) if KIND == INT8 else from_e4m3(codes)) * scale[:, None]
    tl.store(out_ptr + offsets, to_bf16(x) if BF16 else x, mask=mask)


def round_trip(x: Tensor, method: KVCacheMethod, scale: Tensor) -> Tensor:
    """What `KVCacheMethod.round_trip` gives, in one pass; laid out as ``x`` is where its heads are in one piece.

    Args:
        x: ``[..., D]`` fp32 or bf16.
        method: of the cache.
        scale: of one element, for a method whose layers have one; others do not look at it.
    """
    # In the order in which heads lie: models hand out transposed views.
    order = sorted(range(x.dim() - 1), key=lambda dim: -x.stride(dim))
    back = [order.index(dim) for dim in range(x.dim() - 1)]
    flat = x.permute(*order, -1).contiguous()
    out, width, kind = torch.empty_like(flat), x.shape[-1], kind_of(method)
    if flat.numel():
        rows, block = flat.numel() // width, power_of_two(width)
        together = max(1, _ELEMENTS // block)
        with torch.cuda.device_of(x):
            _round_trip[(tiles(rows, together),)](
                flat, out, scale.to(x.device, torch.float32).contiguous() if kind == LAYER.value else None, rows,
                WIDTH=width, KIND=kind, BF16=x.dtype == torch.bfloat16, BR=together, BLOCK=block,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out.permute(*back, -1)
