"""Keys and values in low precision: int8 or fp8 with a scale per token and head, fp8 with a calibrated scale a layer.

All take ``[..., D]`` with the head width last. Per token and head: ``scale = max(amax / qmax, 1e-6)``, codes from
``x * (1 / scale)``, as in vLLM's cache kernel. Two differences: int8 codes here are rounded half to even, there half
away from zero (0.32) or by truncation (0.26, twice the error); and Triton's divisions are approximate in the last bit.

The static fp8 rule is vLLM's: codes ``x / scale``, saturating. Its scale is FP8-RL's (arXiv 2601.18150):
1.05 * P99.9(amax) / 448 over the calibrated magnitudes of a layer.

Defined results at the edges: a zero row has codes 0 and scale 1e-6; one huge value is kept at the maximum (static:
saturates); subnormal rows become 0; a row with NaN or inf dequantizes to NaN, under a static scale that element does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lqrl.quant.numerics.amax import row_amax
from lqrl.quant.numerics.fp8 import FP8_MAX, to_fp8
from lqrl.quant.numerics.int8 import INT8_MAX, dequantize

KV_SCALE_FLOOR = 1e-6
KV_AMAX_QUANTILE = 0.999
KV_SCALE_MARGIN = 1.05


def _row_scale(x: Tensor, qmax: float) -> Tensor:
    amax = row_amax(x)
    scale = torch.div(amax, torch.full_like(amax, qmax)).clamp_min_(KV_SCALE_FLOOR)
    return torch.where(amax.isfinite(), scale, torch.nan)


def quantize_kv_int8_token_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize keys or values ``[..., D]``: codes int8 in [-127, 127] and scales fp32 ``[..., 1]``."""
    scale = _row_scale(x, INT8_MAX)
    codes = (x.float() * scale.reciprocal()).round_().nan_to_num_(0.0)  # |x| / scale rounds to at most 127
    return codes.to(torch.int8), scale


def quantize_kv_fp8_token_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize keys or values ``[..., D]``: codes e4m3 and scales fp32 ``[..., 1]``."""
    scale = _row_scale(x, FP8_MAX)
    return to_fp8(x.float() * scale.reciprocal()), scale


def quantize_kv_fp8_static(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize keys or values ``[..., D]`` with a given scale, which must be positive and finite.

    Args:
        x: floating point.
        scale: fp32, of one element (a layer's), or any shape that broadcasts.

    Returns:
        Codes e4m3; finite values beyond ``448 * scale`` saturate, NaN and inf become NaN.
    """
    x = x.float()
    codes = torch.div(x, scale.float()).clamp_(-FP8_MAX, FP8_MAX)
    return to_fp8(codes.add_(x * 0.0))  # 0, with the sign of x, or NaN where x is NaN or inf


def kv_scale_from_amax(amaxes: Tensor) -> Tensor:
    """A layer's static scale from calibrated magnitudes, FP8-RL: 1.05 * P99.9(amax) / 448, fp32 ``[1]``.

    The quantile interpolates linearly, which is inferred. Take the maximum of the ranks' scales afterwards.

    Args:
        amaxes: magnitudes of one layer's keys (or values, or queries), one a micro-batch, sequence or token.

    Returns:
        The scale; 1 (an engine's value for a cache without calibration) where all magnitudes are 0; NaN where one is
        NaN or inf.

    Raises:
        ValueError: when ``amaxes`` is empty.
    """
    if amaxes.numel() == 0:
        raise ValueError("kv_scale_from_amax got no magnitudes: run a calibration batch before asking for the scale")
    amaxes = amaxes.float().flatten()
    high = torch.quantile(amaxes, KV_AMAX_QUANTILE).reshape(1)
    scale = torch.div(high * KV_SCALE_MARGIN, torch.full_like(high, FP8_MAX))
    return torch.where(amaxes.isfinite().all(), torch.where(scale > 0, scale, 1.0), torch.nan)


def round_trip_kv_int8_token_head(x: Tensor) -> Tensor:
    """``x`` as it is read back from an int8 cache with scales per token and head, in its dtype."""
    return dequantize(*quantize_kv_int8_token_head(x), dtype=x.dtype)


def round_trip_kv_fp8_token_head(x: Tensor) -> Tensor:
    """``x`` as it is read back from an fp8 cache with scales per token and head, in its dtype."""
    return dequantize(*quantize_kv_fp8_token_head(x), dtype=x.dtype)


def round_trip_kv_fp8_static(x: Tensor, scale: Tensor) -> Tensor:
    """``x`` as it is read back from an fp8 cache with a static scale, in its dtype."""
    return dequantize(quantize_kv_fp8_static(x, scale), scale.float(), dtype=x.dtype)
