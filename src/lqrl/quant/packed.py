"""`PackedWeight`: a low-bit weight as it is shipped, and how its bits are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

PackedFormat = Literal["int8", "int4", "nvfp4", "mxfp4"]


@dataclass(frozen=True)
class PackedWeight:
    """Codes and scales of a weight ``[N, K]``; all tensors contiguous.

    Attributes:
        format: ``int8``: one scale a row; ``int4``: codes + 8; ``nvfp4``, ``mxfp4``: e2m1 codes.
        codes: int8 ``[N, K]``, or bytes ``[N, K / 2]`` of two codes each, the first in the low half.
        scale: ``[N, groups]``; fp32 or bf16 (integers), e4m3 (nvfp4), e8m0 bytes (mxfp4).
        global_scale: what nvfp4's scales are divided by, of one element.
    """

    format: PackedFormat
    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        n, width = self.codes.shape
        return n, width if self.format == "int8" else 2 * width

    @property
    def group_size(self) -> int:
        """Neighbors along K that share a scale."""
        return self.shape[1] // self.scale.shape[1]


def as_bytes(packed: Tensor) -> Tensor:
    """`pack_int4`'s int32 ``[N, K / 8]`` as uint8 ``[N, K / 2]``, the same memory; hosts and GPUs are little-endian."""
    return packed.view(torch.uint8)
