"""No quantization, as a method: for layers that keep their weight and stand among those that do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lqrl.quant.methods.weight_only import WeightOnly


@dataclass(frozen=True)
class FullPrecision(WeightOnly):
    """The weight as it is exported."""

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight`` ``[N, K]``, a copy."""
        return {"weight": weight.clone()}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``weight``."""
        return tensors["weight"].to(dtype)
