"""Weights on their way to servers in parts, each of which is read by all workers before the next but one is made.

What a part is, is up to its two ends: a file of tensors here, a description of GPU memory in
`lqrl.engines.vllm.staging`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from lqrl.engines.base import RefreshError

_PLAN = "parts.json"  # makes a directory one of parts; says how long a reader waits for the next
_END, _FAILED = "end", "failed"
_LEFT = "left"  # of a reader that reads no more; the others of its server would wait for what does not come
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_LOOK_S = 0.0005

Part = Callable[[Path], None]
"""Writes what a reader needs into a new file."""


class ReadersEnded(RefreshError):
    """A worker stopped reading before the end; what it says of that is the reason."""


def announce_parts(directory: Path, patience_s: float, **facts: Any) -> None:
    """Make an empty ``directory`` one that `send_parts` fills.

    Args:
        directory: that learner and workers see.
        patience_s: seconds that a reader waits for the next part, since it cannot see that the learner has died.
        facts: what else `announced` says, as JSON has it.
    """
    (directory / _PLAN).write_text(json.dumps({"patience_s": patience_s} | facts), encoding="utf-8")


def announced(directory: Path) -> Mapping[str, Any] | None:
    """What `announce_parts` said; ``None`` when it was not called."""
    try:
        return json.loads((directory / _PLAN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def send_parts(parts: Iterable[Part], directory: Path, *, readers: int, ended: Callable[[], bool]) -> None:
    """Make parts while they are read; at most two are under way, one of which is being made. What is read is removed.

    Args:
        parts: a complete set. The next is asked for when all but the last have been read.
        directory: see `announce_parts`.
        readers: workers that call `read_parts`.
        ended: whether one of them has ended.

    Raises:
        ReadersEnded: when one ends too early.
    """
    previous: Path | None = None
    try:
        for number, part in enumerate(parts):
            written = directory / f"{number:05d}.writing"
            part(written)
            _await_readers(previous, readers, ended)
            previous = written.rename(written.with_suffix(".part"))
        _await_readers(previous, readers, ended)
        (directory / _END).touch()
    except BaseException:
        (directory / _FAILED).touch()
        raise


def read_parts(
    directory: Path, read: Callable[[Path], Iterator[tuple[str, Tensor]]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """What `send_parts` sends, in its order, as it comes.

    Args:
        directory: see `announce_parts`.
        read: what a part holds, by its file; when it ends, nothing that it gave refers to the part any more. ``None``
            is for those of `layer_files`.

    Raises:
        RefreshError: when the learner stopped, or nothing comes for as long as `announce_parts` said.
    """
    patience_s = json.loads((directory / _PLAN).read_text(encoding="utf-8"))["patience_s"]
    reader, number = uuid4().hex, 0
    try:
        while (path := _next_part(directory, number, patience_s)) is not None:
            yield from (read or _read_file)(path)
            path.with_suffix(f".{reader}.read").touch()
            number += 1
    except BaseException:
        with suppress(OSError):  # the learner may have taken the directory away
            (directory / f"{reader}.{_LEFT}").touch()
        raise


def layer_files(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Part]:
    """Parts that are files of a decoder layer, or of what lies between two; one of them is in main memory at once.

    Args:
        weights: names and tensors, each name once, layers in order.
    """
    for tensors in _by_layer(weights):
        yield partial(_write_file, tensors)


def _write_file(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"order": json.dumps(list(tensors))})
    tensors.clear()


def _read_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as held:
        for name in json.loads(held.metadata()["order"]):
            yield name, held.get_tensor(name)


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
        if ended() or any(part.parent.glob(f"*.{_LEFT}")):
            raise ReadersEnded("a worker ended before it had read all weights")
        time.sleep(_LOOK_S)
    for path in (part, *acknowledged):
        path.unlink()


def _next_part(directory: Path, number: int, patience_s: float) -> Path | None:
    path, deadline = directory / f"{number:05d}.part", time.monotonic() + patience_s
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
