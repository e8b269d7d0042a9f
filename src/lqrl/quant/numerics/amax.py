"""Largest magnitudes: of a row, and of a tensor or of siblings that share one scale. NaN and inf pass through."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def row_amax(x: Tensor) -> Tensor:
    """Largest magnitude along the last dimension: fp32 ``[..., 1]``."""
    return x.abs().amax(dim=-1, keepdim=True).float()


def shared_amax(tensors: Sequence[Tensor]) -> Tensor:
    """Largest magnitude over all ``tensors``: fp32 ``[1]``.

    Siblings that an engine fuses into one matrix (q, k, v; gate, up) have one per-tensor scale: pass this to each of
    their quantizers.

    Raises:
        ValueError: when ``tensors`` is empty.
    """
    if not tensors:
        raise ValueError("shared_amax got no tensors; pass the weights that share one scale")
    return torch.stack([t.abs().amax().float() for t in tensors]).amax(dim=0, keepdim=True)


def amax_cap(scale_dtype: torch.dtype) -> float:
    """What integer formats cap a finite amax at before they divide it by the largest code.

    The largest number of the scale's dtype but one. A quotient of the largest number itself may be rounded up, and the
    code's value would then be inf in that dtype.
    """
    return math.ldexp(1 - torch.finfo(scale_dtype).eps, math.frexp(torch.finfo(scale_dtype).max)[1])


def check_matrix(weight: Tensor) -> None:
    """Refuse what is no linear weight.

    Raises:
        ValueError: when ``weight`` is not a matrix.
    """
    if weight.ndim != 2:
        raise ValueError(f"a linear weight has shape [out, in], got {tuple(weight.shape)}")


def in_groups(x: Tensor, size: int, name: str) -> Tensor:
    """View ``x`` ``[..., K]`` as ``[..., K / size, size]``.

    Raises:
        ValueError: when ``K`` is no multiple of ``size``; the message says what to do.
    """
    if x.shape[-1] % size:
        raise ValueError(
            f"{name} shares a scale among {size} neighbors, and {size} does not divide the input width {x.shape[-1]}: "
            f"take a format whose group divides it, or put such layers on the scheme's skip list"
        )
    return x.unflatten(-1, (x.shape[-1] // size, size))
