"""What the GEMM kernels share: how a product is cut, where a program's tile lies, and how it reads its operands."""

# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
# Inside a kernel tensors are indexed and descriptors loaded in ways that the stubs do not know.
from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from lqrl.quant.triton_use import tiles

GROUP = 8
"""Row tiles that share weight tiles in L2."""
_KEPT_BYTES = 4096  # of shared memory, for what a program needs besides its operands


@dataclass(frozen=True)
class Tile:
    """How a GEMM is cut.

    Attributes:
        m, n, k: sizes of a tile.
        warps, stages: of a program, and of its pipeline.
        tma: load by the bulk copy engine; needs K in multiples of 16 bytes and no padding.
        tall: the weight takes the side of the tensor cores' instruction that is 64 high, so that few rows fill it.
        splits: parts of K that different programs add up; their sums are added afterwards, in order.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    tma: bool = False
    tall: bool = False
    splits: int = 1


def fitted(tile: Tile, step_bytes: int, shared_memory: int) -> Tile:
    """``tile`` with as many stages as shared memory holds: the tables were measured where there is much of it.

    Args:
        tile: how the product is cut.
        step_bytes: of both operands in one step.
        shared_memory: bytes that a program may have, `lqrl.quant.triton_use.shared_memory`.
    """
    stages = max(1, min(tile.stages, (shared_memory - _KEPT_BYTES) // step_bytes))
    return tile if stages == tile.stages else replace(tile, stages=stages)


def split_steps(k: int, tile: Tile) -> tuple[int, int]:
    """Steps of ``tile.k`` inputs that a split takes, and how many splits: at most ``tile.splits``, all equally long."""
    steps = tiles(k, tile.k)
    splits = next(s for s in range(tile.splits, 0, -1) if steps % s == 0)
    return steps // splits, splits


@triton.jit
def tile_place(m: int, n: int, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The program's tile of rows and of columns: a group of row tiles walks the columns together."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + pid % (GROUP * tiles_n) % height, pid % (GROUP * tiles_n) // height


@triton.jit
def operand_tile(
    x: tl.tensor, tile: tl.tensor, start: int, rows: tl.tensor, length: int, stride: int,
    K: tl.constexpr, TMA: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """``[BR, BK]`` elements of an operand from input ``start`` on, 0 beyond K.

    Rows beyond the end are read as the last one and not written.

    Args:
        x: a pointer, or a descriptor with ``TMA``.
        tile: which tile of rows.
        start: first input.
        rows: int64 ``[BR]``, those of the tile.
        length: rows of the operand.
        stride: from row to row.
    """
    if TMA:
        return x.load([tile * BR, start])
    else:
        inner = start + tl.arange(0, BK)
        pointers = x + tl.minimum(rows, length - 1)[:, None] * stride + inner[None, :]
        if K % BK == 0:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(inner < K)[None, :], other=0.0)
