"""Products with packed low-bit weights: dequantized inside the GEMM for few rows, or all at once for many.

A value is ``code * scale`` in fp32, rounded once to the compute dtype: the bits of `lqrl.quant.numerics`. The fused
product adds in fp32; how K is split depends on the weight's shape and the number of rows, never on what they hold.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAssignmentType=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.packed import PackedFormat, PackedWeight
from lqrl.quant.triton_casts import EMULATED, from_bf16, from_e2m1, from_e4m3, from_e8m0, settled, to_bf16
from lqrl.quant.triton_epilogue import addend, finish, store_tile
from lqrl.quant.triton_tiles import Tile, fitted, split_steps
from lqrl.quant.triton_use import shared_memory, tiles
from lqrl.quant.triton_words import INT4, NVFP4, REORDERED, pair_order, word_scales, words_tile

_FORMATS = {"int8": 0, "int4": 1, "nvfp4": 2, "mxfp4": 3}
_INT8 = tl.constexpr(0)

FUSED_ROWS: dict[PackedFormat, int] = {"int8": 64, "int4": 256, "nvfp4": 64, "mxfp4": 64}
"""Most rows that `linear` is for; more are faster with the weight dequantized first."""

GATHERED_ROWS = 16
"""Most rows that every tile brings into the order of words itself; more are reordered once, before the product."""

# By format: (largest M, smallest N, tile), the first row whose limits hold, see `benchmarks/decode_gemm.py`. int4
# was measured on an H200; the others are starting values.
_FEW: list[tuple[int, int, Tile]] = [
    (16, 8192, Tile(16, 64, 256, 4, 4, tall=True)),
    (16, 0, Tile(16, 64, 256, 4, 4, tall=True, splits=4)),
    (2**31, 8192, Tile(64, 64, 128, 4, 4, tall=True)),
    (2**31, 0, Tile(64, 64, 128, 4, 4, tall=True, splits=4)),
]
_INT4: list[tuple[int, int, Tile]] = [
    (16, 24576, Tile(16, 64, 256, 4, 4, tall=True)),
    (16, 6144, Tile(16, 64, 512, 4, 3, tall=True)),
    (16, 0, Tile(16, 64, 512, 4, 3, tall=True, splits=4)),
    (64, 24576, Tile(64, 64, 128, 4, 3, tall=True)),
    (64, 6144, Tile(64, 64, 256, 4, 3, tall=True, splits=2)),
    (64, 0, Tile(64, 64, 128, 4, 4, tall=True, splits=4)),
    (2**31, 6144, Tile(128, 64, 128, 4, 3, tall=True)),
    (2**31, 0, Tile(128, 64, 128, 4, 3, tall=True, splits=2)),
]
TILES: dict[PackedFormat, list[tuple[int, int, Tile]]] = {"int8": _FEW, "int4": _INT4, "nvfp4": _FEW, "mxfp4": _FEW}


def tile_for(kind: PackedFormat, m: int, n: int) -> Tile:
    """What `TILES` says for M rows and N outputs."""
    return next(tile for most, least, tile in TILES[kind] if m <= most and n >= least)


@triton.jit
def _decoded(code, FORMAT: tl.constexpr):
    if FORMAT == INT4:
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
        if FORMAT == INT4:
            if SCALE_BF16:
                scale = from_bf16(scale)
        elif FORMAT == NVFP4:
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
def _reorder(x_ptr, out_ptr, K: tl.constexpr, BK: tl.constexpr):
    """Inputs of one row in the order of `lqrl.quant.triton_words`, pieces of 4 bytes."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BK
    place = tl.arange(0, BK)
    within = start + place < K
    x = tl.load(x_ptr + row * K + start + pair_order(BK), mask=within)
    tl.store(out_ptr + row * K + start + place, x, mask=within)


@triton.jit(do_not_specialize=["m"])
def _fused(
    x_ptr, codes_ptr, scale_ptr, global_ptr, bias_ptr, out_ptr, m, n, K: tl.constexpr,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, SCALE_BF16: tl.constexpr, WORDS: tl.constexpr, GATHER: tl.constexpr,
    FINISHED: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One split of K of ``W x.T``: the many outputs take the tensor core's tall side.

    ``WORDS``: codes are read as 32-bit words, see `lqrl.quant.triton_words`; ``x`` is in their order, or with
    ``GATHER`` brought into it. Without ``FINISHED`` the sum itself is written, to the split's part of ``out``.
    """
    columns = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    held = tl.minimum(columns, n - 1)
    split = tl.program_id(1)
    rows = tl.program_id(2).to(tl.int64) * BM + tl.arange(0, BM)
    place = pair_order(BK) if GATHER else tl.arange(0, BK)
    x_ptr += tl.minimum(rows, m - 1)[:, None] * K
    whole = tl.load(global_ptr) if FORMAT == NVFP4 else 1.0
    COUNT: tl.constexpr = max(2, BK // SIZE)  # one scale is read twice, or the compiler orders values by shared memory
    if FORMAT == INT4 and WORDS:
        ahead = word_scales(scale_ptr, held, split * STEPS * BK, K, SIZE, COUNT, BK)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for step in range(0, STEPS):
        start = (split * STEPS + step) * BK
        if WORDS:
            if FORMAT == INT4:  # pieces too small for the copies that run ahead: they are loaded a step early
                scale = ahead
                ahead = word_scales(
                    scale_ptr, held, (split * STEPS + tl.minimum(step + 1, STEPS - 1)) * BK, K, SIZE, COUNT, BK
                )
            else:
                scale = word_scales(scale_ptr, held, start, K, SIZE, COUNT, BK)
            w = words_tile(codes_ptr, scale, whole, held, start, K, FORMAT, COUNT, BN, BK)
        else:
            w = to_bf16(
                dequantized_tile(
                    codes_ptr, scale_ptr, global_ptr, columns, start, n, K, FORMAT, SIZE, SCALE_BF16, BN, BK
                )
            )
        inner = start + place
        if K % BK == 0:
            x = tl.load(x_ptr + inner[None, :])
        else:
            x = tl.load(x_ptr + inner[None, :], mask=(inner < K)[None, :], other=0.0)
        if EMULATED:  # the interpreter has no bf16 products
            acc = tl.dot(w.to(tl.float32), x.to(tl.float32).T, acc, input_precision="ieee")
        else:
            acc = settled(tl.dot(w, x.T, acc))
    acc = acc.T
    if FINISHED:
        store_tile(acc, out_ptr, out_ptr, out_ptr, bias_ptr, rows, columns, m, n, False, BIAS, BF16)
    else:
        pointers = out_ptr + (split * m + rows)[:, None] * n + columns[None, :]
        tl.store(pointers, acc, mask=(rows < m)[:, None] & (columns < n)[None, :])


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


def _reordered(x: Tensor) -> Tensor:
    out, block = torch.empty_like(x), 1024
    _reorder[(x.shape[0], tiles(x.shape[1], block))](x, out, K=x.shape[1], BK=block, num_warps=4)
    return out


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """``x @ weight.T`` with the weight's values in bf16 and fp32 sums, then ``+ bias`` in ``dtype``.

    Args:
        x: bf16 ``[M, K]``; made for M up to `FUSED_ROWS` of the format, right for any.
        weight: codes and scales of ``[N, K]``.
        bias: ``[N]`` or none.
        dtype: of the result, bf16 or fp32.
        tile: how the product is cut, always ``tall``; default: what `TILES` says.
    """
    (m, k), (n, _) = x.shape, weight.shape
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m:
        return out
    x, added, bf16 = x.contiguous(), addend(bias, dtype), dtype == torch.bfloat16
    tile = tile_for(weight.format, m, n) if tile is None else tile
    tile = fitted(tile, 2 * tile.m * tile.k + tile.n * tile.k, shared_memory(x.device))
    (codes, scale, whole), code, scale_bf16 = kernel_arguments(weight)
    size = weight.group_size if weight.format != "int8" else k
    words = weight.format != "int8" and k % REORDERED == 0 and (weight.format != "int4" or scale_bf16)
    steps, splits = split_steps(k, tile)
    parts = out[None] if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        x = _reordered(x) if words and m > GATHERED_ROWS else x
        _fused[(tiles(n, tile.n), splits, tiles(m, tile.m))](
            x, codes.view(torch.int32) if words else codes, scale, whole, x if added is None else added, parts, m, n,
            K=k, FORMAT=code, SIZE=size, SCALE_BF16=scale_bf16, WORDS=words,
            GATHER=words and m <= GATHERED_ROWS, FINISHED=splits == 1, BIAS=added is not None, BF16=bf16,
            STEPS=steps, BM=tile.m, BN=tile.n, BK=tile.k,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out if splits == 1 else finish(parts, None, added, dtype, out)
