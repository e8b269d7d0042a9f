"""fp8 (e4m3) weights and activations: scaled GEMMs on the tensor cores, their emulation elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lqrl.quant import fp8_gemm
from lqrl.quant.methods.base import Coded, LinearMethod, Operands, TokenCodes, finished, written
from lqrl.quant.numerics import (
    dequantize,
    dequantize_fp8_block,
    dequantize_fp8_group,
)
from lqrl.quant.rows import (
    quantize_fp8_block,
    quantize_fp8_channel,
    quantize_fp8_channels,
    quantize_fp8_group,
    quantize_fp8_per_tensor_dynamic,
    quantize_fp8_tensor,
    quantize_fp8_token,
)


@dataclass(frozen=True)
class Fp8Channel(LinearMethod):
    """Weights per output channel, activations per token or per tensor: ``dtype(acc * weight_scale * token_scale)``.

    Attributes:
        activation: what shares an activation's scale. ``tensor`` lets a token's bits depend on its batch.
    """

    activation: Literal["token", "tensor"] = "token"

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight`` e4m3 codes ``[N, K]`` and ``weight_scale`` fp32 ``[N, 1]``."""
        codes, scale = quantize_fp8_channel(weight)
        return {"weight": codes, "weight_scale": scale}

    def quantize_many(self, weights: Sequence[Tensor], export_dtype: torch.dtype) -> list[dict[str, Tensor]] | None:
        """One launch for many matrices of one width, on GPUs with Triton."""
        made = quantize_fp8_channels(weights, export_dtype)
        return None if made is None else [{"weight": codes, "weight_scale": scale} for codes, scale in made]

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The codes as the GEMM reads them, and one scale an output channel."""
        codes = tensors["weight"]
        scale = tensors["weight_scale"].reshape(-1, 1).expand(codes.shape[0], 1)
        return written((fp8_gemm.operand(codes), scale.contiguous()), out)

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """Quantize the tokens, multiply, scale, add the bias in the dtype of ``x``."""
        rows = x.reshape(-1, x.shape[-1])
        codes, scale = self.quantize_input(rows)
        y = fp8_gemm.row_scaled(codes, scale.expand(len(rows), 1), operands[0], operands[1], x.dtype)
        return finished(y, bias, x)

    @property
    def token_codes(self) -> TokenCodes | None:
        """e4m3, unless one scale is for all tokens."""
        return "fp8_e4m3" if self.activation == "token" else None

    def coded_linear(self, x: Coded, operands: Operands, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply, scale, add the bias in ``dtype``."""
        if self.token_codes is None:
            return super().coded_linear(x, operands, bias, dtype)
        y = fp8_gemm.row_scaled(x.codes, x.scale, operands[0], operands[1], dtype)
        return y if bias is None else y + bias.to(dtype)

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * scale``."""
        return dequantize(tensors["weight"], tensors["weight_scale"], dtype)

    def round_input(self, x: Tensor) -> Tensor:
        """Quantized and back."""
        return dequantize(*self.quantize_input(x), dtype=x.dtype)

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes e4m3 of the tokens ``[M, K]``, and their scales."""
        return quantize_fp8_token(x) if self.activation == "token" else quantize_fp8_per_tensor_dynamic(x)


@dataclass(frozen=True)
class Fp8Tensor(Fp8Channel):
    """Weights with one scale, shared by fused siblings; the product is that of `Fp8Channel`."""

    @property
    def shares_amax(self) -> bool:
        """One scale for all of them."""
        return True

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight`` e4m3 codes ``[N, K]`` and ``weight_scale`` fp32 ``[1]``."""
        codes, scale = quantize_fp8_tensor(weight, amax)
        return {"weight": codes, "weight_scale": scale}

    def quantize_many(self, weights: Sequence[Tensor], export_dtype: torch.dtype) -> list[dict[str, Tensor]] | None:
        """There is none: a scale needs the magnitude of whole matrices first."""
        return None


@dataclass(frozen=True)
class Fp8Block(LinearMethod):
    """Weights in blocks of 128x128, activations in groups of 128: sums of 128 products, each scaled, added in fp32."""

    @property
    def row_block(self) -> int:
        """128."""
        return fp8_gemm.BLOCK

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight`` e4m3 codes ``[N, K]`` and ``weight_scale`` fp32 ``[ceil(N / 128), ceil(K / 128)]``."""
        codes, scale = quantize_fp8_block(weight)
        return {"weight": codes, "weight_scale": scale}

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The codes as the GEMM reads them, and the scales."""
        return written((fp8_gemm.operand(tensors["weight"]), tensors["weight_scale"]), out)

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """Quantize the groups, multiply block by block, add the bias in the dtype of ``x``."""
        codes, scale = quantize_fp8_group(x.reshape(-1, x.shape[-1]))
        y = fp8_gemm.block_scaled(codes, scale, operands[0], operands[1], x.dtype)
        return finished(y, bias, x)

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * scale``."""
        return dequantize_fp8_block(tensors["weight"], tensors["weight_scale"], dtype=dtype)

    def round_input(self, x: Tensor) -> Tensor:
        """Quantized in groups and back."""
        return dequantize_fp8_group(*quantize_fp8_group(x), dtype=x.dtype)
