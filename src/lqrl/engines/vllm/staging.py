"""Weights on their way through buffers that both sides reach: bytes of tensors, cut where a buffer is full.

A part is one full buffer. Its file says what lies where. Readers copy it out: none of their tensors is in a buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lqrl.engines.base import RefreshError
from lqrl.engines.vllm.parts import Part

ALIGNMENT = 256
"""Bytes that tensors in a buffer begin at multiples of."""


class Buffers(Protocol):
    """Two or more buffers of one size; see `lqrl.engines.cuda_ipc.SharedBuffers`."""

    @property
    def addresses(self) -> Sequence[int]:
        """Where they are for this process."""
        ...

    @property
    def size(self) -> int:
        """Bytes of each, a multiple of `ALIGNMENT`."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy of ``size`` bytes to the address ``target``."""

    def wait(self) -> None:
        """Wait for all that is queued."""


class Piece(NamedTuple):
    """A range of a tensor's bytes in a buffer.

    Attributes:
        name, dtype, shape: of the tensor.
        start, size: bytes, from the tensor's first one on.
        offset: where they begin in the buffer.
    """

    name: str
    dtype: str
    shape: list[int]
    start: int
    size: int
    offset: int


def packed(weights: Iterable[tuple[str, Tensor]], buffers: Buffers, device: torch.device) -> Iterator[Part]:
    """Parts for `lqrl.engines.vllm.parts.send_parts`, each in the buffer after the last one's.

    Args:
        weights: names and tensors.
        buffers: where they are put; with two, all parts but the last must have been read when another is asked for.
        device: the buffers'. Tensors that are elsewhere are copied to it first.
    """
    number, used = 0, 0
    pieces: list[Piece] = []
    for name, tensor in weights:
        data = tensor.detach().to(device).contiguous()
        dtype, shape = str(data.dtype).removeprefix("torch."), list(data.shape)
        start, ends = 0, False
        while not ends:
            if used == buffers.size:
                buffers.wait()
                yield partial(_describe, number, pieces)
                number, used, pieces = (number + 1) % len(buffers.addresses), 0, []
            size = min(data.nbytes - start, buffers.size - used)
            if size:
                buffers.copy(buffers.addresses[number] + used, data.data_ptr() + start, size)
            pieces.append(Piece(name, dtype, shape, start, size, used))
            start, used = start + size, -(-(used + size) // ALIGNMENT) * ALIGNMENT
            ends = start == data.nbytes
        del tensor, data
    if pieces:
        buffers.wait()
        yield partial(_describe, number, pieces)


def _describe(buffer: int, pieces: Sequence[Piece], path: Path) -> None:
    path.write_text(json.dumps({"buffer": buffer, "pieces": pieces}), encoding="utf-8")


class Unpacker:
    """Reads the parts of `packed` in their order, for `lqrl.engines.vllm.parts.read_parts`.

    Args:
        buffers: the sender's, where this process has them.
        device: where the tensors are made.
    """

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        self._buffers, self._device = buffers, device
        self._begun: Tensor | None = None
        self._filled = 0

    def __call__(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """Tensors that are complete with the part in ``path``; work on them belongs on the same stream.

        Raises:
            RefreshError: when a piece does not go on where the last one ended, or lies outside of the buffer.
        """
        part = json.loads(path.read_text(encoding="utf-8"))
        address = self._buffers.addresses[part["buffer"]]
        for piece in (Piece(*each) for each in part["pieces"]):
            tensor = self._continued(piece)
            if piece.size:
                self._buffers.copy(tensor.data_ptr() + piece.start, address + piece.offset, piece.size)
            self._filled += piece.size
            if self._filled == tensor.nbytes:
                self._begun, self._filled = None, 0
                yield piece.name, tensor
            del tensor
        self._buffers.wait()

    def _continued(self, piece: Piece) -> Tensor:
        if piece.start == 0 and self._begun is None:
            self._begun = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=self._device)
        tensor = self._begun
        inside = piece.offset >= 0 and piece.offset + piece.size <= self._buffers.size
        if tensor is None or piece.start != self._filled or piece.start + piece.size > tensor.nbytes or not inside:
            raise RefreshError(f"{piece.name}: its bytes do not come in order; the learner and the worker differ")
        return tensor
