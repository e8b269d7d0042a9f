"""Quantizers as pure functions: tensors in, codes and scales out, fp32 inside.

All of them are symmetric and go row by row along the last dimension, so a row's result depends on nothing else. The
rule is that of vLLM's int8 per-token kernel: ``scale = amax / 127`` as a true division, and codes from the reciprocal
``127 / amax``, not from ``x / scale`` (0.03 % of the codes differ between the two). Rounding is half to even.

Defined results at the edges:

* a zero row has codes 0; its scale is 0 for a token, and positive for a weight (``amax`` is floored at 1e-30), since
  a stored scale of 0 is what a lost tensor looks like;
* a row with one huge value keeps that value at +-127, and what is below half a step becomes 0; amax is capped at the
  largest number but one of the scale's dtype (`amax_cap`), so that codes of finite values stand for finite values;
* a row with NaN or inf has codes 0 and scale NaN, so it dequantizes to NaN and cannot pass unseen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lqrl.quant.numerics.amax import amax_cap, check_matrix

INT8_MAX = 127.0
WEIGHT_AMAX_FLOOR = 1e-30
_FP32_MAX = torch.finfo(torch.float32).max
_FP32_CAP = amax_cap(torch.float32)


def _quantize_rows(x: Tensor, amax_floor: float, largest: float) -> tuple[Tensor, Tensor]:
    x = x.float()
    amax = x.abs().amax(dim=-1, keepdim=True)
    finite = amax.isfinite()
    amax = amax.clamp_(amax_floor, _FP32_CAP)
    # Tensors on both sides: torch turns `127 / x`, and on CUDA `x / 127`, into products with a rounded reciprocal.
    qmax = torch.full_like(amax, largest)
    # |x| * (qmax / amax) rounds to at most qmax; the cap keeps 0 * inf out of zero rows.
    reciprocal = torch.where(finite, torch.div(qmax, amax).clamp_max_(_FP32_MAX), torch.nan)
    codes = (x * reciprocal).round_().nan_to_num_(0.0).to(torch.int8)
    return codes, torch.where(finite, torch.div(amax, qmax), torch.nan)


def quantize_int8_channel(weight: Tensor, largest: float = INT8_MAX) -> tuple[Tensor, Tensor]:
    """Quantize a linear weight with one scale an output channel.

    compressed-tensors' default observer uses ``amax / 127.5`` and codes in [-128, 127] from ``w / scale``; this uses
    the activations' rule, which keeps the codes symmetric and makes requantization exact. Both checkpoints mean
    ``codes * scale``, which is all an engine reads.

    Args:
        weight: ``[N, K]`` floating point, already rounded to the export dtype.
        largest: largest code; below 127 for fewer bits, 7 for int4.

    Returns:
        Codes ``[N, K]`` int8 in [-largest, largest], and scales ``[N, 1]`` fp32.

    Raises:
        ValueError: when ``weight`` is not a matrix.
    """
    check_matrix(weight)
    return _quantize_rows(weight, WEIGHT_AMAX_FLOOR, largest)


def quantize_int8_rounded(weight: Tensor, scale_dtype: torch.dtype, largest: float = INT8_MAX) -> tuple[Tensor, Tensor]:
    """`quantize_int8_channel` for kernels that hold scales in the dtype of the activations.

    The scale is rounded to ``scale_dtype`` first, and codes are ``round(w / scale)``: nothing is lost when an engine or
    a checkpoint casts the scale.

    Returns:
        Codes ``[N, K]`` int8 in [-largest, largest], and scales ``[N, 1]`` in ``scale_dtype``.
    """
    weight = weight.float()
    amax = weight.abs().amax(dim=-1, keepdim=True)
    capped = amax.clamp(WEIGHT_AMAX_FLOOR, amax_cap(scale_dtype))
    scale = torch.div(capped, torch.full_like(amax, largest)).to(scale_dtype).float()
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    codes = torch.div(weight, scale).round_().clamp_(-largest, largest).nan_to_num_(0.0)
    return codes.to(torch.int8), scale.to(scale_dtype)


def quantize_int8_token(x: Tensor, largest: float = INT8_MAX) -> tuple[Tensor, Tensor]:
    """Quantize activations with one scale a token.

    Args:
        x: ``[..., K]`` floating point.
        largest: as in `quantize_int8_channel`.

    Returns:
        Codes ``[..., K]`` int8 in [-largest, largest], and scales ``[..., 1]`` fp32.
    """
    return _quantize_rows(x, 0.0, largest)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``codes * scale`` in fp32, rounded once to ``dtype``; shapes broadcast."""
    return (codes.float() * scale).to(dtype)


def fake_quantize_int8(x: Tensor) -> Tensor:
    """``x`` rounded to its int8 row grid: same shape and dtype.

    It serves for error measurements. Products of fake-quantized operands are not the integer GEMM: they differ by as
    much as the format's own error, so the learner's forward does not use this.
    """
    return dequantize(*quantize_int8_token(x), dtype=x.dtype)
