"""Low-bit weights, activations as they are: the weight is dequantized to the compute dtype and multiplied.

With bf16 compute on an NVIDIA GPU the operands are the shipped tensors, on both sides. Few rows (decoding) are
multiplied by a kernel that dequantizes on the way; for more, the whole weight is dequantized, used and dropped. Beside
the product of thousands of rows, which learners and prefills have, that costs a few per cent; a kept copy would take as
much memory as the bf16 model. Everywhere else the operand is the dequantized weight.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lqrl.algorithms.logprobs import head_logits
from lqrl.quant.methods.base import LinearMethod, Operands, finished, written
from lqrl.quant.numerics import (
    dequantize,
    dequantize_int4_group,
    dequantize_mxfp4,
    dequantize_nvfp4,
    pack_fp4,
    quantize_int8_rounded,
    quantize_mxfp4,
    quantize_nvfp4,
    unpack_fp4,
    unpack_int4,
)
from lqrl.quant.numerics.int4 import INT4_MAX
from lqrl.quant.numerics.int8 import INT8_MAX
from lqrl.quant.packed import PackedWeight, as_bytes
from lqrl.quant.rows import quantize_int4_packed
from lqrl.quant.triton_use import use_triton


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


class PackedWeightOnly(WeightOnly):
    """`WeightOnly` with kernels that read the shipped tensors.

    Attributes:
        shipped: names of the shipped tensors, in the order of the operands.
    """

    shipped: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The shipped tensors with bf16 compute on an NVIDIA GPU, else the dequantized weight."""
        values = self._values(tensors)
        if dtype != torch.bfloat16 or not self._on_triton(values):
            return super().operands(tensors, dtype, out)
        return values if out is None else out

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """A plain linear layer with the weight's values in the compute dtype."""
        if len(operands) == 1:
            return super().linear(x, operands, bias)
        from lqrl.quant import triton_weight_only

        weight, rows = self.packed(operands), x.reshape(-1, x.shape[-1])
        if x.dtype != torch.bfloat16 or len(rows) > triton_weight_only.FUSED_ROWS[weight.format]:
            return super().linear(x, (triton_weight_only.dequantize(weight, torch.bfloat16),), bias)
        return finished(triton_weight_only.linear(rows, weight, bias, x.dtype), None, x)

    def logits(self, x: Tensor, operands: Operands) -> Tensor:
        """The head on the weight's values in the compute dtype."""
        if len(operands) == 1:
            return super().logits(x, operands)
        from lqrl.quant import triton_weight_only

        weight = self.packed(operands)
        if x.dtype != torch.bfloat16 or len(x) > triton_weight_only.FUSED_ROWS[weight.format]:
            return super().logits(x, (triton_weight_only.dequantize(weight, torch.bfloat16),))
        return triton_weight_only.linear(x, weight, None, torch.float32)

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight ``[N, K]``, rounded once."""
        values = self._values(tensors)
        if dtype not in (torch.bfloat16, torch.float32) or not self._on_triton(values):
            return self.unpacked(tensors, dtype)
        from lqrl.quant import triton_weight_only

        return triton_weight_only.dequantize(self.packed(values), dtype)

    @abstractmethod
    def packed(self, operands: Operands) -> PackedWeight:
        """How the kernels read the shipped tensors."""

    @abstractmethod
    def unpacked(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """`dequantize` in eager torch, which the kernels are tested against."""

    def _values(self, tensors: Mapping[str, Tensor]) -> Operands:
        return tuple(tensors[name] for name in self.shipped)

    def _on_triton(self, values: Operands) -> bool:
        readable = values[1].dtype not in (torch.float16, torch.float64) and all(t.is_contiguous() for t in values)
        return readable and use_triton(values[0])


@dataclass(frozen=True)
class IntegerChannel(PackedWeightOnly):
    """Integer weights with one scale an output channel: int8 W8A16."""

    shipped: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    weight_max: float = INT8_MAX

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight`` int8 codes ``[N, K]`` and ``weight_scale`` ``[N, 1]`` in the weight's dtype."""
        codes, scale = quantize_int8_rounded(weight, weight.dtype, self.weight_max)
        return {"weight": codes, "weight_scale": scale}

    def packed(self, operands: Operands) -> PackedWeight:
        """One code a byte."""
        return PackedWeight("int8", *operands)

    def unpacked(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * scale``."""
        return dequantize(tensors["weight"], tensors["weight_scale"], dtype)


@dataclass(frozen=True)
class Int4Group(PackedWeightOnly):
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
        packed, scale = quantize_int4_packed(weight, self.group_size, self.weight_max)
        return {"weight_packed": packed, "weight_scale": scale}

    def packed(self, operands: Operands) -> PackedWeight:
        """Two codes a byte, each plus 8."""
        return PackedWeight("int4", as_bytes(operands[0]), operands[1])

    def unpacked(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * scale``."""
        return dequantize_int4_group(unpack_int4(tensors["weight_packed"]), tensors["weight_scale"].float(), dtype)


@dataclass(frozen=True)
class Nvfp4WeightOnly(PackedWeightOnly):
    """nvfp4 weights: blocks of 16 with e4m3 scales and a global scale that fused siblings share."""

    shipped: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_global_scale")

    @property
    def shares_amax(self) -> bool:
        """One scale for all of them."""
        return True

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight_packed`` uint8 ``[N, K / 2]``, ``weight_scale`` e4m3 ``[N, K / 16]``, ``weight_global_scale``."""
        codes, scale, global_scale = quantize_nvfp4(weight, amax)
        return {"weight_packed": pack_fp4(codes), "weight_scale": scale, "weight_global_scale": global_scale}

    def packed(self, operands: Operands) -> PackedWeight:
        """Two e2m1 codes a byte, and a scale of scales."""
        return PackedWeight("nvfp4", *operands)

    def unpacked(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * (scale / global_scale)``."""
        codes = unpack_fp4(tensors["weight_packed"])
        return dequantize_nvfp4(codes, tensors["weight_scale"], tensors["weight_global_scale"], dtype)


@dataclass(frozen=True)
class Mxfp4WeightOnly(PackedWeightOnly):
    """mxfp4 weights: blocks of 32 with power-of-two scales."""

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight_packed`` uint8 ``[N, K / 2]`` and ``weight_scale`` uint8 (e8m0) ``[N, K / 32]``."""
        codes, scale = quantize_mxfp4(weight)
        return {"weight_packed": pack_fp4(codes), "weight_scale": scale}

    def packed(self, operands: Operands) -> PackedWeight:
        """Two e2m1 codes a byte."""
        return PackedWeight("mxfp4", *operands)

    def unpacked(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * 2**(scale - 127)``."""
        return dequantize_mxfp4(unpack_fp4(tensors["weight_packed"]), tensors["weight_scale"], dtype)
