"""The int8 product on CUDA: an epilogue for `torch._int_mm`, and a GEMM with that epilogue inside.

Integer sums are exact, so every tiling gives the bits of the eager code: ``dtype((acc * weight_scale) * token_scale)``,
then ``+ bias`` in that dtype.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Launches take options of the compiler besides the parameters; a call inside a kernel looks as if it never returned.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lqrl.quant.triton_casts import rounded_to_bf16, to_bf16
from lqrl.quant.triton_tiles import GROUP, Tile, operand_tile, tile_place
from lqrl.quant.triton_use import tiles

# The first row whose limits hold is taken: (largest M, smallest N, tile); None is `torch._int_mm` and the epilogue.
# Starting values; `benchmarks/low_bit_gemm.py` times the candidates of each shape.
TILES: list[tuple[int, int, Tile | None]] = [
    (16, 0, Tile(16, 32, 256, 4, 4)),
    (32, 0, Tile(32, 32, 256, 4, 4)),
    (64, 8192, Tile(64, 64, 128, 4, 5)),
    (64, 0, Tile(64, 32, 256, 4, 4)),
    (128, 8192, Tile(128, 64, 128, 4, 4)),
    (128, 0, Tile(64, 64, 128, 4, 5)),
    (256, 0, Tile(128, 64, 128, 4, 4)),
    (1023, 0, Tile(128, 128, 128, 8, 4)),
    (2**31, 0, Tile(128, 256, 128, 8, 3, tma=True)),
]


def tile_for(m: int, n: int, k: int) -> Tile | None:
    """What `TILES` says for ``[m, k]`` times ``[n, k]``."""
    return next(tile for most, least, tile in TILES if m <= most and n >= least)


@triton.jit
def _store(
    acc, out_ptr, token_ptr, weight_ptr, bias_ptr, rows, columns, m, n, BIAS: tl.constexpr, BF16: tl.constexpr
):  # fmt: skip
    """Scale an int32 tile and write it; two roundings where there is a bias, as eager torch."""
    token = tl.load(token_ptr + rows, mask=rows < m, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < n, other=0.0)
    out = (acc.to(tl.float32) * weight[None, :]) * token[:, None]
    if BIAS:
        if BF16:
            out = rounded_to_bf16(out)
        out += tl.load(bias_ptr + columns, mask=columns < n, other=0.0)[None, :]
    pointers = out_ptr + rows[:, None] * n + columns[None, :]
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(pointers, to_bf16(out) if BF16 else out, mask=mask)


@triton.jit
def _epilogue(
    acc_ptr, stride, out_ptr, token_ptr, weight_ptr, bias_ptr, m, n,
    BIAS: tl.constexpr, BF16: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    acc = tl.load(acc_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0)
    _store(acc, out_ptr, token_ptr, weight_ptr, bias_ptr, rows, columns, m, n, BIAS, BF16)


@triton.jit
def _gemm(
    x, w, x_stride, w_stride, out_ptr, token_ptr, weight_ptr, bias_ptr, m, n, K: tl.constexpr,
    BIAS: tl.constexpr, BF16: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_place(m, n, BM, BN, GROUP)
    rows = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    columns = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.int32)
    for start in range(0, K, BK):
        a = operand_tile(x, tile_m, start, rows, m, x_stride, K, TMA, BM, BK)
        b = operand_tile(w, tile_n, start, columns, n, w_stride, K, TMA, BN, BK)
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
    _store(acc, out_ptr, token_ptr, weight_ptr, bias_ptr, rows, columns, m, n, BIAS, BF16)


def _as_fp32(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype).float().contiguous()


def epilogue(acc: Tensor, weight_scale: Tensor, token_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``dtype((acc * weight_scale) * token_scale)``, then ``+ bias`` in ``dtype``.

    Args:
        acc: int32 ``[M, N]``, rows may be apart.
        weight_scale: fp32, of N elements.
        token_scale: fp32, of M elements.
        bias: ``[N]`` or none.
        dtype: fp32 or bf16.
    """
    m, n = acc.shape
    out = torch.empty(m, n, dtype=dtype, device=acc.device)
    added = _as_fp32(bias, dtype)
    bm, bn = 16, 256
    if m and n:
        with torch.cuda.device_of(acc):
            _epilogue[(tiles(m, bm), tiles(n, bn))](
                acc, acc.stride(0), out, token_scale.contiguous(), weight_scale.contiguous(),
                weight_scale if added is None else added, m, n,
                BIAS=added is not None, BF16=dtype == torch.bfloat16, BM=bm, BN=bn,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def gemm(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    token_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """`epilogue` of the exact product of codes.

    Args:
        x: int8 ``[M, K]``, contiguous.
        weight: int8 ``[>= N, >= K]``, contiguous; padding is not read.
        weight_scale, token_scale, bias, dtype: as in `epilogue`.
        tile: how the product is cut; ``tma`` is ignored where the shape does not allow it.
    """
    (m, k), n = x.shape, weight_scale.numel()
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m:
        return out
    added = _as_fp32(bias, dtype)
    tma = tile.tma and k % 16 == 0 and weight.shape[1] == k and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    with torch.cuda.device_of(x):
        _gemm[(tiles(m, tile.m) * tiles(n, tile.n),)](
            TensorDescriptor.from_tensor(x, [tile.m, tile.k]) if tma else x,
            TensorDescriptor.from_tensor(weight, [tile.n, tile.k]) if tma else weight,
            x.stride(0), weight.stride(0), out, token_scale.contiguous(), weight_scale.contiguous(),
            weight_scale if added is None else added, m, n, K=k,
            BIAS=added is not None, BF16=dtype == torch.bfloat16, TMA=tma,
            BM=tile.m, BN=tile.n, BK=tile.k, GROUP=GROUP,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out
