"""Triton quantizers: one pass over rows, groups, blocks or a tensor, with the bits of `lqrl.quant.numerics`.

Inputs are fp32 or bf16; bf16 is read as bit patterns. The rules and the results at the edges (zeros, NaN, inf) are
those of the eager functions; only the sign of a NaN code is not promised. Fused multiply-adds are off: each product
and each quotient is rounded as eager torch rounds it.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.numerics.amax import amax_cap
from lqrl.quant.numerics.fp8 import (
    FP8_BLOCK,
    FP8_BLOCK_AMAX_FLOOR,
    FP8_GROUP_AMAX_FLOOR,
    FP8_SCALE_FLOOR,
    FP8_TENSOR_AMAX_FLOOR,
)
from lqrl.quant.numerics.int4 import INT4_SCALE_FLOOR
from lqrl.quant.triton_casts import from_bf16, quotient, rounded_to_bf16, to_bf16, to_e4m3, to_integer
from lqrl.quant.triton_overlap import next_may_begin
from lqrl.quant.triton_use import power_of_two, tiles

WIDEST = 32768  # a longer row is read twice instead of kept in registers
_CHUNK = 4096  # elements of one program of the group and tensor kernels
_INF = tl.constexpr(float("inf"))
_FP32_MAX = tl.constexpr(3.4028234663852886e38)
_FP32_CAP = tl.constexpr(amax_cap(torch.float32))
_BF16_CAP = tl.constexpr(amax_cap(torch.bfloat16))
NAN_CODE = tl.constexpr(0x7F)


@triton.jit
def _values(pointer, mask, BF16: tl.constexpr, ROUND: tl.constexpr = False):
    """``ROUND``: fp32 to bf16 first."""
    x = tl.load(pointer, mask=mask, other=0)
    if BF16:
        x = from_bf16(x)
    elif ROUND:
        x = rounded_to_bf16(x)
    return x


@triton.jit
def magnitude(x: tl.tensor, axis: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Largest magnitude, and whether it is NaN or inf: magnitudes are ordered as their bits, NaN above inf."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    return bits.to(tl.float32, bitcast=True), bits >= 0x7F800000


@triton.jit
def _int8_scales(amax, bad, largest, floor):
    """The scale, and what the values are multiplied by."""
    amax = tl.minimum(tl.maximum(amax, floor), _FP32_CAP)
    scale = tl.where(bad, float("nan"), tl.math.div_rn(amax, largest))
    return scale, tl.minimum(tl.math.div_rn(largest, amax), _FP32_MAX)


@triton.jit
def _fp8_scale(amax, bad, floor):
    return tl.where(bad, float("nan"), tl.maximum(tl.math.div_rn(amax, 448.0), floor))


@triton.jit
def row_scale(
    amax: tl.tensor, bad: tl.tensor, largest: float, floor: float, FP8: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The scale of rows with this magnitude, see `magnitude`, and what `row_codes` takes besides."""
    if FP8:
        scale = _fp8_scale(amax, bad, floor)
        return scale, scale
    else:
        return _int8_scales(amax, bad, largest, floor)


@triton.jit
def row_codes(x: tl.tensor, scale: tl.tensor, factor: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    """Codes of finite values; the scale is known to fit them."""
    if FP8:
        return to_e4m3(quotient(x, scale), False)
    else:
        return to_integer(x * factor).to(tl.int8)


@triton.jit
def quantize_row(
    x_ptr: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor, columns: int, largest: float, floor: float,
    FP8: tl.constexpr, BF16: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr,
) -> None:  # fmt: skip
    """One row of a kernel; ``REST`` further parts of it are read twice. ``ROUND``: fp32 to bf16 first."""
    offsets = tl.arange(0, BLOCK)
    values_ptr = x_ptr + offsets
    first_ptr = codes_ptr + offsets
    if ALIGNED:  # to 16 bytes, which the compiler cannot see in an address from a table
        values_ptr = tl.multiple_of(values_ptr, 16)
        first_ptr = tl.multiple_of(first_ptr, 16)
    x = _values(values_ptr, offsets < columns, BF16, ROUND)
    amax, bad = magnitude(x, 0)
    for index in range(REST):
        part = (index + 1) * BLOCK + offsets
        part_amax, part_bad = magnitude(_values(x_ptr + part, part < columns, BF16, ROUND), 0)
        amax = tl.maximum(amax, part_amax)
        bad = bad | part_bad
    scale, factor = row_scale(amax, bad, largest, floor, FP8)
    tl.store(scale_ptr, scale)
    if bad:  # a branch of the whole program costs less than a choice for each element
        code = tl.full((BLOCK,), NAN_CODE if FP8 else 0, tl.uint8 if FP8 else tl.int8)
        for index in range(REST + 1):
            part = index * BLOCK + offsets
            tl.store(codes_ptr + part, code, mask=part < columns)
    else:
        tl.store(first_ptr, row_codes(x, scale, factor, FP8), mask=offsets < columns)
        for index in range(REST):
            part = (index + 1) * BLOCK + offsets
            x = _values(x_ptr + part, part < columns, BF16, ROUND)
            tl.store(codes_ptr + part, row_codes(x, scale, factor, FP8), mask=part < columns)


@triton.jit
def _rows(
    x_ptr, codes_ptr, scale_ptr, columns, stride, largest, floor,
    FP8: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    next_may_begin()
    row = tl.program_id(0).to(tl.int64)
    quantize_row(
        x_ptr + row * stride, codes_ptr + row * columns, scale_ptr + row, columns, largest, floor,
        FP8, BF16, False, False, BLOCK, REST,
    )  # fmt: skip


@triton.jit
def _groups(
    x_ptr, codes_ptr, scale_ptr, columns, stride, groups, floor,
    SIZE: tl.constexpr, BF16: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offsets = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = _values(x_ptr + row * stride + offsets, offsets < columns, BF16)
    amax, bad = magnitude(x, 1)
    scale = _fp8_scale(tl.maximum(amax, floor), bad, 0.0)
    tl.store(scale_ptr + row * groups + group, scale, mask=group < groups)
    codes = tl.where(bad[:, None], NAN_CODE, row_codes(x, scale[:, None], 1.0, True)).to(tl.uint8)
    tl.store(codes_ptr + row * columns + offsets, codes, mask=offsets < columns)


@triton.jit
def _int4_groups(
    x_ptr, packed_ptr, scale_ptr, columns, stride, groups, largest, floor,
    SIZE: tl.constexpr, BF16: tl.constexpr, SCALE_BF16: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offsets = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = _values(x_ptr + row * stride + offsets, offsets < columns, BF16)
    amax, bad = magnitude(x, 1)
    cap = tl.full((GROUPS,), _BF16_CAP if SCALE_BF16 else _FP32_CAP, tl.float32)
    scale = tl.maximum(tl.math.div_rn(tl.minimum(amax, cap), largest), floor)
    if SCALE_BF16:
        scale = rounded_to_bf16(scale)
        tl.store(scale_ptr + row * groups + group, to_bf16(tl.where(bad, float("nan"), scale)), mask=group < groups)
    else:
        tl.store(scale_ptr + row * groups + group, tl.where(bad, float("nan"), scale), mask=group < groups)
    steps = tl.minimum(tl.maximum(quotient(x, scale[:, None]), -largest), largest)
    codes = tl.where(bad[:, None], 8, to_integer(steps) + 8)
    words = tl.reshape(codes, (GROUPS, SIZE // 8, 8)) << (tl.arange(0, 8) * 4)[None, None, :]
    word = group[:, None] * (SIZE // 8) + tl.arange(0, SIZE // 8)[None, :]
    tl.store(packed_ptr + row * (columns // 8) + word, tl.sum(words, 2), mask=word < columns // 8)


@triton.jit
def _blocks(
    x_ptr, codes_ptr, scale_ptr, rows, columns, stride, floor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = _values(x_ptr + row[:, None] * stride + column[None, :], mask, BF16)
    by_row, bad_rows = magnitude(x, 1)
    amax, bad = tl.max(by_row, 0), tl.max(bad_rows.to(tl.int32), 0) != 0
    scale = _fp8_scale(tl.maximum(amax, floor), bad, 0.0)
    tl.store(scale_ptr + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1), scale)
    codes = tl.where(bad, NAN_CODE, to_e4m3(x * tl.math.div_rn(1.0, scale))).to(tl.uint8)
    tl.store(codes_ptr + row[:, None] * columns + column[None, :], codes, mask=mask)


@triton.jit
def _whole(x_ptr, amax_ptr, codes_ptr, scale_ptr, elements, floor, BF16: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = _values(x_ptr + offsets, offsets < elements, BF16)
    amax = tl.load(amax_ptr)
    bad = (amax < _INF) == 0
    scale = _fp8_scale(tl.maximum(amax, floor), bad, 0.0)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    codes = tl.where(bad | (x != x), NAN_CODE, to_e4m3(x * tl.math.div_rn(1.0, scale))).to(tl.uint8)
    tl.store(codes_ptr + offsets, codes, mask=offsets < elements)


def _matrix(x: Tensor) -> tuple[Tensor, bool]:
    """``x`` as rows with elements side by side, bf16 as bits; and whether it is bf16."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] != 1:
        rows = rows.contiguous()
    return (rows.view(torch.int16), True) if x.dtype == torch.bfloat16 else (rows, False)


def row_warps(elements: int) -> int:
    """Warps of a program that holds so many elements."""
    return min(max(elements // 1024, 1), 16)


def _quantize_rows(x: Tensor, codes: Tensor, largest: float, floor: float, widest: int) -> Tensor:
    rows, bf16 = _matrix(x)
    scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    m, k = rows.shape
    block = min(power_of_two(k), widest)
    if m:
        with torch.cuda.device_of(x):
            _rows[(m,)](
                rows, codes, scale, k, rows.stride(0), float(largest), float(floor),
                FP8=codes.dtype == torch.uint8, BF16=bf16, BLOCK=block, REST=tiles(k, block) - 1,
                num_warps=row_warps(block), enable_fp_fusion=False,
            )  # fmt: skip
    return scale


def quantize_int8_rows(x: Tensor, largest: float, floor: float, widest: int = WIDEST) -> tuple[Tensor, Tensor]:
    """Rule of `numerics.int8`, one scale a row.

    Args:
        x: ``[..., K]`` fp32 or bf16, K at least 1.
        largest: largest code.
        floor: smallest amax; 0 for tokens.
        widest: longest row that is kept in registers, a power of two.

    Returns:
        Codes ``[..., K]`` int8 and scales ``[..., 1]`` fp32.
    """
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    return codes, _quantize_rows(x, codes, largest, floor, widest)


def quantize_fp8_rows(x: Tensor, widest: int = WIDEST) -> tuple[Tensor, Tensor]:
    """Rule of `numerics.fp8` for channels and tokens: codes ``[..., K]`` e4m3 and scales ``[..., 1]`` fp32."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = _quantize_rows(x, codes, 0.0, FP8_SCALE_FLOOR, widest)
    return codes.view(torch.float8_e4m3fn), scale


def quantize_fp8_group(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_fp8_group` for a ``group_size`` that is a power of two."""
    rows, bf16 = _matrix(x)
    m, k = rows.shape
    groups = tiles(k, group_size)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(*x.shape[:-1], groups, dtype=torch.float32, device=x.device)
    together = min(power_of_two(groups), max(_CHUNK // group_size, 1))
    if m:
        with torch.cuda.device_of(x):
            _groups[(m, tiles(groups, together))](
                rows, codes, scale, k, rows.stride(0), groups, FP8_GROUP_AMAX_FLOOR,
                SIZE=group_size, BF16=bf16, GROUPS=together,
                num_warps=row_warps(together * group_size), enable_fp_fusion=False,
            )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scale


def quantize_int4_group(
    weight: Tensor, group_size: int, scale_dtype: torch.dtype, largest: float
) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_int4_group` and `pack_int4` in one pass.

    Args:
        weight: ``[N, K]`` fp32 or bf16, K a multiple of ``group_size``.
        group_size: a power of two, at least 8.
        scale_dtype: fp32 or bf16.
        largest: largest code.

    Returns:
        int32 ``[N, K / 8]`` and scales ``[N, K / group_size]`` in ``scale_dtype``.
    """
    rows, bf16 = _matrix(weight)
    n, k = rows.shape
    groups = k // group_size
    packed = torch.empty(n, k // 8, dtype=torch.int32, device=weight.device)
    scale = torch.empty(n, groups, dtype=scale_dtype, device=weight.device)
    together = min(power_of_two(groups), max(_CHUNK // group_size, 1))
    if n:
        with torch.cuda.device_of(weight):
            _int4_groups[(n, tiles(groups, together))](
                rows, packed, scale, k, rows.stride(0), groups, float(largest), INT4_SCALE_FLOOR,
                SIZE=group_size, BF16=bf16, SCALE_BF16=scale_dtype == torch.bfloat16, GROUPS=together,
                num_warps=row_warps(together * group_size), enable_fp_fusion=False,
            )  # fmt: skip
    return packed, scale


def quantize_fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_fp8_block` for blocks of 128 x 128."""
    rows, bf16 = _matrix(weight)
    n, k = rows.shape
    grid = (tiles(n, FP8_BLOCK[0]), tiles(k, FP8_BLOCK[1]))
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(grid, dtype=torch.float32, device=weight.device)
    if n:
        with torch.cuda.device_of(weight):
            _blocks[grid](
                rows, codes, scale, n, k, rows.stride(0), FP8_BLOCK_AMAX_FLOOR,
                ROWS=FP8_BLOCK[0], COLUMNS=FP8_BLOCK[1], BF16=bf16, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scale


def quantize_fp8_tensor(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_fp8_tensor` with a given magnitude: codes like ``x`` and the scale, fp32 ``[1]``."""
    flat = x.detach().contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    bf16 = x.dtype == torch.bfloat16
    with torch.cuda.device_of(x):
        _whole[(max(tiles(x.numel(), _CHUNK), 1),)](
            flat.view(torch.int16) if bf16 else flat, amax.float().reshape(1), codes, scale, x.numel(),
            FP8_TENSOR_AMAX_FLOOR, BF16=bf16, BLOCK=_CHUNK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scale
