"""Formats whose products have one order of summation: the same codes as the format they stand for, other kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lqrl.quant import exact
from lqrl.quant.fp8_gemm import BLOCK
from lqrl.quant.methods.base import Coded, LinearMethod, Operands, TokenCodes, finished, written
from lqrl.quant.methods.fp8 import Fp8Block, Fp8Channel
from lqrl.quant.methods.integer import IntegerGemm
from lqrl.quant.methods.microscaling import Mxfp8, Nvfp4
from lqrl.quant.methods.weight_only import PackedWeightOnly, WeightOnly
from lqrl.quant.rows import quantize_fp8_group
from lqrl.quant.triton_use import TENSOR_CORES_FP8, use_triton


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

    @property
    def shares_amax(self) -> bool:
        """As ``base``."""
        return self.base.shares_amax

    @property
    def row_block(self) -> int:
        """As ``base``."""
        return self.base.row_block

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
class ExactPacked(ExactValues):
    """`ExactValues` of a weight that stays packed on CUDA with bf16 compute.

    Few rows are multiplied by a kernel that dequantizes on the way, with the bits that the dequantized weight gives.
    """

    base: PackedWeightOnly

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The shipped tensors, or the values in the exact kernel's layout."""
        if not next(iter(tensors.values())).is_cuda:
            return super().operands(tensors, dtype, out)
        return self.base.operands(tensors, dtype, out)  # on CUDA that layout is the plain one

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """As `ExactValues`."""
        return self._product(x, operands, bias, x.dtype)

    def logits(self, x: Tensor, operands: Operands) -> Tensor:
        """As `ExactValues`."""
        return self._product(x, operands, None, torch.float32)

    def _product(self, x: Tensor, operands: Operands, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if len(operands) == 1:
            return exact.linear(x, operands[0], bias, dtype)
        from lqrl.quant import triton_exact_gemm, triton_weight_only

        weight, rows = self.base.packed(operands), x.reshape(-1, x.shape[-1])
        if x.dtype != torch.bfloat16 or len(rows) > triton_exact_gemm.PACKED_ROWS:
            return exact.linear(x, triton_weight_only.dequantize(weight, torch.bfloat16), bias, dtype)
        y = triton_exact_gemm.packed_linear(rows, weight, bias, dtype)
        return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True)
class ExactFp8(_Exact):
    """e4m3 codes times e4m3 codes; then ``dtype((acc * weight_scale) * token_scale) + bias``.

    Tensor cores multiply the codes where there are some for fp8; elsewhere they are bf16, which holds them exactly.
    """

    base: Fp8Channel

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The codes as the kernel reads them, and one scale an output channel."""
        codes, scale = tensors["weight"], tensors["weight_scale"].reshape(-1, 1)
        if use_triton(codes, TENSOR_CORES_FP8):
            return self.base.operands(tensors, dtype, out)
        packed = exact.pack(codes.bfloat16(), None if out is None else out[0])
        scales = scale.expand(len(codes), 1).contiguous() if out is None else out[1].copy_(scale)
        return packed, scales

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """Quantize the tokens, multiply, scale, add the bias in the dtype of ``x``."""
        coded = Coded(*self.base.quantize_input(x.reshape(-1, x.shape[-1])))
        return finished(self.coded_linear(coded, operands, bias, x.dtype), None, x)

    @property
    def token_codes(self) -> TokenCodes | None:
        """As ``base``."""
        return self.base.token_codes

    def coded_linear(self, x: Coded, operands: Operands, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply, scale, add the bias in ``dtype``."""
        if operands[0].dtype == torch.float8_e4m3fn:
            from lqrl.quant import triton_exact_gemm

            return triton_exact_gemm.scaled_linear(*x, operands[0], operands[1], bias, dtype)
        acc = exact.linear(x.codes.bfloat16(), operands[0], dtype=torch.float32)
        y = acc.mul_(operands[1].view(1, -1)).mul_(x.scale).to(dtype)
        return y if bias is None else y + bias.to(dtype)


@dataclass(frozen=True)
class ExactFp8Block(_Exact):
    """Sums of 128 products of e4m3 codes, each scaled, added in fp32 in order.

    That is what the format's kernel for fp8 tensor cores does; elsewhere the blocks are multiplied one by one in bf16.
    """

    base: Fp8Block

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The codes as the kernel reads them, in one piece or in blocks along the input, then the scales."""
        codes, scale = tensors["weight"], tensors["weight_scale"]
        if use_triton(codes, TENSOR_CORES_FP8) and codes.shape[1] % 16 == 0:
            return self.base.operands(tensors, dtype, out)
        blocks = [block.bfloat16() for block in codes.split(BLOCK, 1)]
        packed = [exact.pack(block, None if out is None else out[i]) for i, block in enumerate(blocks)]
        return written((*packed, scale), out)

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """Quantize the groups, multiply block by block, add the bias in the dtype of ``x``."""
        if operands[0].dtype == torch.float8_e4m3fn:
            return self.base.linear(x, operands, bias)
        (*blocks, weight_scale), n = operands, len(operands[0])
        codes, scale = quantize_fp8_group(x.reshape(-1, x.shape[-1]))
        columns = weight_scale.repeat_interleave(BLOCK, 0)[:n]  # [N, ceil(K / 128)]
        acc = torch.zeros(len(codes), n, device=x.device)
        for i, (part, packed) in enumerate(zip(codes.split(BLOCK, 1), blocks, strict=True)):
            product = exact.linear(part.bfloat16(), packed, dtype=torch.float32)
            acc += product.mul_(scale[:, i : i + 1] * columns[:, i])
        return finished(acc, bias, x)


@dataclass(frozen=True)
class ExactNvfp4(_Exact):
    """Elements times block scales, exact in the compute dtype, on both sides; both global scales are undone in fp32."""

    base: Nvfp4

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The values in the exact kernel's layout, and the global scale."""
        values, global_scale = self.base.operands(tensors, dtype)
        return written((exact.pack(values, None if out is None else out[0]), global_scale), out)

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """Quantize the blocks of ``x``, multiply, undo the scales, round once, add the bias."""
        values, token_scale = self.base.quantize_input(x.reshape(-1, x.shape[-1]))
        acc = exact.linear(values.to(operands[0].dtype), operands[0], dtype=torch.float32)
        return finished(acc.div_(operands[1]).div_(token_scale), bias, x)


def exact_method(method: LinearMethod) -> LinearMethod:
    """``method`` with products that sum each output in one order; sums of integers have no order to begin with.

    Raises:
        NotImplementedError: for a format that has none.
    """
    if isinstance(method, (IntegerGemm, _Exact)):
        return method
    if isinstance(method, PackedWeightOnly):
        return ExactPacked(method)
    if isinstance(method, (WeightOnly, Mxfp8)):
        return ExactValues(method)
    if isinstance(method, Nvfp4):
        return ExactNvfp4(method)
    if isinstance(method, Fp8Block):
        return ExactFp8Block(method)
    if isinstance(method, Fp8Channel) and method.activation == "token":
        return ExactFp8(method)
    raise NotImplementedError(
        f"exact mode has no product for {method}: a scale for all activations ties a token to its batch; use a format "
        "with a scale for each token, or set exact to false"
    )
