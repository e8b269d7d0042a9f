"""The int8 product on CUDA: an epilogue for `torch._int_mm`, and the tiles of the product with that epilogue inside.

Integer sums are exact, so every tiling gives the bits of the eager code: ``dtype((acc * weight_scale) * token_scale)``,
then ``+ bias`` in that dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lqrl.quant.triton_epilogue import addend, finish
from lqrl.quant.triton_scaled import gemm, gemm_apart, parts_fit
from lqrl.quant.triton_tiles import Tile

__all__ = ["TILES", "Tile", "apart", "epilogue", "gemm", "tile_for"]

# The first row whose limits hold is taken: (largest M, smallest N, tile); None is `torch._int_mm` and the epilogue.
# `benchmarks/decode_gemm.py` times the candidates for few rows, `benchmarks/low_bit_gemm.py` for many. 8 rows were
# measured on an H100, 64 and 256 on an H200; the others are starting values.
TILES: list[tuple[int, int, Tile | None]] = [
    (16, 24576, Tile(16, 64, 256, 4, 4, tall=True)),
    (16, 0, Tile(16, 64, 256, 4, 6, tall=True)),
    (32, 0, Tile(32, 32, 256, 4, 4)),
    (64, 24576, Tile(64, 128, 128, 4, 4)),
    (64, 6144, Tile(64, 64, 256, 4, 4, tall=True)),
    (64, 0, Tile(64, 32, 256, 4, 4, splits=2)),
    (128, 8192, Tile(128, 64, 128, 4, 4)),
    (128, 0, Tile(64, 64, 128, 4, 5)),
    (256, 6144, Tile(128, 64, 128, 4, 4, tma=True)),
    (256, 0, Tile(64, 128, 128, 4, 5, tma=True)),
    (1023, 0, Tile(128, 128, 128, 8, 4)),
    (2**31, 0, Tile(128, 256, 128, 8, 3, tma=True)),
]


def tile_for(m: int, n: int, k: int) -> Tile | None:
    """What `TILES` says for ``[m, k]`` times ``[n, k]``."""
    return next(tile for most, least, tile in TILES if m <= most and n >= least)


def apart(
    x: Tensor,
    token_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    dtype: torch.dtype,
) -> list[Tensor] | None:
    """`gemm` with the weights of several layers, whose outputs are tensors of their own.

    Args:
        x: codes ``[M, K]``, contiguous.
        token_scale: fp32, of M elements.
        weight: codes ``[N, K]`` of all layers, contiguous.
        weight_scale: fp32, of N elements.
        bias: ``[N]`` or none.
        widths: outputs of each layer, N in all.
        dtype: of the result, fp32 or bf16.

    Returns:
        ``[M, widths[i]]``; ``None`` where the table's tile is not this kernel's or does not end with the layers.
    """
    (m, k), n = x.shape, weight_scale.numel()
    tile = tile_for(m, n, k)
    if tile is None or weight.shape != (n, k) or not parts_fit(widths, tile):
        return None
    return gemm_apart(x, weight, weight_scale, token_scale, bias, widths, dtype, tile)


def epilogue(acc: Tensor, weight_scale: Tensor, token_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``dtype((acc * weight_scale) * token_scale)``, then ``+ bias`` in ``dtype``.

    Args:
        acc: int32 ``[M, N]``, rows may be apart.
        weight_scale: fp32, of N elements.
        token_scale: fp32, of M elements.
        bias: ``[N]`` or none.
        dtype: fp32 or bf16.
    """
    out = torch.empty(acc.shape, dtype=dtype, device=acc.device)
    return finish(acc[None], (token_scale.contiguous(), weight_scale.contiguous()), addend(bias, dtype), dtype, out)
