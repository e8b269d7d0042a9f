"""fp8 (e4m3) quantizers: weights per tensor, channel and block; activations per token, tensor and group.

Every scale is ``amax / 448`` by a true division, in fp32; codes are clamped to +-448 and rounded half to even by the
cast. Where the codes come from ``x * (1 / scale)`` and where from ``x / scale`` follows vLLM kernel by kernel, since
about 0.04 % of the codes differ between the two. The formats and their rules:

| format | amax or scale floor | codes | vLLM source |
|---|---|---|---|
| weight or activation per tensor | amax 1e-30 (vLLM has none) | ``x * (1 / scale)`` | `scaled_fp8_quant` |
| weight per channel, or activation per token | scale 1 / (448 * 512) | ``x / scale`` | the per-token kernel |
| weight per block | amax 1e-4 | ``x * (1 / scale)`` | `per_block_cast_to_fp8` |
| activation per group | amax 1e-10 | ``x / scale`` | `per_token_group_quant_8bit` |

vLLM's block function divides by a Python number, which CUDA turns into a product with 1/448: its scales, made there
from bf16 weights, differ from these in the last bit for about half of the blocks. Shipped codes and scales are read
as they are.

Defined results at the edges, for whatever shares a scale (row, block, group, tensor):

* all zero: codes 0 and a positive finite scale;
* one huge value: kept at +-448, and what is below 2**-10 of a step of it becomes 0;
* subnormal values: codes are finite, and 0 where the floor is far above them;
* NaN or inf: scale NaN and codes NaN, so all that shares the scale dequantizes to NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lqrl.quant.numerics.amax import check_matrix, row_amax, shared_amax

FP8_MAX = 448.0
FP8_SCALE_FLOOR = 1.0 / (448.0 * 512.0)
FP8_TENSOR_AMAX_FLOOR = 1e-30
FP8_BLOCK_AMAX_FLOOR = 1e-4
FP8_GROUP_AMAX_FLOOR = 1e-10
FP8_BLOCK = (128, 128)


def _scale(amax: Tensor) -> Tensor:
    # A tensor divisor: CUDA turns `amax / 448.0` into a product with a rounded reciprocal.
    return torch.where(amax.isfinite(), torch.div(amax, torch.full_like(amax, FP8_MAX)), torch.nan)


def to_fp8(scaled: Tensor) -> Tensor:
    """Round an fp32 temporary, which is overwritten, to e4m3: half to even, saturating at 448, NaN stays NaN."""
    # Casts did not saturate before torch 2.12, so the clamp is needed.
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _quantize_tensor(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scale(amax.clamp_min(FP8_TENSOR_AMAX_FLOOR))
    return to_fp8(x.float() * scale.reciprocal()), scale


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scale(row_amax(x)).clamp_min(FP8_SCALE_FLOOR)  # clamp_min keeps NaN
    return to_fp8(torch.div(x.float(), scale)), scale


def quantize_fp8_tensor(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a linear weight with one scale; the codes follow vLLM's static kernel.

    Args:
        weight: ``[N, K]`` floating point, already rounded to the export dtype.
        amax: ``shared_amax`` of all weights that share the scale, of one element; default: of this weight. Values
            beyond it saturate.

    Returns:
        Codes ``[N, K]`` e4m3 and the scale, fp32 ``[1]``.

    Raises:
        ValueError: when ``weight`` is not a matrix.
    """
    check_matrix(weight)
    return _quantize_tensor(weight, shared_amax([weight]) if amax is None else amax.float().reshape(1))


def quantize_fp8_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a linear weight with one scale an output channel.

    Args:
        weight: ``[N, K]`` floating point, already rounded to the export dtype.

    Returns:
        Codes ``[N, K]`` e4m3 and scales fp32 ``[N, 1]``.

    Raises:
        ValueError: when ``weight`` is not a matrix.
    """
    check_matrix(weight)
    return _quantize_rows(weight)


def quantize_fp8_block(weight: Tensor, block: tuple[int, int] = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize a linear weight with one scale a block; ragged edges count as padded with zeros.

    Args:
        weight: ``[N, K]`` floating point, already rounded to the export dtype.
        block: rows and columns that share a scale.

    Returns:
        Codes ``[N, K]`` e4m3 and scales fp32 ``[ceil(N / rows), ceil(K / columns)]``.

    Raises:
        ValueError: when ``weight`` is not a matrix.
    """
    check_matrix(weight)
    (n, k), (rows, columns) = weight.shape, block
    x = weight.float()
    if n % rows or k % columns:
        x = F.pad(x, (0, -k % columns, 0, -n % rows))
    blocks = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = _scale(blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min(FP8_BLOCK_AMAX_FLOOR))
    codes = to_fp8(blocks * scale.reciprocal()).view(x.shape)
    return codes[:n, :k].contiguous(), scale[:, 0, :, 0]


def quantize_fp8_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize activations with one scale a token: the rule of `quantize_fp8_channel`.

    Args:
        x: ``[..., K]`` floating point.

    Returns:
        Codes ``[..., K]`` e4m3 and scales fp32 ``[..., 1]``.
    """
    return _quantize_rows(x)


def quantize_fp8_per_tensor_dynamic(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize activations with one scale for all tokens, so a token's codes depend on its batch.

    Args:
        x: ``[..., K]`` floating point.

    Returns:
        Codes ``[..., K]`` e4m3 and the scale, fp32 ``[1]``.
    """
    return _quantize_tensor(x, shared_amax([x]))


def quantize_fp8_group(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantize activations with one scale for ``group_size`` neighbors of a token; the last group may be shorter.

    Args:
        x: ``[..., K]`` floating point.
        group_size: neighbors that share a scale.

    Returns:
        Codes ``[..., K]`` e4m3 and scales fp32 ``[..., ceil(K / group_size)]``.
    """
    k = x.shape[-1]
    padded = F.pad(x.float(), (0, -k % group_size)) if k % group_size else x.float()
    groups = padded.unflatten(-1, (-1, group_size))
    scale = _scale(row_amax(groups).clamp_min(FP8_GROUP_AMAX_FLOOR))
    codes = to_fp8(torch.div(groups, scale)).flatten(-2)
    return codes[..., :k].contiguous(), scale.squeeze(-1)


def dequantize_fp8_block(
    codes: Tensor, scale: Tensor, block: tuple[int, int] = FP8_BLOCK, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``codes * scale`` of `quantize_fp8_block` in fp32, rounded once to ``dtype``. Other layouts: `dequantize`."""
    n, k = codes.shape
    spread = scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return (codes.float() * spread).to(dtype)


def dequantize_fp8_group(
    codes: Tensor, scale: Tensor, group_size: int = 128, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``codes * scale`` of `quantize_fp8_group` in fp32, rounded once to ``dtype``."""
    spread = scale.repeat_interleave(group_size, -1)[..., : codes.shape[-1]]
    return (codes.float() * spread).to(dtype)
