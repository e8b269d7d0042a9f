"""Weights on their way to servers one layer at a time: each part is read by all workers before the next but one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from uuid import uuid4

from torch import Tensor

from lqrl.engines.base import RefreshError

_PLAN = "parts.json"  # makes a directory one of parts; says how long a reader waits for the next
_END, _FAILED = "end", "failed"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_LOOK_S = 0.002


class ReadersEnded(RefreshError):
    """A worker stopped reading before the end; what it says of that is the reason."""


def announce_parts(directory: Path, patience_s: float) -> None:
    """Make an empty ``directory`` one that `send_parts` fills.

    Args:
        directory: that learner and workers see.
        patience_s: seconds that a reader waits for the next part, since it cannot see that the learner has died.
    """
    (directory / _PLAN).write_text(json.dumps({"patience_s": patience_s}), encoding="utf-8")


def comes_in_parts(directory: Path) -> bool:
    """Whether `announce_parts` was called."""
    return (directory / _PLAN).exists()


def send_parts(
    weights: Iterable[tuple[str, Tensor]], directory: Path, *, readers: int, ended: Callable[[], bool]
) -> None:
    """Write a complete set while it is read; at most two parts are in ``directory``, one in main memory.

    A part is a decoder layer, or what lies between two. What is read is removed.

    Args:
        weights: names and tensors, each name once, layers in order.
        directory: see `announce_parts`.
        readers: workers that call `read_parts`.
        ended: whether one of them has ended.

    Raises:
        ReadersEnded: when one ends too early.
    """
    from safetensors.torch import save_file

    previous: Path | None = None
    try:
        for number, part in enumerate(_by_layer(weights)):
            written = directory / f"{number:05d}.writing"
            save_file(part, written, metadata={"order": json.dumps(list(part))})
            part.clear()
            _await_readers(previous, readers, ended)
            previous = written.rename(written.with_suffix(".safetensors"))
        _await_readers(previous, readers, ended)
        (directory / _END).touch()
    except BaseException:
        (directory / _FAILED).touch()
        raise


def read_parts(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """What `send_parts` writes, in its order, as it comes.

    Raises:
        RefreshError: when the learner stopped, or nothing comes for as long as `announce_parts` said.
    """
    from safetensors import safe_open

    patience_s = json.loads((directory / _PLAN).read_text(encoding="utf-8"))["patience_s"]
    reader, number = uuid4().hex, 0
    while (path := _next_part(directory, number, patience_s)) is not None:
        with safe_open(path, "pt") as held:
            for name in json.loads(held.metadata()["order"]):
                yield name, held.get_tensor(name)
        path.with_suffix(f".{reader}.read").touch()
        number += 1


def _by_layer(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    layer: str | None = None
    for name, tensor in weights:
        found = _LAYER.search(name)
        now = found[1] if found else None
        if part and now != layer:
            yield part
            part = {}
        layer = now
        # a copy: views and tied tensors share memory, which a file cannot
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if part:
        yield part


def _await_readers(part: Path | None, readers: int, ended: Callable[[], bool]) -> None:
    if part is None:
        return
    while len(acknowledged := list(part.parent.glob(f"{part.stem}.*.read"))) < readers:
        if ended():
            raise ReadersEnded("a worker ended before it had read all weights")
        time.sleep(_LOOK_S)
    for path in (part, *acknowledged):
        path.unlink()


def _next_part(directory: Path, number: int, patience_s: float) -> Path | None:
    path, deadline = directory / f"{number:05d}.safetensors", time.monotonic() + patience_s
    while not path.exists():
        if (directory / _END).exists():
            return None
        if (directory / _FAILED).exists() or not directory.exists():
            raise RefreshError(f"the learner stopped before part {number} of the weights")
        if time.monotonic() > deadline:
            raise RefreshError(
                f"part {number} of the weights did not come in {patience_s:g} s; raise timeout_s if the learner lives"
            )
        time.sleep(_LOOK_S)
    return path
