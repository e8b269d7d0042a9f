"""How GEMM kernels are cut to the GPU that is there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from lqrl.quant.triton_tiles import Tile, fitted, split_steps

HOPPER, ADA = 232448, 101376  # bytes of shared memory that a program may have


@pytest.mark.parametrize(
    ("tile", "shared_memory", "stages"),
    [
        (Tile(16, 64, 256, 4, 6, tall=True), HOPPER, 6),
        (Tile(16, 64, 256, 4, 6, tall=True), ADA, 4),  # 20 KiB a step
        (Tile(128, 256, 128, 8, 3), ADA, 1),
        (Tile(128, 256, 128, 8, 3), 40000, 1),  # too little for any: left to the compiler to refuse
    ],
)
def test_a_pipeline_is_no_longer_than_shared_memory_holds(tile: Tile, shared_memory: int, stages: int) -> None:
    step = (tile.m + tile.n) * tile.k
    got = fitted(tile, step, shared_memory)
    assert got.stages == stages
    assert got.stages == 1 or got.stages * step < shared_memory
    assert (got.m, got.n, got.k, got.warps, got.tall) == (tile.m, tile.n, tile.k, tile.warps, tile.tall)


def test_splits_are_equally_long() -> None:
    assert split_steps(4096, Tile(16, 64, 256, 4, 4, splits=4)) == (4, 4)
    assert split_steps(4096 + 256, Tile(16, 64, 256, 4, 4, splits=4)) == (17, 1)
