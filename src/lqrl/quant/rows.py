"""The quantizers of `lqrl.quant.numerics`, through Triton where a GPU has it: the same bits, one pass over memory.

Methods and kernels call these; `numerics` stays pure torch and is what these are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import lqrl.quant.numerics as numerics
from lqrl.quant.numerics import INT4_MAX, INT8_MAX, WEIGHT_AMAX_FLOOR
from lqrl.quant.numerics.amax import check_matrix
from lqrl.quant.numerics.fp8 import FP8_SCALE_FLOOR
from lqrl.quant.triton_use import TENSOR_CORES_FP8, TENSOR_CORES_INT8, use_triton

_FLOATS = (torch.float32, torch.bfloat16)


def _on_triton(x: Tensor, capability: tuple[int, int]) -> bool:
    return x.dtype in _FLOATS and x.shape[-1] > 0 and use_triton(x, capability)


def quantize_int8_channel(weight: Tensor, largest: float = INT8_MAX) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_int8_channel`."""
    check_matrix(weight)
    if not _on_triton(weight, TENSOR_CORES_INT8):
        return numerics.quantize_int8_channel(weight, largest)
    from lqrl.quant import triton_quantize

    return triton_quantize.quantize_int8_rows(weight, largest, WEIGHT_AMAX_FLOOR)


def quantize_int8_token(x: Tensor, largest: float = INT8_MAX) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_int8_token`."""
    if not _on_triton(x, TENSOR_CORES_INT8):
        return numerics.quantize_int8_token(x, largest)
    from lqrl.quant import triton_quantize

    return triton_quantize.quantize_int8_rows(x, largest, 0.0)


def quantize_fp8_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_fp8_channel`."""
    check_matrix(weight)
    return quantize_fp8_token(weight)


def quantize_int8_channels(
    weights: Sequence[Tensor], export_dtype: torch.dtype, largest: float = INT8_MAX
) -> list[tuple[Tensor, Tensor]] | None:
    """`quantize_int8_channel` of each, rounded to ``export_dtype`` first, in few launches; ``None`` off Triton."""
    if not _all_on_triton(weights, export_dtype, TENSOR_CORES_INT8):
        return None
    from lqrl.quant import triton_row_batch

    return triton_row_batch.quantize_many(weights, export_dtype, largest, WEIGHT_AMAX_FLOOR)


def quantize_fp8_channels(weights: Sequence[Tensor], export_dtype: torch.dtype) -> list[tuple[Tensor, Tensor]] | None:
    """`quantize_fp8_channel` of each, rounded to ``export_dtype`` first, in few launches; ``None`` off Triton."""
    if not _all_on_triton(weights, export_dtype, TENSOR_CORES_FP8):
        return None
    from lqrl.quant import triton_row_batch

    return triton_row_batch.quantize_many(weights, export_dtype, None, FP8_SCALE_FLOOR)


def _all_on_triton(weights: Sequence[Tensor], export_dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether all are matrices that one launch may take, on one device."""
    if export_dtype not in _FLOATS or len({w.device for w in weights}) != 1:
        return False
    return all(w.ndim == 2 and _on_triton(w, capability) for w in weights)


def quantize_fp8_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_fp8_token`."""
    if not _on_triton(x, TENSOR_CORES_FP8):
        return numerics.quantize_fp8_token(x)
    from lqrl.quant import triton_quantize

    return triton_quantize.quantize_fp8_rows(x)


def quantize_fp8_tensor(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_fp8_tensor`."""
    check_matrix(weight)
    if not _on_triton(weight, TENSOR_CORES_FP8) or weight.numel() == 0:
        return numerics.quantize_fp8_tensor(weight, amax)
    from lqrl.quant import triton_quantize

    return triton_quantize.quantize_fp8_tensor(weight, tensor_amax(weight) if amax is None else amax)


def quantize_fp8_per_tensor_dynamic(x: Tensor) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_fp8_per_tensor_dynamic`."""
    if not _on_triton(x, TENSOR_CORES_FP8) or x.numel() == 0:
        return numerics.quantize_fp8_per_tensor_dynamic(x)
    from lqrl.quant import triton_quantize

    return triton_quantize.quantize_fp8_tensor(x, tensor_amax(x))


def quantize_fp8_group(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_fp8_group`."""
    if group_size & (group_size - 1) or not _on_triton(x, TENSOR_CORES_FP8):
        return numerics.quantize_fp8_group(x, group_size)
    from lqrl.quant import triton_quantize

    return triton_quantize.quantize_fp8_group(x, group_size)


def quantize_fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_fp8_block` with blocks of 128 x 128."""
    check_matrix(weight)
    if not _on_triton(weight, TENSOR_CORES_FP8):
        return numerics.quantize_fp8_block(weight)
    from lqrl.quant import triton_quantize

    return triton_quantize.quantize_fp8_block(weight)


def quantize_int4_packed(weight: Tensor, group_size: int, largest: float = INT4_MAX) -> tuple[Tensor, Tensor]:
    """`numerics.quantize_int4_group` with scales in the weight's dtype, and `numerics.pack_int4` of the codes.

    Returns:
        int32 ``[N, K / 8]`` and scales ``[N, K / group_size]`` in the dtype of ``weight``.

    Raises:
        ValueError: when ``weight`` is not a matrix, or ``group_size`` does not divide ``K``.
    """
    check_matrix(weight)
    packs = group_size >= 8 and group_size & (group_size - 1) == 0 and weight.shape[1] % group_size == 0
    if not packs or not _on_triton(weight, TENSOR_CORES_INT8):
        codes, scale = numerics.quantize_int4_group(weight, group_size, weight.dtype, largest)
        return numerics.pack_int4(codes), scale.to(weight.dtype)
    from lqrl.quant import triton_quantize

    return triton_quantize.quantize_int4_group(weight, group_size, weight.dtype, largest)


def tensor_amax(x: Tensor) -> Tensor:
    """`numerics.shared_amax` of one tensor, without a temporary of its size: fp32 ``[1]``, NaN where there is one."""
    low, high = torch.aminmax(x)
    return torch.maximum(low.neg(), high).abs().float().reshape(1)
