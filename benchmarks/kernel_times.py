"""Which kernels a run launches on a GPU, and how long they take."""

from __future__ import annotations

from collections.abc import Callable


def kernel_lines(run: Callable[[], object], most: int, what: str, each: int = 1) -> list[str]:
    """The kernels of ``run`` by time, as the profiler sees them, and before them all together.

    Args:
        run: launches kernels.
        most: how many of them to list.
        what: ``run`` does, for the first line.
        each: how often it does it; times and counts are those of one.
    """
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    count = sum(event.count for event in events)
    lines = [f"kernels of {what}, {count / each:.0f}, {total / each:.0f} us in all:"]
    for event in events[:most]:
        share = event.self_device_time_total
        lines.append(f"  {share / each:8.1f} us {event.count / each:7.1f} x  {share / total:4.0%}  {event.key[:100]}")
    return lines
