"""Trial weights: a complete set of random values that a model can compute with, made while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_STD = 0.02  # of matrices
_CODES_STD = 60.0  # of 8-bit codes
_SCALES = 0.05  # of a cache, about


class TrialWeights(Mapping[str, Tensor]):
    """Random tensors in the place of those that a learner sends, the same whenever they are asked for.

    Scales and vectors are positive, so that an engine takes them, and codes times scales are as wide as the weights of
    a fresh model. Elements differ as much as their dtype lets them.

    Args:
        like: names, shapes and dtypes; on any device.
        device: where they are made.
        seed: another one gives other values everywhere.
    """

    def __init__(self, like: Mapping[str, Tensor], device: torch.device, seed: int) -> None:
        self._like, self._device, self._seed = like, device, seed
        self._places = {name: place for place, name in enumerate(like)}

    def __getitem__(self, name: str) -> Tensor:
        like = self._like[name]
        generator = torch.Generator(self._device).manual_seed(self._seed * len(self._places) + self._places[name])
        made = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        if like.dtype == torch.float8_e4m3fn:
            wide = torch.empty(like.shape, dtype=torch.bfloat16, device=self._device)
            # 0 would multiply nothing, and scales of blocks are of this dtype too
            wide.normal_(std=_CODES_STD, generator=generator).clamp_(-448, 448)
            made.copy_(wide.abs_() if name.endswith("_scale") else wide)
        elif like.dtype == torch.int8:
            made.random_(-127, 128, generator=generator)
        elif not like.dtype.is_floating_point:
            # Powers of two near 1 where bytes are scales.
            low, high = (118, 128) if name.endswith("_scale") else (0, 128 if like.dtype == torch.uint8 else 2**31 - 1)
            made.random_(low, high, generator=generator)
        elif name.endswith("weight_scale"):
            made.uniform_(0.5, 1.5, generator=generator).mul_(_STD / _CODES_STD)
        elif name.endswith("_scale") and like.numel() == 1:
            made.uniform_(0.5, 1.5, generator=generator).mul_(_SCALES)
        elif like.dim() < 2:
            made.uniform_(0.5, 1.5, generator=generator)
        else:
            made.normal_(std=_STD, generator=generator)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)
