"""Formats whose products have one order of summation: the same codes as the format they stand for, other kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lqrl.quant import exact
from lqrl.quant.methods.base import LinearMethod, Operands, finished
from lqrl.quant.methods.fp8 import Fp8Channel
from lqrl.quant.methods.integer import IntegerGemm
from lqrl.quant.methods.microscaling import Mxfp8
from lqrl.quant.methods.weight_only import WeightOnly


@dataclass(frozen=True)
class _Exact(LinearMethod):
    """Codes of ``base``; subclasses multiply them.

    Attributes:
        base: the format.
    """

    base: LinearMethod

    @property
    def format(self) -> LinearMethod:
        """The format whose codes these are."""
        return self.base

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """As ``base``."""
        return self.base.quantize(weight, amax)

    def quantize_many(self, weights: Sequence[Tensor], export_dtype: torch.dtype) -> list[dict[str, Tensor]] | None:
        """As ``base``."""
        return self.base.quantize_many(weights, export_dtype)

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """As ``base``."""
        return self.base.dequantize(tensors, dtype)

    def round_input(self, x: Tensor) -> Tensor:
        """As ``base``."""
        return self.base.round_input(x)


@dataclass(frozen=True)
class ExactValues(_Exact):
    """The dequantized weight, rounded once to the compute dtype, times the input as the format rounds it."""

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The values in the exact kernel's layout."""
        return (exact.pack(self.base.dequantize(tensors, dtype), None if out is None else out[0]),)

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """`exact.linear`: the bias is added in fp32, then the sum is rounded once."""
        return exact.linear(self.base.round_input(x), operands[0], bias)

    def logits(self, x: Tensor, operands: Operands) -> Tensor:
        """The same product with an fp32 result."""
        return exact.linear(self.base.round_input(x), operands[0], dtype=torch.float32)


@dataclass(frozen=True)
class ExactFp8(_Exact):
    """e4m3 codes, exact in bf16, times e4m3 codes; then ``dtype((acc * weight_scale) * token_scale) + bias``."""

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The codes in the exact kernel's layout, and one scale an output channel."""
        codes, scale = tensors["weight"], tensors["weight_scale"].reshape(-1, 1)
        packed = exact.pack(codes.bfloat16(), None if out is None else out[0])
        scales = scale.expand(len(codes), 1).contiguous() if out is None else out[1].copy_(scale)
        return packed, scales

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """Quantize the tokens, multiply, scale, add the bias in the dtype of ``x``."""
        assert isinstance(self.base, Fp8Channel)
        codes, scale = self.base.quantize_input(x.reshape(-1, x.shape[-1]))
        acc = exact.linear(codes.bfloat16(), operands[0], dtype=torch.float32)
        return finished(acc.mul_(operands[1].view(1, -1)).mul_(scale), bias, x)


def exact_method(method: LinearMethod) -> LinearMethod:
    """``method`` with products that sum each output in one order; sums of integers have no order to begin with.

    Raises:
        NotImplementedError: for a format that has none.
    """
    if isinstance(method, (IntegerGemm, _Exact)):
        return method
    if isinstance(method, (WeightOnly, Mxfp8)):
        return ExactValues(method)
    if isinstance(method, Fp8Channel) and method.activation == "token":
        return ExactFp8(method)
    raise NotImplementedError(
        f"exact mode has no product for {method}: use int8, a weight-only format, fp8 per channel or tensor, mxfp8, or "
        "set exact to false"
    )
