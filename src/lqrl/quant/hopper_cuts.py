"""Which cut of a product of a few rows is the fastest on Hopper, by a model of its time, and whether to take it at all.

The model's constants were fitted to `benchmarks/hopper_gemm.py` on an H200 (132 multiprocessors): twelve products of
models of 0.6B, 8B and 32B, five heights, three kinds. The cut that it picks takes 2 % longer than the best in the mean.
"""

from __future__ import annotations

import functools
import itertools

from lqrl.quant.hopper_source import STEP_BYTES, Cut, Kind
from lqrl.quant.triton_use import tiles

MOST_ROWS = 256
"""Of a product that is cut here at all."""

_SHARED_BYTES = 226 * 1024  # of a block; its barriers take some more
_MOST_STAGES = 12
_BLOCKS = 132  # that run at a time, one a multiprocessor
_CLUSTERED_BLOCKS = 120  # of those in clusters of four, which do not fill every group of multiprocessors
_BANDWIDTH = 4.25e6  # bytes a microsecond
_CLOCK = 1820.0  # cycles a microsecond
_WAVE_US = 2.2  # until a block's first step, and after its last
_INGEST = 58.0  # bytes a cycle that reach a multiprocessor
_SLOWER = 1.28  # a step of the tensor cores than its cycles
_REREAD = 0.51  # longer, for each further block of rows that reads the same weights
_EXCHANGE = 1.15e-4  # microseconds a byte that a cluster's blocks give each other
_ALONE = 0.58  # of the time that a copy of the weights takes, at least
_LIBRARY_ROWS = 64  # above which the libraries' products in bf16 and e4m3 may be faster
_MANY = 60  # blocks without which few rows are shared among several
_FULL = 0.9  # of the blocks, with which bf16 is faster than the library above that
_SMALL = 1e9  # multiplications, below which it is in any case


def _steps(kind: Kind, k: int) -> int:
    """Of a row of ``k`` inputs."""
    return tiles(k * (2 if kind == "bf16" else 1), STEP_BYTES)


def _waves(cut: Cut, m: int, n: int) -> tuple[int, int, int]:
    """Blocks, those that run at a time, and how often that is."""
    blocks = tiles(n, cut.outputs) * cut.splits * tiles(m, cut.rows)
    at_a_time = _CLUSTERED_BLOCKS if cut.splits == 4 else _BLOCKS
    return blocks, at_a_time, tiles(blocks, at_a_time)


def microseconds(kind: Kind, cut: Cut, m: int, n: int, k: int) -> float:
    """What the model says about ``[m, k]`` times ``[n, k]``."""
    steps = _steps(kind, k)
    blocks, at_a_time, waves = _waves(cut, m, n)
    cycles = max(cut.groups * cut.rows * 2 * _SLOWER, (cut.outputs + cut.rows) * STEP_BYTES / _INGEST)
    own = steps / cut.splits * cycles / _CLOCK * (1 + _REREAD * (tiles(m, cut.rows) - 1))
    exchange = _EXCHANGE * cut.outputs * cut.rows * 4 * (cut.splits - 1) / cut.splits
    weights = n * steps * STEP_BYTES / _BANDWIDTH * _ALONE * waves * at_a_time / blocks
    return waves * _WAVE_US + max(waves * (own + exchange), weights)


def _cuts(kind: Kind, m: int, n: int, k: int) -> list[Cut]:
    """Candidates with as many stages as shared memory holds; of e4m3 without splits, which change its sums."""
    least = min(m, _LIBRARY_ROWS) if tiles(n, 64) >= _MANY else 0
    steps = _steps(kind, k)
    found = []
    for groups, rows, splits in itertools.product((1, 2, 3), (16, 32, 64, 128, 256), (1, 2, 4)):
        if rows // splits % 16 or rows >= 2 * max(m, 16) or rows < least or steps // splits < 2:
            continue
        if kind == "e4m3" and splits > 1:
            continue
        stages = min(_SHARED_BYTES // ((64 * groups + rows) * STEP_BYTES), steps // splits, _MOST_STAGES)
        cut = Cut(groups, rows, splits, stages)
        if cut.shared_bytes <= _SHARED_BYTES:
            found.append(cut)
    return found


@functools.lru_cache(maxsize=4096)
def cut_for(kind: Kind, m: int, n: int, k: int) -> Cut | None:
    """The fastest cut of ``[m, k]`` times ``[n, k]``, or ``None`` where a library's product is faster.

    int8 is always faster here, up to `MOST_ROWS` rows. bf16 and e4m3 are up to 64 rows; above that e4m3 is where the
    blocks run all at once, and bf16 where they also fill the card or there is little to do.
    """
    cuts = _cuts(kind, m, n, k) if 0 < m <= MOST_ROWS else []
    if not cuts:
        return None
    cut = min(cuts, key=lambda c: microseconds(kind, c, m, n, k))
    if kind == "int8" or m <= _LIBRARY_ROWS:
        return cut
    blocks, at_a_time, waves = _waves(cut, m, n)
    full = kind == "e4m3" or blocks >= _FULL * at_a_time or m * n * k < _SMALL
    return cut if waves == 1 and full else None
