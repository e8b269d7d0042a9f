"""Products with packed low-bit weights: dequantized inside the GEMM for few rows, or all at once for many.

A value is ``code * scale`` in fp32, rounded once to the compute dtype: the bits of `lqrl.quant.numerics`. The fused
product adds in fp32; how K is split depends on the weight's shape alone, so a row's sums do not depend on the batch.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.packed import PackedWeight
from lqrl.quant.triton_casts import EMULATED, from_bf16, from_e2m1, from_e4m3, from_e8m0, rounded_to_bf16, to_bf16
from lqrl.quant.triton_use import tiles

_FORMATS = {"int8": 0, "int4": 1, "nvfp4": 2, "mxfp4": 3}
_INT8 = tl.constexpr(0)
_INT4 = tl.constexpr(1)
_NVFP4 = tl.constexpr(2)

FUSED_ROWS = 64
"""Most rows that `linear` is for; more are faster with the weight dequantized first."""

_PROGRAMS = 264  # two for each multiprocessor of an H100; a constant, so that sums do not depend on the card
_LEAST_STEPS = 4  # tiles along K that make a split worth its partial sums


@dataclass(frozen=True)
class DecodeTile:
    """How the fused product is cut: ``n`` outputs by ``k`` inputs a step; powers of two."""

    n: int
    k: int
    warps: int
    stages: int


# (largest M, tile); starting values, `benchmarks/low_bit_gemm.py` times the candidates.
TILES: list[tuple[int, DecodeTile]] = [
    (16, DecodeTile(64, 128, 4, 4)),
    (64, DecodeTile(64, 128, 4, 4)),
]


@triton.jit
def _decoded(code, FORMAT: tl.constexpr):
    if FORMAT == _INT4:
        # The bits of 2**23 plus the code: an exact conversion in two operations.
        value = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    else:
        value = from_e2m1(code)
    return value


@triton.jit
def dequantized_tile(
    codes_ptr: tl.tensor, scale_ptr: tl.tensor, global_ptr: tl.tensor, rows: tl.tensor, start: tl.tensor, n: tl.tensor,
    K: tl.constexpr, FORMAT: tl.constexpr, SIZE: tl.constexpr, SCALE_BF16: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """fp32 values of ``rows`` (int64 ``[BN]``) and BK inputs from ``start``; 0 outside the weight."""
    within = (rows < n)[:, None]
    if FORMAT == _INT8:
        column = start + tl.arange(0, BK)
        mask = within & (column < K)[None, :]
        codes = tl.load(codes_ptr + rows[:, None] * K + column[None, :], mask=mask, other=0)
        scale = tl.load(scale_ptr + rows, mask=rows < n, other=0)
        if SCALE_BF16:
            scale = from_bf16(scale)
        values = codes.to(tl.float32) * scale[:, None]
    else:
        half: tl.constexpr = BK // 2
        column = start // 2 + tl.arange(0, half)
        mask = within & (column < K // 2)[None, :]
        pair = tl.load(codes_ptr + rows[:, None] * (K // 2) + column[None, :], mask=mask, other=0)
        low, high = _decoded(pair & 15, FORMAT), _decoded(pair >> 4, FORMAT)
        groups: tl.constexpr = (BK + SIZE - 1) // SIZE
        group = start // SIZE + tl.arange(0, groups)
        mask = within & (group < K // SIZE)[None, :]
        scale = tl.load(scale_ptr + rows[:, None] * (K // SIZE) + group[None, :], mask=mask, other=0)
        if FORMAT == _INT4:
            if SCALE_BF16:
                scale = from_bf16(scale)
        elif FORMAT == _NVFP4:
            scale = tl.math.div_rn(from_e4m3(scale), tl.load(global_ptr))
        else:
            scale = from_e8m0(scale)
        values = tl.interleave(low, high)
        if groups == 1:
            values = values * scale
        else:
            values = tl.reshape(tl.reshape(values, (BN, groups, SIZE)) * scale[:, :, None], (BN, BK))
    return values


@triton.jit
def _unpack(
    codes_ptr, scale_ptr, global_ptr, out_ptr, n, K: tl.constexpr, BF16: tl.constexpr,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, SCALE_BF16: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    start = tl.program_id(1) * BK
    values = dequantized_tile(codes_ptr, scale_ptr, global_ptr, rows, start, n, K, FORMAT, SIZE, SCALE_BF16, BN, BK)
    column = start + tl.arange(0, BK)
    mask = (rows < n)[:, None] & (column < K)[None, :]
    tl.store(out_ptr + rows[:, None] * K + column[None, :], to_bf16(values) if BF16 else values, mask=mask)


@triton.jit
def _fused(
    x_ptr, codes_ptr, scale_ptr, global_ptr, bias_ptr, out_ptr, m, n, K: tl.constexpr,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, SCALE_BF16: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One split of K of ``W x.T``: the many outputs take the tensor core's tall side."""
    columns = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    rows = tl.program_id(2).to(tl.int64) * BM + tl.arange(0, BM)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for step in range(0, STEPS):
        start = (split * STEPS + step) * BK
        w = dequantized_tile(codes_ptr, scale_ptr, global_ptr, columns, start, n, K, FORMAT, SIZE, SCALE_BF16, BN, BK)
        inner = start + tl.arange(0, BK)
        mask = (rows < m)[:, None] & (inner < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] * K + inner[None, :], mask=mask, other=0.0)
        if EMULATED:  # the interpreter has no bf16 products
            acc = tl.dot(rounded_to_bf16(w), x.to(tl.float32).T, acc, input_precision="ieee")
        else:
            acc = tl.dot(to_bf16(w), x.T, acc)
    out_ptr += split.to(tl.int64) * m * n
    if BIAS:
        if BF16:
            acc = rounded_to_bf16(acc)
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0)[:, None]
    mask = (columns < n)[:, None] & (rows < m)[None, :]
    tl.store(out_ptr + rows[None, :] * n + columns[:, None], to_bf16(acc) if BF16 else acc, mask=mask)


@triton.jit
def _add_splits(
    parts_ptr, bias_ptr, out_ptr, size, n,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    acc = tl.load(parts_ptr + offsets, mask=mask, other=0.0)
    for split in range(1, SPLITS):
        acc += tl.load(parts_ptr + split * size + offsets, mask=mask, other=0.0)
    if BIAS:
        if BF16:
            acc = rounded_to_bf16(acc)
        acc += tl.load(bias_ptr + offsets % n, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, to_bf16(acc) if BF16 else acc, mask=mask)


def kernel_arguments(weight: PackedWeight) -> tuple[tuple[Tensor, Tensor, Tensor], int, bool]:
    """What the kernels read: codes, scales as bits where they are no fp32, global scale; format; bf16 scales."""
    scale = weight.scale
    bf16 = scale.dtype == torch.bfloat16
    if bf16:
        scale = scale.view(torch.int16)
    elif scale.dtype == torch.float8_e4m3fn:
        scale = scale.view(torch.uint8)
    whole = scale if weight.global_scale is None else weight.global_scale
    return (weight.codes, scale, whole), _FORMATS[weight.format], bf16


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight ``[N, K]`` in bf16 or fp32, each value rounded once."""
    n, k = weight.shape
    pointers, code, scale_bf16 = kernel_arguments(weight)
    out = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    size = weight.group_size if weight.format != "int8" else k
    bn, bk = 16, 256
    if n and k:
        with torch.cuda.device_of(out):
            _unpack[(tiles(n, bn), tiles(k, bk))](
                *pointers, out, n, K=k, BF16=dtype == torch.bfloat16, FORMAT=code, SIZE=size,
                SCALE_BF16=scale_bf16, BN=bn, BK=bk, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def splits_of(n: int, k: int, tile: DecodeTile) -> int:
    """Parts of K, so that a small weight has work for the whole card."""
    steps, programs = tiles(k, tile.k), tiles(n, tile.n)
    return max(1, min(_PROGRAMS // max(programs, 1), steps // _LEAST_STEPS))


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, tile: DecodeTile | None = None
) -> Tensor:
    """``x @ weight.T`` with the weight's values in bf16 and fp32 sums, then ``+ bias`` in ``dtype``.

    Args:
        x: bf16 ``[M, K]``; made for M up to `FUSED_ROWS`, right for any.
        bias: ``[N]`` or none.
        dtype: of the result, bf16 or fp32.
        tile: how the product is cut; default: what `TILES` says.
    """
    (m, k), (n, _) = x.shape, weight.shape
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m:
        return out
    x = x.contiguous()
    tile = next((t for most, t in TILES if m <= most), TILES[-1][1]) if tile is None else tile
    bm = 16 if m <= 16 else 32 if m <= 32 else 64
    pointers, code, scale_bf16 = kernel_arguments(weight)
    size = weight.group_size if weight.format != "int8" else k
    steps = tiles(k, tile.k)
    steps = tiles(steps, splits_of(n, k, tile))
    splits = tiles(tiles(k, tile.k), steps)
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits > 1 else out
    added = None if bias is None else bias.to(dtype).float().contiguous()
    biased, bf16 = added is not None, dtype == torch.bfloat16
    addend = x if added is None else added
    with torch.cuda.device_of(x):
        _fused[(tiles(n, tile.n), splits, tiles(m, bm))](
            x, *pointers, addend, parts, m, n, K=k, FORMAT=code, SIZE=size, SCALE_BF16=scale_bf16,
            BIAS=biased and splits == 1, BF16=bf16 and splits == 1, STEPS=steps, BM=bm, BN=tile.n, BK=tile.k,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
        if splits > 1:
            _add_splits[(tiles(m * n, 1024),)](
                parts, addend, out, m * n, n, SPLITS=splits, BIAS=biased, BF16=bf16, BLOCK=1024,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out
