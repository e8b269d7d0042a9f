"""4-bit floating point (e2m1): nvfp4 (blocks of 16, e4m3 scales, one global scale) and mxfp4 (blocks of 32, e8m0).

e2m1 has the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; the code is the sign bit (8) and the index of the
magnitude. Rounding is to nearest, ties to the even index, saturating; the sign of what becomes 0 is kept. Two codes
make a byte, the first in the low half, as in compressed-tensors.

nvfp4 follows compressed-tensors: ``global = 448 * 6 / amax`` (a divisor), block scale ``e4m3(global * blockmax / 6)``
with 0.125 in place of 0, codes ``e2m1(x / (scale / global))``. torchao stores the inverse global scale, multiplies by
a reciprocal and floors block scales at 2**-6. CUDA kernels for w4a4 activations use approximate reciprocals and a zero
scale for zero blocks.

Defined results at the edges: a zero tensor has global scale 1; a zero block has codes of zeros and scale 0.125
(nvfp4) or byte 0 (mxfp4); one huge value is kept near +-6 steps of its block (nvfp4: exactly up to the rounding of the
scale) and what is far below becomes 0; tensors with amax below 8e-36, subnormal ones too, have global scale 1 and
become 0; NaN or inf in a tensor gives a NaN global scale, in a block a NaN block scale, with codes 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lqrl.quant.numerics.amax import check_matrix, in_groups, row_amax, shared_amax
from lqrl.quant.numerics.fp8 import FP8_MAX, to_fp8
from lqrl.quant.numerics.mx import E2M1, MX_BLOCK, E8M0Rule, decode_e8m0, scaled_blocks

E2M1_MAX = 6.0
NVFP4_BLOCK = 16
NVFP4_ZERO_SCALE = 0.125
_GLOBAL_FLOOR = FP8_MAX * E2M1_MAX / math.ldexp(1 - 2**-20, 128)
_EXPONENT = 0x7F800000


def cast_e2m1(x: Tensor) -> Tensor:
    """4-bit codes (uint8) of ``x`` rounded to e2m1; inf saturates, NaN, which e2m1 lacks, becomes 0.

    For a magnitude in ``[2**e, 2**(e + 1))``, e at least 0, the grid's step is ``2**(e - 1)``. Adding ``2**(e + 22)``,
    whose last bit is that step, makes the addition round, half to even; its low bits are then the number of steps, and
    the index of the magnitude is that number plus 2 e.
    """
    x = x.float().nan_to_num(0.0, E2M1_MAX, -E2M1_MAX)
    magnitude = x.abs().clamp_max_(E2M1_MAX)
    power = magnitude.clamp_min(1.0).view(torch.int32).bitwise_and_(_EXPONENT)
    steps = magnitude.add_((power + (22 << 23)).view(torch.float32)).view(torch.int32).to(torch.uint8)
    exponent = (power >> 23).to(torch.uint8)  # biased by 127
    sign = (x.view(torch.int32) >> 28).to(torch.uint8).bitwise_and_(8)
    index = steps.add_(exponent.mul_(2)).add_(2).bitwise_and_(7)  # modulo 8: 2 * 127 + 2 vanishes
    return index.bitwise_or_(sign)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of 4-bit codes (uint8)."""
    # The same bits in the low half of e4m3's exponent and the top of its mantissa mean 2**-6 of the value, zeros and
    # subnormals included.
    bits = ((codes & 8) << 4) | ((codes & 7) << 2)
    return bits.view(torch.float8_e4m3fn).float().mul_(64.0)


def pack_fp4(codes: Tensor) -> Tensor:
    """Pack 4-bit codes ``[..., K]`` two to a byte, the first in the low half: uint8 ``[..., K / 2]``.

    Raises:
        ValueError: when ``K`` is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"fp4 packs two codes to a byte, and {codes.shape[-1]} is odd: skip this layer")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """4-bit codes ``[..., K]`` (uint8) from `pack_fp4`'s ``[..., K / 2]``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """``448 * 6 / amax`` as compressed-tensors computes it, fp32 ``[1]``; 1 where that overflows, NaN for NaN and inf.

    Args:
        amax: `shared_amax` of what shares the scale, of one element.
    """
    return nvfp4_token_scale(amax.float().reshape(1))


def nvfp4_token_scale(x: Tensor) -> Tensor:
    """The rule of `nvfp4_global_scale` for each token of ``x`` ``[..., K]``: fp32 ``[..., 1]``."""
    amax = row_amax(x)
    scale = amax.reciprocal().mul_(FP8_MAX * E2M1_MAX).nan_to_num_(math.nan, 1.0).clamp_min_(_GLOBAL_FLOOR)
    return torch.where(amax.isfinite(), scale, torch.nan)


def quantize_nvfp4(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a linear weight to nvfp4.

    Args:
        weight: ``[N, K]`` floating point, already rounded to the export dtype.
        amax: `shared_amax` of all weights that share the global scale; default: of this weight. Block scales
            saturate beyond it.

    Returns:
        4-bit codes ``[N, K]`` uint8 for `pack_fp4`, block scales e4m3 ``[N, K / 16]``, global scale fp32 ``[1]``.

    Raises:
        ValueError: when ``weight`` is not a matrix, or 16 does not divide ``K``.
    """
    check_matrix(weight)
    global_scale = nvfp4_global_scale(shared_amax([weight]) if amax is None else amax)
    return (*quantize_nvfp4_dynamic(weight, global_scale), global_scale)


def quantize_nvfp4_dynamic(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize activations to nvfp4 with a given global scale; a row depends on no other row.

    Args:
        x: ``[..., K]`` floating point.
        global_scale: fp32, from `nvfp4_global_scale` of calibrated magnitudes (one element), or ``[..., 1, 1]``.

    Returns:
        4-bit codes ``[..., K]`` uint8 and block scales e4m3 ``[..., K / 16]``.

    Raises:
        ValueError: when 16 does not divide ``K``.
    """
    blocks = in_groups(x.float(), NVFP4_BLOCK, "nvfp4")
    amax = row_amax(blocks)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    global_scale = global_scale.float()
    scale = to_fp8(torch.div(amax, torch.full_like(amax, E2M1_MAX)) * global_scale)
    value = scale.float()
    value = torch.where(value == 0, NVFP4_ZERO_SCALE, value)
    codes = cast_e2m1(torch.div(blocks, value / global_scale))
    return codes.flatten(-2), value.squeeze(-1).to(torch.float8_e4m3fn)


def dequantize_nvfp4(codes: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``codes * (scale / global_scale)`` in fp32, rounded once to ``dtype``.

    Args:
        codes: 4-bit codes ``[..., K]`` uint8, unpacked.
        scale: e4m3 ``[..., K / 16]``.
        global_scale: fp32, of one element.
        dtype: of the result.
    """
    blocks = decode_e2m1(codes).unflatten(-1, (-1, NVFP4_BLOCK))
    return blocks.mul_((scale.float() / global_scale.float()).unsqueeze(-1)).flatten(-2).to(dtype)


def quantize_mxfp4(x: Tensor, rule: E8M0Rule = "even") -> tuple[Tensor, Tensor]:
    """Quantize weights (or activations) to mxfp4.

    Args:
        x: ``[..., K]`` floating point; weights already rounded to the export dtype.
        rule: how a block's amax gives its scale, see `lqrl.quant.numerics.mx`.

    Returns:
        4-bit codes ``[..., K]`` uint8 for `pack_fp4`, and scale bytes ``[..., K / 32]`` uint8 (e8m0).

    Raises:
        ValueError: when 32 does not divide ``K``.
    """
    scaled, byte = scaled_blocks(x, E2M1, rule, "mxfp4")
    return cast_e2m1(scaled).flatten(-2), byte


def dequantize_mxfp4(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``codes * 2**(scale - 127)`` in fp32, rounded once to ``dtype``; scale: uint8 ``[..., K / 32]``."""
    blocks = decode_e2m1(codes).unflatten(-1, (-1, MX_BLOCK))
    return blocks.mul_(decode_e8m0(scale).unsqueeze(-1)).flatten(-2).to(dtype)
