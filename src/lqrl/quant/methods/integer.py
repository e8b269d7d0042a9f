"""Integer weights and activations on the exact integer GEMM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lqrl.quant import kernels
from lqrl.quant.methods.base import Coded, LinearMethod, Operands, TokenCodes, finished
from lqrl.quant.numerics import INT8_MAX, dequantize
from lqrl.quant.rows import quantize_int8_channel, quantize_int8_channels, quantize_int8_token
from lqrl.quant.triton_use import use_triton


@dataclass(frozen=True)
class IntegerGemm(LinearMethod):
    """Weights per output channel, activations per token: ``dtype((acc * weight_scale) * token_scale) + bias``.

    Attributes:
        weight_max: largest weight code, 127 for int8.
        activation_max: largest activation code.
    """

    weight_max: float = INT8_MAX
    activation_max: float = INT8_MAX

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight`` int8 codes ``[N, K]`` and ``weight_scale`` fp32 ``[N, 1]``."""
        codes, scale = quantize_int8_channel(weight, self.weight_max)
        return {"weight": codes, "weight_scale": scale}

    def quantize_many(self, weights: Sequence[Tensor], export_dtype: torch.dtype) -> list[dict[str, Tensor]] | None:
        """One launch for many matrices of one width, on GPUs with Triton."""
        made = quantize_int8_channels(weights, export_dtype, self.weight_max)
        return None if made is None else [{"weight": codes, "weight_scale": scale} for codes, scale in made]

    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """The codes in the integer kernel's layout, and the scales."""
        if out is None:
            return kernels.int8_pack(tensors["weight"]), tensors["weight_scale"]
        kernels.int8_repack_(out[0], tensors["weight"])
        return out

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """`kernels.int8_linear`; fewer activation bits than 8 are quantized here, before the same product."""
        packed, scale = operands
        if self.activation_max == INT8_MAX:
            return kernels.int8_linear(x, packed, scale, bias)
        rows = x.reshape(-1, x.shape[-1])
        codes, token_scale = quantize_int8_token(rows, self.activation_max)
        acc = kernels.int8_mm(codes, packed, scale.shape[0])
        return finished(acc.float().mul_(scale.view(1, -1)).mul_(token_scale), bias, x)

    @property
    def token_codes(self) -> TokenCodes | None:
        """int8; codes of fewer bits go another way."""
        return "int8" if self.activation_max == INT8_MAX else None

    def coded_linear(self, x: Coded, operands: Operands, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`kernels.int8_coded_linear`."""
        if self.token_codes is None:
            return super().coded_linear(x, operands, bias, dtype)
        packed, scale = operands
        return kernels.int8_coded_linear(x.codes, x.scale, packed, scale, bias, dtype)

    def coded_apart(
        self, x: Coded, operands: Operands, bias: Tensor | None, widths: Sequence[int], dtype: torch.dtype
    ) -> list[Tensor] | None:
        """By a Triton kernel whose tiles end with the layers, on GPUs where it is."""
        if self.token_codes is None or not use_triton(x.codes) or kernels.int8_backend(x.codes.device) != "torch":
            return None
        from lqrl.quant import triton_int8

        packed, scale = operands
        return triton_int8.apart(x.codes, x.scale, packed, scale, bias, widths, dtype)

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``codes * scale``."""
        return dequantize(tensors["weight"], tensors["weight_scale"], dtype)

    def round_input(self, x: Tensor) -> Tensor:
        """Quantized per token and back."""
        return dequantize(*quantize_int8_token(x, self.activation_max), dtype=x.dtype)
