"""How GEMM kernels are cut to the GPU that is there, and what the compiler makes of them."""

# ruff: noqa: E402

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lqrl.quant.triton_tiles import Tile, fitted, split_steps
from lqrl.quant.triton_weight_only import _fused

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


@pytest.mark.parametrize("warps", [4, 8])
def test_a_product_that_reads_registers_is_there_before_they_are_written_again(warps: int) -> None:
    """On Hopper; compiled without one. A wait that leaves products pending is one that does not."""
    if knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    fixed = {
        "K": 1024, "FORMAT": 1, "SIZE": 128, "SCALE_BF16": True, "WORDS": True, "GATHER": False, "FINISHED": True,
        "BIAS": False, "BF16": True, "STEPS": 8, "BM": 64, "BN": 128, "BK": 128,
    }  # fmt: skip
    kinds = {"x_ptr": "*bf16", "codes_ptr": "*i32", "scale_ptr": "*i16", "global_ptr": "*i16", "m": "i32", "n": "i32"}
    names = _fused.arg_names
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "*bf16") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in fixed}
    made = triton.compile(
        ASTSource(_fused, signature, fixed, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": 3, "enable_fp_fusion": False},
    )
    text = made.asm["ttgir"]
    assert "opIdx = 0, parent = #mma" in text  # the weight is an operand in registers
    pending = re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", text)
    assert pending
    assert set(pending) == {"0"}
