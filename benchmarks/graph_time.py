"""Timing inside a CUDA graph: what a kernel costs between others, without the host and without a launch of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from lqrl.quant.hopper_gemm import early_products


def graph_time(runs: Sequence[Callable[[], object]], replays: int) -> float:
    """Microseconds of one of ``runs``, captured one after the other as the engine's step is: the median of ``replays``.

    Runs should use memory of their own, more than the L2 cache together, where that is what the real step does.
    """
    runs[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()), early_products():  # `torch.cuda.graph` would collect garbage each time
        graph.capture_begin()
        kept = [run() for run in runs]
        graph.capture_end()
    times = []
    for turn in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn:
            times.append(start.elapsed_time(end) * 1e3 / len(runs))
    del kept
    return statistics.median(times)
