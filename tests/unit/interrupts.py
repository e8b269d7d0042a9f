"""Interrupts at every line of a function, as a signal may bring them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


class Interrupted(BaseException):
    """What `interrupted_at` raises."""


def interrupted_at(line: int, functions: set[CodeType], action: Callable[[], object]) -> bool:
    """Interrupt ``action`` before the ``line``-th line that it runs of ``functions``; whether it came so far."""
    count = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == line:
                raise Interrupted
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if frame.f_code in functions else None)
    try:
        action()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def each_line(functions: set[CodeType], prepared: Callable[[], Callable[[], object]]) -> Iterator[int]:
    """Interrupt what ``prepared`` gives at its first line, at its second ...; yields after each, until it ends."""
    line = 1
    while interrupted_at(line, functions, prepared()):
        yield line
        line += 1
    assert line > 1, "nothing was interrupted"
