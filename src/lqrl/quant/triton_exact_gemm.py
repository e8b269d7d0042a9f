"""The products of exact mode on CUDA: the bits of an output depend on its row and its column of operands alone.

Every output is one chain of tensor core steps along K, from 0 on, whatever tile it lies in: K is never split, zeros
beyond its end change no sum, and every tile has at least 64 rows for four warps, because smaller ones use another
instruction (see `lqrl.quant.triton_fp8`). A weight that is dequantized inside the product has the same values and goes
through the same chain as one that was dequantized before. fp32 operands are multiplied outside the tensor cores, by
fused multiply-adds in order.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Launches take options of the compiler besides the kernel's parameters; kernels call each other.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lqrl.quant.packed import PackedWeight
from lqrl.quant.triton_casts import EMULATED, opaque, rounded_to_bf16, to_bf16
from lqrl.quant.triton_tiles import GROUP, Tile, fitted, operand_tile, tile_place
from lqrl.quant.triton_use import shared_memory, tiles
from lqrl.quant.triton_weight_only import dequantized_tile, kernel_arguments

# (largest M, smallest N, tile), the first row that fits is taken; `k` counts bytes. Those of bf16 at 256 rows are
# measured on an H200, the others starting values.
_FEW: list[tuple[int, int, Tile]] = [
    (64, 8192, Tile(64, 64, 128, 4, 6)),
    (64, 2048, Tile(64, 32, 256, 4, 4)),
    (64, 0, Tile(64, 16, 256, 4, 5)),
    (128, 8192, Tile(128, 64, 128, 4, 5)),
    (128, 0, Tile(64, 32, 256, 4, 4)),
]
_MANY: list[tuple[int, int, Tile]] = [
    (1023, 0, Tile(128, 128, 128, 8, 4)),
    (2**31, 0, Tile(128, 256, 128, 8, 4, tma=True)),
]
TILES: list[tuple[int, int, Tile]] = [
    *_FEW,
    (256, 65536, Tile(128, 256, 128, 8, 4, tma=True)),
    (256, 16384, Tile(128, 128, 128, 8, 4, tma=True)),
    (256, 6144, Tile(64, 128, 128, 4, 4, tma=True)),
    (256, 4096, Tile(64, 64, 256, 4, 3)),
    (256, 0, Tile(64, 32, 256, 4, 4)),
    *_MANY,
]
FP8_TILES: list[tuple[int, int, Tile]] = [
    *_FEW,
    (256, 8192, Tile(128, 128, 128, 8, 4)),
    (256, 2048, Tile(128, 64, 128, 4, 4)),
    (256, 0, Tile(64, 32, 256, 4, 4)),
    *_MANY,
]
FP32_TILE = Tile(64, 64, 32 * 4, 8, 2)

# The same for weights that are dequantized inside; `k` counts inputs.
PACKED_TILES: list[tuple[int, int, Tile]] = [
    (64, 8192, Tile(64, 64, 128, 4, 4)),
    (64, 2048, Tile(64, 32, 128, 4, 4)),
    (64, 0, Tile(64, 16, 128, 4, 4)),
    (2**31, 2048, Tile(128, 64, 128, 8, 3)),
    (2**31, 0, Tile(128, 32, 128, 4, 3)),
]
PACKED_ROWS = 128
"""Most rows that `packed_linear` is for; 256 are faster with the weight dequantized first, with the same bits."""


def tile_for(table: list[tuple[int, int, Tile]], m: int, n: int) -> Tile:
    """What ``table`` says for M rows and N outputs."""
    return next(tile for most, least, tile in table if m <= most and n >= least)


@triton.jit
def _product(a, b, acc):
    """``acc + a @ b.T``; ``ieee`` concerns fp32 operands alone."""
    if EMULATED:  # the interpreter has no bf16 products
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b.T, acc, input_precision="ieee")


@triton.jit
def _store(
    acc, out_ptr, token_ptr, weight_ptr, bias_ptr, rows, columns, m, n,
    SCALED: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Write an fp32 tile; with scales there are two roundings where there is a bias, as in `lqrl.quant.triton_int8`."""
    if SCALED:
        token = tl.load(token_ptr + rows, mask=rows < m, other=0.0)
        weight = tl.load(weight_ptr + columns, mask=columns < n, other=0.0)
        acc = (acc * weight[None, :]) * token[:, None]
        if BIAS and BF16:
            acc = rounded_to_bf16(acc)
    if BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0)[None, :]
    pointers = out_ptr + rows[:, None] * n + columns[None, :]
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(pointers, to_bf16(acc) if BF16 else acc, mask=mask)


@triton.jit(do_not_specialize=["m"])
def _gemm(
    x, w, out_ptr, token_ptr, weight_ptr, bias_ptr, m, n, K: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_place(m, n, BM, BN, GROUP)
    rows = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    columns = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        a = operand_tile(x, tile_m, start, rows, m, K, K, TMA, BM, BK)
        b = operand_tile(w, tile_n, start, columns, n, K, K, TMA, BN, BK)
        acc = _product(a, b, acc)
    _store(acc, out_ptr, token_ptr, weight_ptr, bias_ptr, rows, columns, m, n, SCALED, BIAS, BF16)


@triton.jit(do_not_specialize=["m"])
def _packed_gemm(
    x_ptr, codes_ptr, scale_ptr, global_ptr, out_ptr, bias_ptr, m, n, K: tl.constexpr,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, SCALE_BF16: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_place(m, n, BM, BN, GROUP)
    rows = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    columns = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        a_ptr = x_ptr + tl.minimum(rows, m - 1)[:, None] * K + (start + inner)[None, :]
        a = tl.load(a_ptr, mask=(start + inner < K)[None, :], other=0.0)
        b = dequantized_tile(codes_ptr, scale_ptr, global_ptr, columns, start, n, K, FORMAT, SIZE, SCALE_BF16, BN, BK)
        acc = _product(a, opaque(to_bf16(b)), acc)
    _store(acc, out_ptr, out_ptr, out_ptr, bias_ptr, rows, columns, m, n, False, BIAS, BF16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """``x @ weight.T + bias`` in fp32, rounded once.

    Args:
        x: ``[M, K]``, fp32 or bf16; of two dtypes both become fp32.
        weight: ``[N, K]``, fp32 or bf16.
        bias: ``[N]`` or none.
        dtype: of the result, fp32 or bf16.
        tile: how the product is cut, ``k`` in bytes; default: what `TILES` says, `FP32_TILE` for fp32.
    """
    if x.dtype != weight.dtype:
        x, weight = x.float(), weight.float()
    if tile is None:
        tile = FP32_TILE if x.dtype == torch.float32 else tile_for(TILES, len(x), len(weight))
    return _dense(x, weight, None, None if bias is None else bias.float(), dtype, tile)


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """``dtype((x @ weight.T * weight_scale) * x_scale)``, then ``+ bias`` in ``dtype``.

    Sums of e4m3 products have the width of the tensor cores, as with fast accumulation in `lqrl.quant.fp8_gemm`.

    Args:
        x: e4m3 codes ``[M, K]``.
        x_scale: fp32, of M elements.
        weight: e4m3 codes ``[N, K]``.
        weight_scale: fp32, of N elements.
        bias: ``[N]`` or none.
        dtype: of the result, fp32 or bf16.
        tile: how the product is cut; default: what `FP8_TILES` says.
    """
    tile = tile_for(FP8_TILES, len(x), len(weight)) if tile is None else tile
    added = None if bias is None else bias.to(dtype).float()
    return _dense(x, weight, (x_scale.contiguous(), weight_scale.contiguous()), added, dtype, tile)


def _dense(
    x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None, dtype: torch.dtype, tile: Tile
) -> Tensor:
    """A product of two matrices of one dtype; fp32 ``bias``, contiguous."""
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m or not n:
        return out
    x, weight = x.contiguous(), weight.contiguous()
    tile = fitted(tile, (tile.m + tile.n) * tile.k, shared_memory(x.device))
    width = tile.k // x.element_size()
    whole = all(t.data_ptr() % 16 == 0 for t in (x, weight)) and k * x.element_size() % 16 == 0
    tma = tile.tma and whole
    token, column = (out, out) if scales is None else scales
    with torch.cuda.device_of(x):
        _gemm[(tiles(m, tile.m) * tiles(n, tile.n),)](
            TensorDescriptor.from_tensor(x, [tile.m, width]) if tma else x,
            TensorDescriptor.from_tensor(weight, [tile.n, width]) if tma else weight,
            out, token, column, out if bias is None else bias, m, n, K=k,
            SCALED=scales is not None, BIAS=bias is not None, BF16=dtype == torch.bfloat16, TMA=tma,
            BM=tile.m, BN=tile.n, BK=width, GROUP=GROUP,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=scales is None,
        )  # fmt: skip
    return out


def packed_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """`linear` of bf16 ``x`` with the weight's values in bf16, which never reach memory.

    Args:
        x: bf16 ``[M, K]``; made for M up to `PACKED_ROWS`, right for any.
        weight: codes and scales of ``[N, K]``.
        bias: ``[N]`` or none.
        dtype: of the result, fp32 or bf16.
        tile: how the product is cut; default: what `PACKED_TILES` says.
    """
    (m, k), (n, _) = x.shape, weight.shape
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m:
        return out
    x, added = x.contiguous(), None if bias is None else bias.float()
    tile = tile_for(PACKED_TILES, m, n) if tile is None else tile
    tile = fitted(tile, (2 * tile.m + tile.n) * tile.k, shared_memory(x.device))
    pointers, code, scale_bf16 = kernel_arguments(weight)
    size = weight.group_size if weight.format != "int8" else k
    with torch.cuda.device_of(x):
        _packed_gemm[(tiles(m, tile.m) * tiles(n, tile.n),)](
            x, *pointers, out, out if added is None else added, m, n, K=k, FORMAT=code, SIZE=size,
            SCALE_BF16=scale_bf16, BIAS=added is not None, BF16=dtype == torch.bfloat16,
            BM=tile.m, BN=tile.n, BK=tile.k, GROUP=GROUP,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out
