"""Weights on their way to a server: a directory of safetensors files that both sides see."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from lqrl.engines.base import RefreshError
from lqrl.engines.vllm.parts import comes_in_parts, read_parts

FILE_BYTES = 2**31
"""A file is closed before it would exceed this."""
_CONTENTS = "weights.json"


def write_weights(weights: Iterable[tuple[str, Tensor]], directory: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Write a complete set; holds one file's tensors in main memory.

    Args:
        weights: names and tensors, each name once.
        directory: an empty one. Its list of contents comes last, so that a directory that has one is complete.
        file_bytes: see `FILE_BYTES`; a tensor is never split.
    """
    from safetensors.torch import save_file

    contents: list[tuple[str, list[str]]] = []
    held: dict[str, Tensor] = {}
    size = 0

    def close() -> None:
        contents.append((f"{len(contents):05d}.safetensors", list(held)))
        save_file(held, directory / contents[-1][0])
        held.clear()

    for name, tensor in weights:
        if held and size + tensor.nbytes > file_bytes:
            close()
            size = 0
        # a copy: views and tied tensors share memory, which a file cannot
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    close()
    (directory / _CONTENTS).write_text(json.dumps(contents), encoding="utf-8")


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """What `write_weights` wrote, or `lqrl.engines.vllm.parts.send_parts` is writing, in the order it came.

    Raises:
        RefreshError: when there is no complete set.
    """
    from safetensors import safe_open

    if comes_in_parts(directory):
        yield from read_parts(directory)
        return
    try:
        contents = json.loads((directory / _CONTENTS).read_text(encoding="utf-8"))
    except OSError as error:
        raise RefreshError(
            f"the server finds no complete set of weights in {directory} ({error}); set transfer_directory to a place "
            "that the learner and all servers see under one name"
        ) from error
    for file, names in contents:
        with safe_open(directory / file, "pt") as held:
            for name in names:
                yield name, held.get_tensor(name)
