"""Weights on their way to servers, through a directory that both sides see or through memory of the learner's GPU."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lqrl.engines.base import RefreshError
from lqrl.engines.cuda_ipc import exported, ipc_driver, on, opened
from lqrl.engines.vllm.parts import announce_parts, announced, layer_files, read_parts, send_parts
from lqrl.engines.vllm.staging import Unpacker, packed
from lqrl.quant.cuda_driver import DriverError

FILE_BYTES = 2**31
"""A file is closed before it would exceed this."""
BUFFER_BYTES = 2**28
"""Of each of the two buffers on the learner's GPU."""
_CONTENTS = "weights.json"


@dataclass(frozen=True)
class Route:
    """How weights go to servers.

    Attributes:
        directory: where files are put; ``None`` is this machine's for temporary ones.
        streams: write and load each layer as it comes; otherwise all is written first.
        device: the GPU through whose memory weights go instead, as they come; files only describe them.
    """

    directory: str | None = None
    streams: bool = False
    device: torch.device | None = None


def this_machine() -> str:
    """What tells this machine from others, until it is started again; containers share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return platform.node()


@contextmanager
def under_way(
    weights: Iterable[tuple[str, Tensor]], directory: Path, route: Route, *, readers: int, patience_s: float
) -> Iterator[Callable[..., None] | None]:
    """Begin to send a complete set; at the end of the block all readers must have ended.

    Args:
        weights: names and tensors, each name once, layers in order.
        directory: an empty one.
        route: how they go.
        readers: workers that call `read_weights`.
        patience_s: see `announce_parts`.

    Returns:
        What sends the rest beside the readers, as `send_parts` with ``ended``; ``None`` when all is written.

    Raises:
        RefreshError: when the GPU has no memory to share.
        OSError: when files cannot be written.
    """
    if route.device is not None:
        try:
            driver = ipc_driver()
            with exported(driver, on(route.device), 2, BUFFER_BYTES) as buffers:
                handles = [handle.hex() for handle in buffers.handles]
                announce_parts(directory, patience_s, handles=handles, buffer_bytes=buffers.size)
                yield partial(send_parts, packed(weights, buffers, route.device), directory, readers=readers)
        except DriverError as error:
            raise RefreshError(f"the weights cannot go through the GPU's memory: {error}") from error
    elif route.streams:
        announce_parts(directory, patience_s)
        yield partial(send_parts, layer_files(weights), directory, readers=readers)
    else:
        write_weights(weights, directory)
        yield None


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


def read_weights(directory: Path, device: torch.device | None = None) -> Generator[tuple[str, Tensor], None, None]:
    """What `write_weights` wrote, or `under_way` is sending, in the order it came.

    Args:
        directory: see there.
        device: the GPU that gets what comes through the memory of a GPU.

    Raises:
        RefreshError: when there is no complete set, or another GPU's memory cannot be opened.
    """
    from safetensors import safe_open

    plan = announced(directory)
    if plan is not None and "handles" in plan:
        yield from _read_shared(directory, plan["handles"], plan["buffer_bytes"], device)
        return
    if plan is not None:
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


def _read_shared(
    directory: Path, handles: list[str], size: int, device: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    if device is None or device.type != "cuda":
        raise RefreshError(f"the weights are on a GPU, the worker is on {device}; set transport: files")
    try:
        with opened(ipc_driver(), on(device), [bytes.fromhex(handle) for handle in handles], size) as buffers:
            yield from read_parts(directory, Unpacker(buffers, device))
    except DriverError as error:
        raise RefreshError(f"the worker cannot read the learner's GPU memory: {error}") from error
