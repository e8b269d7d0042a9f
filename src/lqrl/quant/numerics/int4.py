"""int4 weights: symmetric, one scale for a group of neighbors along the input, packed eight to an int32.

The rule is that of the int4 quantization-aware training of Kimi-K2 and slime: ``scale = max(amax / 7, 1e-5)``, codes
``round(w / scale)`` in [-7, 7], half to even. compressed-tensors' observer uses ``amax / 7.5`` and codes in [-8, 7],
so its grid is 7 % finer, saturates the largest value when it is positive, and is not symmetric. Both checkpoints mean
``codes * scale``; given the same scale, both give the same codes except for its -8.

Defined results at the edges: a zero group has codes 0 and scale 1e-5; one huge value is kept at +-7 and what is below
half a step becomes 0, and amax is capped so that it stays finite (`amax_cap`); groups below 7e-5, subnormal ones too,
lose resolution to the floor and stay finite; a group with NaN or inf has codes 0 and scale NaN, so it dequantizes to
NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lqrl.quant.numerics.amax import amax_cap, check_matrix, in_groups, row_amax

INT4_MAX = 7.0
INT4_SCALE_FLOOR = 1e-5
_PER_INT32 = 8


def quantize_int4_group(
    weight: Tensor, group_size: int, scale_dtype: torch.dtype = torch.float32, largest: float = INT4_MAX
) -> tuple[Tensor, Tensor]:
    """Quantize a linear weight with one scale for ``group_size`` neighbors of a row.

    Args:
        weight: ``[N, K]`` floating point, already rounded to the export dtype.
        group_size: neighbors along K that share a scale.
        scale_dtype: the scale is rounded to it before the codes are computed. Weight-only kernels hold scales in the
            dtype of the activations: with bf16 here, an engine that casts the scale to bf16 changes nothing.
        largest: largest code; 3 leaves the seven levels of int3.

    Returns:
        Codes ``[N, K]`` int8 in [-largest, largest] and scales fp32 ``[N, K / group_size]``.

    Raises:
        ValueError: when ``weight`` is not a matrix, or ``group_size`` does not divide ``K``.
    """
    check_matrix(weight)
    groups = in_groups(weight.float(), group_size, "int4")
    amax = row_amax(groups)
    scale = torch.div(amax, torch.full_like(amax, largest))
    scale = scale.clamp_(INT4_SCALE_FLOOR, amax_cap(scale_dtype) / largest).to(scale_dtype).float()
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    codes = torch.div(groups, scale).round_().clamp_(-largest, largest).nan_to_num_(0.0)
    return codes.to(torch.int8).flatten(-2), scale.squeeze(-1)


def dequantize_int4_group(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``codes * scale`` in fp32, rounded once to ``dtype``; codes ``[N, K]``, scale ``[N, K / group_size]``."""
    groups = codes.float().unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes in [-8, 7] as compressed-tensors does: code + 8, eight to an int32, the first in the lowest bits.

    Args:
        codes: ``[..., K]`` int8.

    Returns:
        int32 ``[..., K / 8]``.

    Raises:
        ValueError: when 8 does not divide ``K``.
    """
    if codes.shape[-1] % _PER_INT32:
        raise ValueError(f"int4 packs 8 codes to an int32, and 8 does not divide {codes.shape[-1]}: skip this layer")
    nibbles = (codes + 8).view(torch.uint8)
    pairs = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return pairs.contiguous().view(torch.int32)  # every platform that torch runs on is little-endian


def unpack_int4(packed: Tensor) -> Tensor:
    """Codes ``[..., K]`` int8 in [-8, 7] from `pack_int4`'s int32 ``[..., K / 8]``."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).view(torch.int8) - 8
