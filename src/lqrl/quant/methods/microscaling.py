"""Block-scaled weights *and* activations: mxfp8 and nvfp4 W4A4, emulated where the card has no such GEMM.

Every element times its block's scale is exact in bf16 (and in fp32), so the emulation multiplies the very values that a
block-scaled tensor core multiplies; only the order and width of the sums differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lqrl.algorithms.logprobs import wide_matmul
from lqrl.quant.methods.base import LinearMethod, Operands, finished, written
from lqrl.quant.numerics import (
    decode_e2m1,
    dequantize_mxfp8,
    dequantize_nvfp4,
    nvfp4_token_scale,
    pack_fp4,
    quantize_mxfp8,
    quantize_nvfp4,
    quantize_nvfp4_dynamic,
    unpack_fp4,
)
from lqrl.quant.numerics.fp4 import NVFP4_BLOCK


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` with fp32 sums and an fp32 result."""
    return wide_matmul(x, weight.t())


@dataclass(frozen=True)
class Mxfp8(LinearMethod):
    """e4m3 weights and activations in blocks of 32 with power-of-two scales."""

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight`` e4m3 ``[N, K]`` and ``weight_scale`` uint8 (e8m0) ``[N, K / 32]``."""
        codes, scale = quantize_mxfp8(weight)
        return {"weight": codes, "weight_scale": scale}

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The dequantized weight, exact in bf16 and fp32."""
        return written((self.dequantize(tensors, dtype),), out)

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """Quantize the blocks of ``x``, multiply, round once, add the bias."""
        rows = self.round_input(x.reshape(-1, x.shape[-1]))
        return finished(_wide(rows, operands[0]), bias, x)

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * 2**(scale - 127)``."""
        return dequantize_mxfp8(tensors["weight"], tensors["weight_scale"], dtype)

    def round_input(self, x: Tensor) -> Tensor:
        """Quantized in blocks and back."""
        return dequantize_mxfp8(*quantize_mxfp8(x), x.dtype)


@dataclass(frozen=True)
class Nvfp4(LinearMethod):
    """nvfp4 weights and activations: ``dtype(acc / (weight_global * token_global))``.

    The global scale of an activation is its token's, so a token's bits do not depend on its batch; checkpoints with a
    calibrated one for the whole tensor differ in that.
    """

    @property
    def shares_amax(self) -> bool:
        """One scale for all of them."""
        return True

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """As `lqrl.quant.methods.weight_only.Nvfp4WeightOnly`."""
        codes, scale, global_scale = quantize_nvfp4(weight, amax)
        return {"weight_packed": pack_fp4(codes), "weight_scale": scale, "weight_global_scale": global_scale}

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """Elements times block scales, exact in ``dtype``, and the global scale."""
        values = _scaled(unpack_fp4(tensors["weight_packed"]), tensors["weight_scale"])
        return written((values.to(dtype), tensors["weight_global_scale"]), out)

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """Quantize the blocks of ``x``, multiply, undo both global scales in fp32, round once, add the bias."""
        values, token_scale = self.quantize_input(x.reshape(-1, x.shape[-1]))
        acc = _wide(values.to(operands[0].dtype), operands[0])
        return finished(acc.div_(operands[1]).div_(token_scale), bias, x)

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * (scale / global_scale)``."""
        codes = unpack_fp4(tensors["weight_packed"])
        return dequantize_nvfp4(codes, tensors["weight_scale"], tensors["weight_global_scale"], dtype)

    def round_input(self, x: Tensor) -> Tensor:
        """Quantized in blocks with the token's global scale, and back."""
        values, token_scale = self.quantize_input(x)
        return values.div_(token_scale).to(x.dtype)

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Elements times block scales of the tokens ``[..., K]``, fp32, and the global scales they are yet to lose."""
        token_scale = nvfp4_token_scale(x)
        codes, scale = quantize_nvfp4_dynamic(x, token_scale.unsqueeze(-1))
        return _scaled(codes, scale), token_scale


def _scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 elements times their block's e4m3 scale."""
    blocks = decode_e2m1(codes).unflatten(-1, (-1, NVFP4_BLOCK))
    return blocks.mul_(scale.float().unsqueeze(-1)).flatten(-2)
