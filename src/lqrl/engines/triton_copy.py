"""Copy a tensor, count the elements that change and notice NaN and inf, in one pass over memory."""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.engines.copy import Copy
from lqrl.quant.triton_use import tiles

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTES = 8192  # of one program's tile
_TILES = 4
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_TENSORS = 256  # of one launch
_NEVER = 2**62  # first program of a tensor that is not there

# (mask, value): an element is NaN or inf when its bits under the mask are the value.
_NOT_FINITE: dict[torch.dtype, tuple[int, int]] = {
    torch.float32: (0x7F800000, 0x7F800000),
    torch.bfloat16: (0x7F80, 0x7F80),
    torch.float16: (0x7C00, 0x7C00),
    torch.float64: (0x7FF0000000000000, 0x7FF0000000000000),
    torch.float8_e4m3fn: (0x7F, 0x7F),
}
_E8M0_NAN = (0xFF, 0xFF)
_NOTHING = (0, 1)


@triton.jit
def _copy(
    source_ptr, target_ptr, flags_ptr, elements,
    MASK: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
    changed = tl.zeros((BLOCK,), dtype=tl.int32)
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    for tile in range(0, TILES):
        offsets = first + tile * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < elements
        new = tl.load(source_ptr + offsets, mask=mask, other=0)
        changed += (new != tl.load(target_ptr + offsets, mask=mask, other=0)).to(tl.int32)
        broken |= (((new & MASK) == VALUE) & mask).to(tl.int32)
        tl.store(target_ptr + offsets, new, mask=mask)
    tl.atomic_add(flags_ptr, tl.sum(changed, 0).to(tl.int64))
    tl.atomic_max(flags_ptr + 1, tl.max(broken, 0).to(tl.int64))


@triton.jit
def _stretch(
    source_ptr, target_ptr, left, not_finite, value,
    MASKED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Copy some tiles; how many elements changed, and whether there is NaN or inf."""
    changed = tl.zeros((BLOCK,), dtype=tl.int32)
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    for tile in range(0, TILES):
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        sources, targets = source_ptr + offsets, target_ptr + offsets
        if ALIGNED:  # to 16 bytes, which the compiler cannot see in an address from a table
            sources = tl.multiple_of(sources, 16)
            targets = tl.multiple_of(targets, 16)
        if MASKED:
            mask = offsets < left
            new = tl.load(sources, mask=mask, other=0)
            changed += (new != tl.load(targets, mask=mask, other=0)).to(tl.int32)
            tl.store(targets, new, mask=mask)
            broken |= (((new & not_finite) == value) & mask).to(tl.int32)
        else:
            new = tl.load(sources)
            changed += (new != tl.load(targets)).to(tl.int32)
            tl.store(targets, new)
            broken |= ((new & not_finite) == value).to(tl.int32)
    return tl.sum(changed, 0), tl.max(broken, 0)


@triton.jit
def _copies(
    table_ptr, flags_ptr, WORD: tl.constexpr, ALIGNED: tl.constexpr, TENSORS: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One stretch of one tensor.

    The table holds each tensor's first program; then its addresses, elements, row of the flags, mask and value.
    """
    program = tl.program_id(0)
    tensor = tl.sum((tl.load(table_ptr + tl.arange(0, TENSORS)) <= program).to(tl.int32), 0) - 1
    first = (program - tl.load(table_ptr + tensor)) * (BLOCK * TILES)
    row = table_ptr + TENSORS + tensor * 6
    source_ptr = tl.load(row).to(tl.pointer_type(WORD)) + first
    target_ptr = tl.load(row + 1).to(tl.pointer_type(WORD)) + first
    left = tl.load(row + 2) - first
    not_finite = tl.load(row + 4).to(WORD)
    value = tl.load(row + 5).to(WORD)
    if left >= BLOCK * TILES:  # a mask that the compiler knows nothing about would make it copy word by word
        changed, broken = _stretch(source_ptr, target_ptr, left, not_finite, value, False, ALIGNED, BLOCK, TILES)
    else:
        changed, broken = _stretch(source_ptr, target_ptr, left, not_finite, value, True, ALIGNED, BLOCK, TILES)
    flags_ptr += tl.load(row + 3) * 2
    tl.atomic_add(flags_ptr, changed.to(tl.int64))
    tl.atomic_max(flags_ptr + 1, broken.to(tl.int64))


def _limits(target: Tensor, e8m0: bool) -> tuple[int, int]:
    return _E8M0_NAN if e8m0 else _NOT_FINITE.get(target.dtype, _NOTHING)


def counted_copies_(copies: Sequence[Copy], flags: Tensor) -> None:
    """`counted_copy_` of each, in a launch for up to 256 tensors of one element size.

    Args:
        copies: contiguous targets; all on one device.
        flags: int64 ``[rows, 2]``.
    """
    groups: dict[tuple[int, bool], list[Copy]] = {}
    for copy in copies:
        if not copy.source.is_contiguous():
            copy = copy._replace(source=copy.source.contiguous())
        aligned = (copy.source.data_ptr() | copy.target.data_ptr()) % 16 == 0
        groups.setdefault((copy.target.element_size(), aligned), []).append(copy)
    with torch.cuda.device_of(flags):
        for (size, aligned), group in groups.items():
            for start in range(0, len(group), _TENSORS):
                _launch(group[start : start + _TENSORS], flags, size, aligned)
    torch.autograd.graph.increment_version([copy.target for copy in copies])


def _launch(group: Sequence[Copy], flags: Tensor, size: int, aligned: bool) -> None:
    block, programs = _BYTES // size, 0
    starts, rows = [_NEVER] * _TENSORS, [0] * (6 * _TENSORS)
    for place, copy in enumerate(group):
        elements, e8m0 = copy.target.numel(), copy.target.dtype == torch.uint8 and copy.name.endswith("weight_scale")
        starts[place] = programs
        rows[6 * place : 6 * place + 6] = (
            copy.source.data_ptr(), copy.target.data_ptr(), elements, copy.row, *_limits(copy.target, e8m0),
        )  # fmt: skip
        programs += tiles(elements, block * _TILES)
    if programs:
        table = torch.tensor(starts + rows, dtype=torch.int64).to(flags.device, non_blocking=True)
        _copies[(programs,)](
            table, flags, WORD=_WORDS[size], ALIGNED=aligned, TENSORS=_TENSORS, BLOCK=block, TILES=_TILES, num_warps=8,
        )  # fmt: skip


def counted_copy_(target: Tensor, source: Tensor, flags: Tensor, *, e8m0: bool = False) -> None:
    """Copy ``source`` over ``target``, both contiguous, of one shape, dtype and device.

    Args:
        target: overwritten.
        source: may be ``target`` itself.
        flags: int64 ``[2]``: the number of elements whose bits changed is added to the first, and the second becomes 1
            when ``source`` holds NaN or inf.
        e8m0: the bytes are power-of-two scales, of which 255 is NaN.
    """
    mask, value = _limits(target, e8m0)
    bits = _BITS[target.element_size()]
    block = _BYTES // target.element_size()
    if not target.numel():
        return
    with torch.cuda.device_of(target):
        _copy[(tiles(target.numel(), block * _TILES),)](
            source.view(bits), target.view(bits), flags, target.numel(),
            MASK=mask, VALUE=value, BLOCK=block, TILES=_TILES, num_warps=8,
        )  # fmt: skip
    torch.autograd.graph.increment_version(target)  # as `copy_` does; layers notice codes that were not packed
