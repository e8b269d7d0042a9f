"""fp8 GEMMs: the tiles of products with row scales, and products in blocks, 128 x 128 weights and groups of 128 inputs.

In blocks a tile's product over 128 inputs is made by the tensor cores and added, times both scales, to an fp32 tile;
the order of the blocks is fixed, so a row's result does not depend on the other rows.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Launches take options of the compiler besides the parameters; a call inside a kernel looks as if it never returned.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lqrl.quant.triton_casts import to_bf16
from lqrl.quant.triton_tiles import GROUP, Tile, fitted, operand_tile, tile_place
from lqrl.quant.triton_use import shared_memory, tiles

BLOCK = 128

# For row scales: (largest M, smallest N, tile); None is `torch._scaled_mm`. Chosen by `benchmarks/decode_gemm.py`, 8
# rows on an H100, 64 and 256 on an H200.
ROW_TILES: list[tuple[int, int, Tile | None]] = [
    (16, 24576, Tile(16, 64, 256, 4, 4, tall=True)),
    (16, 0, Tile(16, 64, 256, 4, 6, tall=True)),
    (64, 24576, Tile(64, 128, 128, 4, 4, tma=True)),
    (64, 6144, Tile(64, 64, 256, 4, 4, tall=True)),
    (64, 0, Tile(64, 32, 256, 4, 4)),
    (256, 6144, None),
    (256, 0, Tile(128, 64, 128, 4, 6, tma=True)),
    (2**31, 0, None),
]

# The same for blocks. Every tile has at least 64 rows or is tall: others use another tensor core instruction,
# whose fp8 sums are wider, and a token's bits would then depend on the height of its batch.
TILES: list[tuple[int, int, Tile]] = [
    (128, 0, Tile(64, 64, 128, 4, 5)),
    (512, 0, Tile(64, 128, 128, 4, 4)),
    (2**31, 0, Tile(128, 128, 128, 8, 4, tma=True)),
]


def row_tile_for(m: int, n: int) -> Tile | None:
    """What `ROW_TILES` says for M rows and N outputs."""
    return next(tile for most, least, tile in ROW_TILES if m <= most and n >= least)


@triton.jit(do_not_specialize=["m"])
def _block_gemm(
    x, w, out_ptr, x_scale_ptr, w_scale_ptr, m, n, K: tl.constexpr, BF16: tl.constexpr, TMA: tl.constexpr,
    TALL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_place(m, n, BM, BN, GROUP)
    rows = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    columns = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    blocks: tl.constexpr = (K + BK - 1) // BK
    x_scale_ptr += tl.minimum(rows, m - 1) * blocks
    w_scale_ptr += (tile_n * BN) // BK * blocks  # a tile of columns lies within one block
    acc = tl.zeros((BN, BM) if TALL else (BM, BN), dtype=tl.float32)
    token, weight = tl.load(x_scale_ptr), tl.load(w_scale_ptr)
    for block in range(0, blocks):
        start = block * BK
        a = operand_tile(x, tile_m, start, rows, m, K, K, TMA, BM, BK)
        b = operand_tile(w, tile_n, start, columns, n, K, K, TMA, BN, BK)
        scale = token * weight
        after = tl.minimum(block + 1, blocks - 1)  # a step early: no step waits for memory
        token, weight = tl.load(x_scale_ptr + after), tl.load(w_scale_ptr + after)
        if TALL:
            acc += tl.dot(b, a.T) * scale[None, :]
        else:
            acc += tl.dot(a, b.T) * scale[:, None]
    if TALL:
        acc = acc.T
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], to_bf16(acc) if BF16 else acc, mask=mask)


def block_scaled(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """`fp8_gemm.block_scaled` for codes ``[M, K]`` and ``[N, K]`` with K in multiples of 16; fp32 or bf16 result.

    Args:
        tile: how the product is cut; default: what `TILES` says. Its width divides 128 and its depth is 128.
    """
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m:
        return out
    x, weight = x.contiguous(), weight.contiguous()
    tile = next(t for most, least, t in TILES if m <= most and n >= least) if tile is None else tile
    if BLOCK % tile.n or tile.k != BLOCK:
        raise ValueError(f"a tile of columns lies within one block of {BLOCK} and takes {BLOCK} inputs, got {tile}")
    tile = fitted(tile, (tile.m + tile.n) * tile.k, shared_memory(x.device))
    tma = tile.tma and k % 16 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    with torch.cuda.device_of(x):
        _block_gemm[(tiles(m, tile.m) * tiles(n, tile.n),)](
            TensorDescriptor.from_tensor(x, [tile.m, tile.k]) if tma else x,
            TensorDescriptor.from_tensor(weight, [tile.n, tile.k]) if tma else weight,
            out, x_scale.contiguous(), weight_scale.contiguous(), m, n, K=k, BF16=dtype == torch.bfloat16, TMA=tma,
            TALL=tile.tall, BM=tile.m, BN=tile.n, BK=tile.k, GROUP=GROUP, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out
