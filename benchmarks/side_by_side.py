"""Timing of candidates that take turns, so that a busy or throttled machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from options import refuse

_FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of an H100


class Timer:
    """Median milliseconds; CUDA events on a GPU, whose L2 cache is overwritten before each run.

    Args:
        device: where the candidates run.
        repeats: measured runs of each.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        cuda = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if cuda else None

    def once(self, run: Callable[[], object]) -> float:
        """Milliseconds of one run."""
        if self._flush is None:
            started = time.perf_counter()
            run()
            return (time.perf_counter() - started) * 1e3
        self._flush.zero_()
        # The host gets ahead meanwhile: what is measured is the GPU, not the launches.
        torch.cuda._sleep(2_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def in_turn(self, candidates: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median of each candidate; two runs of each go first, in which kernels are compiled."""
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for turn in range(self.repeats + 2):
            for name, run in candidates.items():
                elapsed = self.once(run)
                if turn >= 2:
                    times[name].append(elapsed)
        return {name: statistics.median(values) for name, values in times.items()}

    def wall(self, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Median wall milliseconds of ``run`` with the device idle before and after, host work included.

        ``before`` is called ahead of each run and is not measured.
        """
        times = []
        for turn in range(self.repeats + 1):
            before()
            self.synchronize()
            started = time.perf_counter()
            run()
            self.synchronize()
            if turn:
                times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bandwidth(device: torch.device, size: int = 2**30) -> float:
    """Bytes a second that a large copy moves, reads and writes both counted."""
    size = size if device.type == "cuda" else 2**24
    source, target = (torch.empty(size, dtype=torch.int8, device=device) for _ in range(2))
    elapsed = Timer(device, 5).in_turn({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * size / elapsed * 1e3


def measured_device(name: str = "cuda") -> torch.device:
    """The device to measure on, or the end of the program with what is missing."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        refuse(
            f"this measures a GPU, and torch {torch.__version__} sees none here; where a script has --device, pass "
            "--device cpu and a tiny model to rehearse it"
        )
    return device


def card(device: torch.device) -> str:
    """What the numbers were taken on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"
