"""nf4: four-bit codes at the quantiles of a normal distribution (QLoRA, arXiv 2305.14314), as bitsandbytes has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lqrl.extras import pip_install
from lqrl.quant.methods.weight_only import WeightOnly

NF4_BLOCK = 64
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""What the codes 0 to 15 stand for."""
_LARGEST_ON_CUDA = 2.0**126


@dataclass(frozen=True)
class Nf4(WeightOnly):
    """Blocks of 64 along the input, each with the fp32 magnitude of its largest weight; no double quantization.

    bitsandbytes chooses the codes; reading them back needs a table only. Its GPU kernel multiplies by an approximate
    reciprocal, so a weight on the boundary of two levels may get the other one than on the CPU. Edges: a zero block has
    scale 0 and is zero; one with NaN or inf has scale NaN; on a GPU weights saturate at 2**126.
    """

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """``weight_packed`` uint8 ``[N, K / 2]``, the first of a pair in the high bits; ``weight_scale`` fp32.

        Raises:
            ModuleNotFoundError: without bitsandbytes.
            ValueError: when 64 does not divide ``K``: a block would hold weights of two rows.
        """
        rows, columns = weight.shape
        if columns % NF4_BLOCK:
            raise ValueError(f"nf4 needs a multiple of {NF4_BLOCK} inputs, got {columns}")
        if weight.is_meta:
            packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
            scale = torch.empty(rows, columns // NF4_BLOCK, dtype=torch.float32, device=weight.device)
            return {"weight_packed": packed, "weight_scale": scale}
        packed, absmax = _quantized(weight.contiguous())
        scale = absmax.view(rows, -1)
        largest = weight.view(rows, -1, NF4_BLOCK).float().abs().amax(-1)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        return {"weight_packed": packed.view(rows, -1), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``level * scale`` in fp32, rounded once: the bits of bitsandbytes."""
        packed, scale = tensors["weight_packed"], tensors["weight_scale"]
        levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=packed.device)
        codes = torch.stack([packed >> 4, packed & 15], -1).flatten(-2)
        values = levels[codes.int()].unflatten(-1, (-1, NF4_BLOCK))
        return values.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes and fp32 scales, flat."""
    quantize = _quantize_4bit()
    if not weight.is_cuda:
        packed, state = quantize(weight, blocksize=NF4_BLOCK, quant_type="nf4")
        return packed, state.absmax
    # Whatever the current stream is, bitsandbytes quantizes on the default one.
    current, default = torch.cuda.current_stream(weight.device), torch.cuda.default_stream(weight.device)
    default.wait_stream(current)
    # The kernel's reciprocal of anything larger is 0, and so would the block be.
    bounded = weight.clamp(-_LARGEST_ON_CUDA, _LARGEST_ON_CUDA)
    packed, state = quantize(bounded, blocksize=NF4_BLOCK, quant_type="nf4")
    current.wait_stream(default)
    return packed, state.absmax


@cache
def _quantize_4bit() -> Callable[..., tuple[Tensor, Any]]:
    try:
        from bitsandbytes.functional import quantize_4bit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"nf4 needs bitsandbytes: {pip_install('bitsandbytes')}") from error
    return quantize_4bit
