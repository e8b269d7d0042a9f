"""Which kernels a run launches on a GPU, how long they take, and how long the GPU waits between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Span = tuple[float, float, str]


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
    on_gpu = (e for e in profile.events() or () if _is_kernel(e))
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in on_gpu]
    return lines + wait_lines(spans, each)


def _is_kernel(event: Any) -> bool:
    import torch

    return event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation


def wait_lines(spans: Sequence[Span], each: int = 1, most: int = 6) -> list[str]:
    """How much of the time from the first to the last of ``spans`` nothing runs, and after what it is longest.

    Args:
        spans: beginning and end in microseconds, and name, of each kernel, in any order.
        each: how many runs they are of; times are those of one.
        most: how many waits to list.
    """
    if not spans:
        return []
    spans = sorted(spans)
    waits, (begin, end, last) = [], spans[0]
    for start, stop, name in spans[1:]:
        if start > end:
            waits.append((start - end, end - begin, last, name))
        if stop > end:
            end, last = stop, name
    idle = sum(wait for wait, *_ in waits)
    lines = [f"  idle {idle / each:.0f} us of {(end - begin) / each:.0f}, the longest waits:"]
    for wait, at, before, after in sorted(waits, reverse=True)[:most]:
        lines.append(f"  {wait:8.1f} us at {at:.0f}: after {before[:60]}, before {after[:60]}")
    return lines
