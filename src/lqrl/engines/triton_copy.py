"""Copy a tensor, count the elements that change and notice NaN and inf, in one pass over memory."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# Launches take options of the compiler besides the kernel's parameters; constexpr stands for the number it holds.
from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.engines.copy import Copy
from lqrl.quant.triton_use import on_device, tiles

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTES = 8192  # of one program's tile
_TILES = 4
_WORDS = 4096  # of 4 bytes, of one program that copies one of many tensors
_WARPS = 8
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
    tl.atomic_add(flags_ptr, tl.sum(changed, 0).to(tl.int64), sem="relaxed")
    tl.atomic_max(flags_ptr + 1, tl.max(broken, 0).to(tl.int64), sem="relaxed")


@triton.jit
def _copies(
    table_ptr, flags_ptr, BITS: tl.constexpr, TENSORS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One tile of one tensor, in words of 32 bits that hold elements of ``BITS`` bits.

    The elements of a word are compared and looked at together, so that the pass is bound by memory: the top bit of each
    becomes 1 where it differs, and where its magnitude plus a carry reaches that bit. The table holds each tensor's
    first program; then its addresses, words, row of the flags, and the masks of `_carries`.
    """
    one: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1)  # the lowest bit of each element
    low: tl.constexpr = one * ((1 << (BITS - 1)) - 1)  # all but the top bit
    program = tl.program_id(0)
    starts = tl.load(table_ptr + tl.arange(0, TENSORS))
    begun = starts <= program
    row = table_ptr + TENSORS + (tl.sum(begun.to(tl.int32), 0) - 1) * 7
    first = (program - tl.max(tl.where(begun, starts, 0), 0)) * BLOCK
    source_ptr, target_ptr = tl.load(row), tl.load(row + 1)
    left = tl.multiple_of(tl.load(row + 2) - first, 4)
    flags_ptr += tl.load(row + 3) * 2
    magnitude, carry = tl.load(row + 4).to(tl.uint32), tl.load(row + 5).to(tl.uint32)
    free = tl.load(row + 6).to(tl.uint32)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < left
    # Aligned to 16 bytes, which the compiler cannot see in an address from a table.
    sources = tl.multiple_of(source_ptr.to(tl.pointer_type(tl.uint32)) + first + offsets, 16)
    targets = tl.multiple_of(target_ptr.to(tl.pointer_type(tl.uint32)) + first + offsets, 16)
    new = tl.load(sources, mask=mask, other=0)
    other = new ^ tl.load(targets, mask=mask, other=0)
    tl.store(targets, new, mask=mask)
    differs = ((((other & low) + low) | other) >> (BITS - 1)) & one
    changed = tl.zeros((BLOCK,), dtype=tl.uint32)
    for shift in tl.static_range(0, 32, BITS):
        changed += (differs >> shift) & 1
    broken = ((new & magnitude) + carry) & (new | free) & (one << (BITS - 1))
    # Relaxed: an ordered one would wait until all stores of the program have reached memory.
    tl.atomic_add(flags_ptr, tl.sum(changed, 0).to(tl.int64), sem="relaxed")
    tl.atomic_max(flags_ptr + 1, tl.max((broken != 0).to(tl.int32), 0).to(tl.int64), sem="relaxed")


def _carries(mask: int, value: int, size: int) -> tuple[int, int, int]:
    """What finds NaN and inf in a word: a mask of magnitudes, a carry, and the bits that need not be set.

    ``value``, the magnitude from which on an element is not finite, plus the carry reaches the element's top bit.
    """
    bits = 8 * size
    one, top = 0xFFFFFFFF // ((1 << bits) - 1), 1 << (bits - 1)
    if (mask, value) == _NOTHING:
        return 0, 0, 0
    free = 0 if mask & top else 0xFFFFFFFF  # an unsigned element counts its top bit too
    return one * (top - 1), one * (top - (value & (top - 1))), free


def _limits(dtype: torch.dtype, e8m0: bool) -> tuple[int, int]:
    return _E8M0_NAN if e8m0 else _NOT_FINITE.get(dtype, _NOTHING)


def counted_copies_(copies: Sequence[Copy], flags: Tensor) -> None:
    """`counted_copy_` of each, in a launch for up to 256 tensors of one element size.

    Args:
        copies: contiguous targets; all on one device.
        flags: int64 ``[rows, 2]``.
    """
    groups: dict[int, list[Copy]] = {}
    for copy in copies:
        if not copy.source.is_contiguous():
            copy = copy._replace(source=copy.source.contiguous())
        size, target = copy.target.element_size(), copy.target
        if size == 8 or (copy.source.data_ptr() | target.data_ptr() | target.numel() * size) % 16:
            counted_copy_(target, copy.source, flags[copy.row], e8m0=_e8m0(target, copy.name))
        else:
            groups.setdefault(size, []).append(copy)
    with torch.cuda.device_of(flags):
        for size, group in groups.items():
            for start in range(0, len(group), _TENSORS):
                _launch(group[start : start + _TENSORS], flags, size)
    torch.autograd.graph.increment_version([copy.target for copy in copies])


def _e8m0(target: Tensor, name: str) -> bool:
    return target.dtype == torch.uint8 and name.endswith("weight_scale")


def _launch(group: Sequence[Copy], flags: Tensor, size: int) -> None:
    programs = 0
    starts, rows = array("q", [_NEVER]) * _TENSORS, array("q")
    masks: dict[tuple[torch.dtype, bool], tuple[int, int, int]] = {}
    for place, copy in enumerate(group):
        target, source, name, row = copy
        kind = target.dtype, _e8m0(target, name)
        if kind not in masks:
            masks[kind] = _carries(*_limits(*kind), size)
        words = target.numel() * size // 4
        starts[place] = programs
        rows.extend((source.data_ptr(), target.data_ptr(), words, row, *masks[kind]))
        programs += tiles(words, _WORDS)
    if programs:
        # `torch.tensor` of a list of this length takes longer than the copies.
        table = on_device(torch.frombuffer(starts + rows, dtype=torch.int64), flags.device)
        _copies[(programs,)](table, flags, BITS=8 * size, TENSORS=_TENSORS, BLOCK=_WORDS, num_warps=_WARPS)


def counted_copy_(target: Tensor, source: Tensor, flags: Tensor, *, e8m0: bool = False) -> None:
    """Copy ``source`` over ``target``, both contiguous, of one shape, dtype and device.

    Args:
        target: overwritten.
        source: may be ``target`` itself.
        flags: int64 ``[2]``: the number of elements whose bits changed is added to the first, and the second becomes 1
            when ``source`` holds NaN or inf.
        e8m0: the bytes are power-of-two scales, of which 255 is NaN.
    """
    mask, value = _limits(target.dtype, e8m0)
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
