"""Candidates of `decode_gemm.py`: tiles that suit the few rows of a decode step, by format."""

from __future__ import annotations

from dataclasses import replace

from lqrl.quant.triton_tiles import Tile

FORMATS = ["int8_w8a8", "fp8_per_channel", "int4_w4a16", "nvfp4_w4a16", "fp8_per_block"]
EXACT = ["exact_none", "exact_int4_w4a16"]
"""Products of exact mode, `lqrl.quant.triton_exact_gemm`."""
PROMISE_BITS = ("int8_w8a8", "fp8_per_channel", "fp8_per_block", *EXACT)
"""Formats whose outputs do not depend on the tile."""
WITH_LIBRARY = ("int8_w8a8", "fp8_per_channel")
"""Formats whose tables may name the library's product."""

_FEW, _MANY = 200, 300  # K is split where a launch has few programs, into no more than so many


def tall(m: int, n: int, k: int, warps: int, *stages: int) -> list[Tile]:
    """Tiles whose tall side is the weight's, one for each depth of the pipeline."""
    return [Tile(m, n, k, warps, s, tall=True) for s in stages]


def flat(m: int, n: int, k: int, warps: int, *stages: int) -> list[Tile]:
    """Tiles whose tall side is the input's."""
    return [Tile(m, n, k, warps, s) for s in stages]


BYTES = {
    16: [
        *flat(16, 32, 256, 4, 5), *flat(16, 32, 512, 4, 3), *tall(16, 64, 128, 4, 8), *tall(16, 64, 256, 4, 4, 6),
        *tall(16, 128, 256, 8, 4),
    ],
    64: [
        *flat(64, 32, 256, 4, 4), *flat(64, 64, 128, 4, 5), *flat(64, 128, 128, 4, 4), *tall(64, 64, 128, 4, 6),
        *tall(64, 64, 256, 4, 4), *tall(64, 128, 128, 8, 5),
    ],
    256: [
        *flat(128, 64, 128, 4, 4, 6), *flat(128, 128, 128, 8, 4), *flat(128, 256, 128, 8, 3),
        *flat(256, 128, 128, 8, 3), *flat(64, 128, 128, 4, 5), *flat(256, 64, 128, 8, 4),
        *tall(128, 64, 128, 4, 5), *tall(128, 128, 128, 8, 4), *tall(256, 64, 128, 4, 4), *tall(256, 128, 128, 8, 3),
    ],
}  # fmt: skip
BLOCKS = {
    16: [*tall(16, 64, 128, 4, 6), *tall(16, 128, 128, 8, 6), *flat(64, 64, 128, 4, 5)],
    64: [
        *flat(64, 64, 128, 4, 5), *flat(64, 128, 128, 4, 4), *tall(64, 64, 128, 4, 5), *tall(64, 128, 128, 8, 5),
        *tall(32, 64, 128, 4, 6),
    ],
    256: [
        *flat(64, 128, 128, 4, 4), *flat(128, 128, 128, 8, 4), *tall(64, 128, 128, 8, 4), *tall(128, 128, 128, 8, 4),
    ],
}  # fmt: skip
WORDS = {
    16: [*tall(16, 64, 128, 4, 5), *tall(16, 64, 256, 4, 4), *tall(16, 64, 512, 4, 3), *tall(16, 128, 256, 8, 4)],
    64: [
        *tall(64, 64, 128, 4, 3, 4), *tall(64, 128, 128, 4, 3, 4), *tall(64, 64, 256, 4, 3), *tall(64, 128, 64, 4, 4),
        *tall(64, 64, 64, 4, 5), *tall(64, 128, 128, 8, 3, 4), *tall(64, 128, 64, 8, 5),
    ],
    256: [
        *tall(256, 64, 64, 4, 3, 4), *tall(256, 128, 64, 8, 3, 4), *tall(128, 64, 128, 4, 3), *tall(128, 64, 64, 4, 4),
        *tall(128, 128, 64, 4, 4), *tall(128, 128, 64, 8, 4), *tall(128, 128, 128, 8, 3), *tall(128, 256, 64, 8, 3),
    ],
}  # fmt: skip


EXACT_BYTES = {
    64: [*flat(64, 16, 256, 4, 5), *flat(64, 32, 256, 4, 4), *flat(64, 64, 128, 4, 6), *flat(64, 128, 128, 4, 5)],
    256: [
        *flat(64, 32, 256, 4, 4), *flat(64, 64, 256, 4, 3), *flat(64, 128, 128, 4, 4), *flat(128, 32, 256, 4, 3),
        *flat(128, 64, 128, 4, 4), *flat(128, 64, 256, 8, 3), *flat(128, 128, 128, 8, 4), *flat(128, 256, 128, 8, 3, 4),
        *flat(256, 32, 128, 8, 4), *flat(256, 64, 128, 8, 4), *flat(256, 128, 128, 8, 3, 4),
    ],
}  # fmt: skip
EXACT_WORDS = {
    64: [*flat(64, 16, 128, 4, 4), *flat(64, 32, 128, 4, 4), *flat(64, 64, 128, 4, 4)],
    256: [
        *flat(64, 32, 128, 4, 4), *flat(64, 64, 128, 4, 3), *flat(128, 32, 128, 4, 3), *flat(128, 64, 64, 4, 4),
        *flat(128, 64, 128, 8, 3), *flat(128, 64, 64, 8, 4), *flat(128, 128, 64, 8, 3), *flat(256, 32, 64, 8, 4),
        *flat(256, 32, 128, 8, 3), *flat(256, 64, 64, 8, 3, 4), *flat(256, 64, 128, 8, 2), *flat(256, 128, 64, 8, 3),
    ],
}  # fmt: skip


def candidates(kind: str, m: int, n: int, k: int) -> list[Tile]:
    """Tiles for ``[m, k]`` times ``[n, k]`` in a format, with splits of K where a weight has few tiles."""
    height = 16 if m <= 16 else 64 if m <= 64 else 256
    if kind == "fp8_per_block":
        tiles = BLOCKS[height]
        return tiles + [replace(t, tma=True) for t in tiles if t.m >= 64 and height > 16]
    if kind in EXACT:  # K is never split
        tiles = (EXACT_WORDS if "4" in kind else EXACT_BYTES)[max(height, 64)]
        return tiles + [replace(t, tma=True) for t in tiles if "4" not in kind and t.n >= 64 and t.k == 128]
    words = "4" in kind
    tiles = (WORDS if words else BYTES)[height]
    if kind == "fp8_per_channel":
        tiles = [t for t in tiles if t.tall or t.m >= 64]  # others have other sums, see `lqrl.quant.triton_scaled`
    if not words:
        tiles = tiles + [replace(t, tma=True) for t in tiles if t.k <= 128 and height > 16]
    found = []
    for tile in tiles:
        programs = -(-n // tile.n) * -(-m // tile.m)
        for splits in (1, 2, 4):
            whole = k % (tile.k * splits) == 0
            if splits == 1 or (whole and programs < _FEW and programs * splits <= _MANY):
                found.append(replace(tile, splits=splits))
    return found
