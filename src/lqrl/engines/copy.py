"""Copying a weight into an engine: what changed, and whether it is finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lqrl.quant.numerics.finite import whole_scale
from lqrl.quant.triton_use import use_triton

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def counted_copy_(target: Tensor, source: Tensor, name: str, flags: Tensor) -> None:
    """Copy ``source`` over ``target``, of one shape, dtype and device.

    Args:
        target: overwritten.
        source: what it becomes.
        name: of the weight; tells whether bytes are scales, see `whole_scale`.
        flags: int64 ``[2]`` of zeros on that device, which become the number of elements whose bits changed, and 1 when
            ``source`` holds NaN or inf.
    """
    source = source.contiguous()
    if target.is_contiguous() and target.element_size() in _BITS and use_triton(target):
        from lqrl.engines import triton_copy

        scale = target.dtype == torch.uint8 and name.endswith("weight_scale")
        return triton_copy.counted_copy_(target, source, flags, e8m0=scale)
    bits = _BITS[target.element_size()]
    flags[0] = torch.count_nonzero(target.view(bits) != source.view(bits))
    flags[1] = ~whole_scale(name, source)
    target.copy_(source)


class Copy(NamedTuple):
    """One tensor to copy, as `counted_copy_` takes it, and its row among the flags of all."""

    target: Tensor
    source: Tensor
    name: str
    row: int


@torch.no_grad()
def counted_copies_(copies: Sequence[Copy], flags: Tensor) -> None:
    """`counted_copy_` of each, on a GPU in a few launches; all on one device, no target being another's source.

    Args:
        copies: what to copy.
        flags: int64 ``[rows, 2]`` of zeros on that device.
    """
    together: list[Copy] = []
    fast = use_triton(flags)
    for copy in copies:
        if fast and copy.target.is_contiguous() and copy.target.element_size() in _BITS:
            together.append(copy)
        else:
            counted_copy_(copy.target, copy.source, copy.name, flags[copy.row])
    if together:
        from lqrl.engines import triton_copy

        triton_copy.counted_copies_(together, flags)
