"""Copy a tensor, count the elements that change and notice NaN and inf, in one pass over memory."""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.triton_use import tiles

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTES = 8192  # of one program's tile
_TILES = 4

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


def counted_copy_(target: Tensor, source: Tensor, flags: Tensor, *, e8m0: bool = False) -> None:
    """Copy ``source`` over ``target``, both contiguous, of one shape, dtype and device.

    Args:
        target: overwritten.
        source: may be ``target`` itself.
        flags: int64 ``[2]``: the number of elements whose bits changed is added to the first, and the second becomes 1
            when ``source`` holds NaN or inf.
        e8m0: the bytes are power-of-two scales, of which 255 is NaN.
    """
    mask, value = _E8M0_NAN if e8m0 else _NOT_FINITE.get(target.dtype, _NOTHING)
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
