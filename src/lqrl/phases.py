"""Where the wall time of an iteration goes: phases, marked where their work is done, and clocks that add them up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal["generate", "reward", "score", "forward_backward", "step", "calibrate", "refresh", "memory", "validate"]
PHASES: tuple[Phase, ...] = get_args(Phase)

_WHOLE = "validate"  # generating and judging for a validation is no part of the iteration's own
_running: list[PhaseClock] = []


class PhaseClock:
    """Seconds of each phase on this process.

    A phase inside another takes its time from the outer one, so the seconds add up to the wall time; inside
    ``validate`` nothing is told apart. Phases are marked by one thread. A clock runs between `start` and `stop`, or as
    a context manager.

    Args:
        synchronize: called at every boundary, so that work which a device still owes counts for the phase that asked
            for it, such as ``torch.cuda.synchronize``.
        now: seconds from any fixed point.
    """

    def __init__(
        self, synchronize: Callable[[], object] = lambda: None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronize, self._now = synchronize, now
        self._open: list[str] = []
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def start(self) -> None:
        """Listen to every phase that begins from here on."""
        self._charge()
        self._seconds = {}
        if self not in _running:
            self._open.clear()
            _running.append(self)

    def stop(self) -> None:
        """Listen no more; again is no error. What comes after is nobody's."""
        if self in _running:
            self._charge()
            _running.remove(self)

    def lap(self) -> dict[str, float]:
        """Seconds since the start or the last lap, of all `PHASES` and of ``other``, which no phase claims."""
        if self in _running:
            self._charge()
        seconds, self._seconds = self._seconds, {}
        return {name: seconds.get(name, 0.0) for name in (*PHASES, "other")}

    @property
    def depth(self) -> int:
        """How many phases are open."""
        return len(self._open)

    def enter(self, name: Phase) -> None:
        """A phase begins."""
        self._charge()
        self._open.append(_WHOLE if self._open and self._open[-1] == _WHOLE else name)

    def leave(self, depth: int) -> None:
        """The phase that began at ``depth`` ends, and with it those inside that an interrupt has left open."""
        self._charge()
        del self._open[depth:]

    def _charge(self) -> None:
        """Give the time since the last boundary to the innermost phase."""
        self._synchronize()
        name, since = self._open[-1] if self._open else "other", self._since
        self._since = self._now()
        self._seconds[name] = self._seconds.get(name, 0.0) + self._since - since

    def __enter__(self) -> PhaseClock:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Mark work, as a context or a decorator; without a running clock it does nothing.

    Raises:
        ValueError: for a name that is none of `PHASES`.
    """
    if name not in PHASES:
        raise ValueError(f"no phase is called {name!r}; there are: {', '.join(PHASES)}")
    entered: list[tuple[PhaseClock, int]] = []  # the clocks that saw it begin see it end
    try:
        for clock in tuple(_running):
            entered.append((clock, clock.depth))
            clock.enter(name)
        yield
    finally:
        for clock, depth in entered:
            clock.leave(depth)
