"""What checks of exact kernels are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def same(a: Tensor, b: Tensor, what: object) -> None:
    assert a.dtype == b.dtype, (what, a.dtype, b.dtype)
    assert torch.equal(a, b), (what, int((a != b).sum()), "of", a.numel(), "elements differ")
