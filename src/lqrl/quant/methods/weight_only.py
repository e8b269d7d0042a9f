"""Low-bit weights, activations as they are: the weight is dequantized to the compute dtype and multiplied."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lqrl.algorithms.logprobs import head_logits
from lqrl.quant.methods.base import LinearMethod, Operands, written
from lqrl.quant.numerics import (
    dequantize,
    dequantize_int4_group,
    dequantize_mxfp4,
    dequantize_nvfp4,
    pack_fp4,
    pack_int4,
    quantize_int4_group,
    quantize_int8_channel,
    quantize_mxfp4,
    quantize_nvfp4,
    unpack_fp4,
    unpack_int4,
)
from lqrl.quant.numerics.int4 import INT4_MAX
from lqrl.quant.numerics.int8 import INT8_MAX


class WeightOnly(LinearMethod):
    """A product with the dequantized weight, whose values are rounded once to the compute dtype."""

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The dequantized weight ``[N, K]``."""
        return written((self.dequantize(tensors, dtype),), out)

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """A plain linear layer."""
        return F.linear(x, operands[0].to(x.dtype), None if bias is None else bias.to(x.dtype))

    def logits(self, x: Tensor, operands: Operands) -> Tensor:
        """The plain head on the dequantized weight."""
        return head_logits(x, operands[0])

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight ``[N, K]``, rounded once."""


@dataclass(frozen=True)
class IntegerChannel(WeightOnly):
    """Integer weights with one scale an output channel: int8 W8A16."""

    weight_max: float = INT8_MAX

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight`` int8 codes ``[N, K]`` and ``weight_scale`` fp32 ``[N, 1]``."""
        codes, scale = quantize_int8_channel(weight, self.weight_max)
        return {"weight": codes, "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * scale``."""
        return dequantize(tensors["weight"], tensors["weight_scale"], dtype)


@dataclass(frozen=True)
class Int4Group(WeightOnly):
    """int4 weights (or fewer levels) with one scale for ``group_size`` neighbors along the input: W4A16.

    The scale is rounded to the weight's dtype before the codes are computed: kernels that hold it in bf16 lose nothing.

    Attributes:
        group_size: neighbors that share a scale.
        weight_max: largest code, 7 for int4.
    """

    group_size: int
    weight_max: float = INT4_MAX

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight_packed`` int32 ``[N, K / 8]`` and ``weight_scale`` ``[N, K / group_size]`` in the weight's dtype."""
        codes, scale = quantize_int4_group(weight, self.group_size, weight.dtype, self.weight_max)
        return {"weight_packed": pack_int4(codes), "weight_scale": scale.to(weight.dtype)}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * scale``."""
        return dequantize_int4_group(unpack_int4(tensors["weight_packed"]), tensors["weight_scale"].float(), dtype)


@dataclass(frozen=True)
class Nvfp4WeightOnly(WeightOnly):
    """nvfp4 weights: blocks of 16 with e4m3 scales and a global scale that fused siblings share."""

    shares_amax: ClassVar[bool] = True

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight_packed`` uint8 ``[N, K / 2]``, ``weight_scale`` e4m3 ``[N, K / 16]``, ``weight_global_scale``."""
        codes, scale, global_scale = quantize_nvfp4(weight, amax)
        return {"weight_packed": pack_fp4(codes), "weight_scale": scale, "weight_global_scale": global_scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * (scale / global_scale)``."""
        codes = unpack_fp4(tensors["weight_packed"])
        return dequantize_nvfp4(codes, tensors["weight_scale"], tensors["weight_global_scale"], dtype)


@dataclass(frozen=True)
class Mxfp4WeightOnly(WeightOnly):
    """mxfp4 weights: blocks of 32 with power-of-two scales."""

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight_packed`` uint8 ``[N, K / 2]`` and ``weight_scale`` uint8 (e8m0) ``[N, K / 32]``."""
        codes, scale = quantize_mxfp4(weight)
        return {"weight_packed": pack_fp4(codes), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * 2**(scale - 127)``."""
        return dequantize_mxfp4(unpack_fp4(tensors["weight_packed"]), tensors["weight_scale"], dtype)
