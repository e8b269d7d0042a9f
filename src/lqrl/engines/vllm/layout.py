"""Where the bits of a tensor come from: the sent tensors it is made of, found by their first and last bits alone.

What is found is a guess; `lqrl.engines.vllm.direct` writes by it and compares all bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

_LOOK = 32  # elements at either end of a sent tensor, and bytes that are compared
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Part(NamedTuple):
    """A place that holds a sent tensor.

    Attributes:
        name: the sent tensor's.
        target: a view of that place, its elements in the order of what is sent. A floating-point dtype other than that
            of what is sent is a cast.
    """

    name: str
    target: Tensor


@dataclass(frozen=True)
class _Look:
    """Both ends of a sent tensor, as a matrix in one order and one dtype; a vector is one row.

    Attributes:
        shape: as it is sent.
        rows, columns: of the matrix as it lies.
        transposed: against what is sent.
        cast: ``dtype`` is not the one that is sent.
        first, last: bytes of the ends, row after row.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    transposed: bool
    dtype: torch.dtype
    cast: bool
    first: bytes
    last: bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    def sent_order(self, place: Tensor) -> Tensor:
        """The elements of ``place``, which lies as this does, as they are sent."""
        return place.t() if self.transposed else place

    def preference(self, near: str) -> tuple[bool, bool, int]:
        """How well it explains the tensor ``near`` beside others with the same ends."""
        return not self.cast, not self.transposed, _shared(self.name, near)


class SentTensors:
    """What tells sent tensors apart.

    Attributes:
        names: of all.
        scalars: names by value, of those with one element.

    Args:
        tensors: a set whose values are as good as random; none is kept.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.names: list[str] = []
        self.scalars: dict[float, list[str]] = {}
        self._looks: dict[bytes, list[_Look]] = {}  # by the first byte
        for name, tensor in tensors:
            self.names.append(name)
            if tensor.numel() == 1 and tensor.is_floating_point():
                self.scalars.setdefault(float(tensor), []).append(name)
            for look in _looks(name, tensor):
                self._looks.setdefault(look.first[:1], []).append(look)

    def parts_of(self, name: str, tensor: Tensor) -> list[Part]:
        """What ``tensor`` is made of, as far as it is of whole sent tensors.

        Found are sent tensors one after another in memory, each in its own order or that of its transpose, under any
        dtype of the same bits; blocks of a matrix, beside or below each other, with padding at their ends; and floats
        that were cast. The matrix may have any strides that give each element a place of its own.

        Args:
            name: of the tensor; decides between sent tensors that look alike, as scalars of few bits may.
            tensor: any; the parts are views of it.
        """
        lying = _lying(tensor.detach())
        if lying is None or not lying.numel():
            return []
        flat = self._one_after_another(name, lying) if lying.is_contiguous() else []
        if lying.dim() != 2 or _nbytes(flat) == lying.nbytes:
            return flat
        blocks = self._blocks(name, lying)
        return blocks if _nbytes(blocks) > _nbytes(flat) else flat

    def scalar_of(self, name: str, value: float) -> str | None:
        """The sent tensor whose only element is ``value``; ``name`` decides as in `parts_of`."""
        return max(self.scalars.get(value, ()), key=lambda sent: _shared(sent, name), default=None)

    def _one_after_another(self, name: str, lying: Tensor) -> list[Part]:
        memory, dtype = lying.reshape(-1).view(torch.uint8), lying.dtype
        parts, at = [], 0
        while at < memory.numel():
            left = memory[at:]
            fitting = [
                look
                for look in self._beginning_with(_host(left[:_LOOK]), dtype)
                if look.nbytes <= left.numel()
                and left.storage_offset() % look.dtype.itemsize == 0
                and _host(left[look.nbytes - len(look.last) : look.nbytes]) == look.last
            ]
            if not fitting:
                break
            look = max(fitting, key=lambda look: look.preference(name))
            place = left[: look.nbytes].view(look.dtype)
            shape = (look.rows, look.columns) if look.transposed else look.shape
            parts.append(Part(look.name, look.sent_order(place.view(shape))))
            at += look.nbytes
        return parts

    def _blocks(self, name: str, lying: Tensor) -> list[Part]:
        parts, top = [], 0
        while top < lying.shape[0]:
            height, left = 0, 0
            while left < lying.shape[1]:
                corner = lying[top:, left:]
                fitting = [look for look in self._at_corner(corner) if height in (0, look.rows)]
                if not fitting:
                    break
                look = max(fitting, key=lambda look: look.preference(name))
                height = look.rows
                place = corner[:height, : look.columns].view(look.dtype)
                parts.append(Part(look.name, look.sent_order(place)))
                left += look.columns
            if not height:
                break
            top += height
        return parts

    def _at_corner(self, corner: Tensor) -> Iterator[_Look]:
        """What lies in the first rows and columns of a matrix."""
        rows, columns = corner.shape
        size = corner.element_size()
        head = _host(corner[0, : _LOOK // size])
        for look in self._looks.get(head[:1], ()):
            wide = min(look.row_bytes, len(look.first))
            if look.dtype.itemsize != size or look.rows > rows or look.columns > columns or wide > len(head):
                continue
            end = corner[look.rows - 1, look.columns - wide // size : look.columns]
            if _may_be(look, corner.dtype) and head.startswith(look.first[:wide]) and _host(end) == look.last[-wide:]:
                yield look

    def _beginning_with(self, head: bytes, dtype: torch.dtype) -> Iterator[_Look]:
        for look in self._looks.get(head[:1], ()):
            if _may_be(look, dtype) and head.startswith(look.first):
                yield look


def _shared(a: str, b: str) -> int:
    """Characters that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _may_be(look: _Look, dtype: torch.dtype) -> bool:
    return not look.cast or look.dtype == dtype


def _looks(name: str, tensor: Tensor) -> Iterator[_Look]:
    """Every order and dtype in which ``tensor`` is looked for."""
    shape = tuple(tensor.shape)
    matrix = tensor.detach().reshape(shape[0] if len(shape) > 1 else 1, -1)
    if not matrix.numel():
        return
    dtypes = {tensor.dtype, *(_FLOATS if tensor.dtype in _FLOATS else ())}
    for transposed in (False, True) if len(shape) > 1 else (False,):
        lying = matrix.t() if transposed else matrix
        rows, columns = lying.shape
        some = -(-_LOOK // columns)
        first = lying[:some, :_LOOK].reshape(-1)[:_LOOK].cpu()
        last = lying[-some:, -_LOOK:].reshape(-1)[-_LOOK:].cpu()
        for dtype in dtypes:
            count = _LOOK // dtype.itemsize
            ends = _host(first[:count].to(dtype)), _host(last[-count:].to(dtype))
            yield _Look(name, shape, rows, columns, transposed, dtype, dtype != tensor.dtype, *ends)


def _lying(tensor: Tensor) -> Tensor | None:
    """``tensor`` with its dimensions in the order of memory; nothing where elements share a place or have gaps."""
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    lying = tensor.permute(order)
    if lying.is_contiguous():
        return lying
    lying = lying.squeeze()
    apart = lying.dim() == 2 and lying.stride(1) == 1 and lying.stride(0) >= lying.shape[1]
    return lying if apart else None


def _nbytes(parts: Iterable[Part]) -> int:
    return sum(part.target.nbytes for part in parts)


def _host(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).tolist())
