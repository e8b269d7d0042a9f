"""Microscaling: power-of-two scales (e8m0) for blocks of 32 neighbors, and mxfp8 (e4m3 elements).

A block's scale is ``2**(e - emax)`` with ``emax`` the exponent of the largest element value (8 for e4m3, 2 for e2m1)
and ``e`` from the block's amax ``m * 2**E``, ``1 <= m < 2``, by one of three rules:

* ``floor``: ``e = E``. The OCP MX 1.0 specification, torchao's default. Saturates every value above the largest
  element value, that is whenever m > 1.75 (e4m3) or 1.5 (e2m1).
* ``even``: m is first rounded to the element's mantissa width, so ``e = E + 1`` from m = 1.75 (e2m1) or 1.9375 (e4m3)
  on. torchao's ``EVEN``; compressed-tensors and quark for mxfp4. compressed-tensors uses the threshold 1.75 for e4m3
  too.
* ``ceil``: ``e = E + 1`` as soon as m is above the largest element's, so nothing saturates. NVIDIA's conversion
  (cuBLAS, Transformer Engine, FlashInfer), torchao's ``RCEIL``, vLLM's `mxfp8` for weights and activations.

mxfp8 follows ``ceil``, since an engine quantizes activations by it too; mxfp4 follows ``even``, since it is weight-only
and read from a compressed-tensors checkpoint. All arithmetic is on exponent bits or by powers of two, hence exact.

e8m0 is a uint8 ``b`` for ``2**(b - 127)``; 255 is NaN. Defined results at the edges: a zero block has codes 0 and
scale byte 0 (2**-127); subnormal values use byte 0 as well; one huge value is kept (``floor``: saturates) and what is
far below it becomes 0, with the scale capped at ``2**(127 - emax)``, else rounding up from 1.75 * 2**127 would give
inf; a block with NaN or inf has scale byte 255, so it dequantizes to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lqrl.quant.numerics.amax import in_groups, row_amax
from lqrl.quant.numerics.fp8 import to_fp8

MX_BLOCK = 32
E8M0_NAN = 255
_E8M0_MAX = 254
_MANTISSA = (1 << 23) - 1
E8M0Rule = Literal["floor", "even", "ceil"]


@dataclass(frozen=True)
class MxElement:
    """What a rule for the scale must know of an element format.

    Attributes:
        max_exponent: exponent of its largest value.
        mantissa_bits: width of its mantissa.
        max_mantissa: mantissa of its largest value, as an fp32 mantissa field.
    """

    max_exponent: int
    mantissa_bits: int
    max_mantissa: int

    def carry(self, rule: E8M0Rule) -> int:
        """What is added to the bits of an fp32 amax, so that its exponent becomes that of the rule."""
        if rule == "floor":
            return 0
        if rule == "even":
            return 1 << (23 - self.mantissa_bits - 1)
        return _MANTISSA - self.max_mantissa


E4M3 = MxElement(max_exponent=8, mantissa_bits=3, max_mantissa=0x600000)  # 448 = 1.75 * 2**8
E2M1 = MxElement(max_exponent=2, mantissa_bits=1, max_mantissa=0x400000)  # 6 = 1.5 * 2**2


def e8m0_from_amax(amax: Tensor, element: MxElement, rule: E8M0Rule) -> Tensor:
    """Scale byte (uint8, e8m0) of blocks with largest magnitude ``amax``; 255 where it is NaN or inf."""
    amax = amax.float()
    exponent = (amax.view(torch.int32) + element.carry(rule)) >> 23
    byte = (exponent - element.max_exponent).clamp_(0, _E8M0_MAX - element.max_exponent)
    return torch.where(amax.isfinite(), byte, E8M0_NAN).to(torch.uint8)


def decode_e8m0(byte: Tensor) -> Tensor:
    """fp32 ``2**(byte - 127)``; NaN for 255."""
    bits = byte.to(torch.int32)
    bits = torch.where(bits == 0, 1 << 22, bits << 23)  # 2**-127 is subnormal in fp32
    return torch.where(byte == E8M0_NAN, torch.nan, bits.view(torch.float32))


def encode_e8m0(scale: Tensor) -> Tensor:
    """Scale byte of fp32 powers of two from 2**-127 to 2**127; others are rounded down, NaN and inf are 255."""
    scale = scale.float()
    return torch.where(scale.isfinite(), scale.view(torch.int32) >> 23, E8M0_NAN).to(torch.uint8)


def scaled_blocks(x: Tensor, element: MxElement, rule: E8M0Rule, name: str) -> tuple[Tensor, Tensor]:
    """``x`` ``[..., K]`` over its blocks' scales, fp32 ``[..., K / 32, 32]``, and the scale bytes ``[..., K / 32]``.

    Raises:
        ValueError: when 32 does not divide ``K``.
    """
    blocks = in_groups(x.float(), MX_BLOCK, name)
    byte = e8m0_from_amax(row_amax(blocks), element, rule)
    # 254 - byte is the byte of the reciprocal; a NaN block stays NaN.
    inverse = torch.where(byte == E8M0_NAN, torch.nan, decode_e8m0(_E8M0_MAX - byte))
    return blocks * inverse, byte.squeeze(-1)


def quantize_mxfp8(x: Tensor, rule: E8M0Rule = "ceil") -> tuple[Tensor, Tensor]:
    """Quantize weights or activations to mxfp8.

    Args:
        x: ``[..., K]`` floating point; weights already rounded to the export dtype.
        rule: how a block's amax gives its scale; ``ceil`` is what vLLM does.

    Returns:
        Codes ``[..., K]`` e4m3 and scale bytes ``[..., K / 32]`` uint8 (e8m0).

    Raises:
        ValueError: when 32 does not divide ``K``.
    """
    scaled, byte = scaled_blocks(x, E4M3, rule, "mxfp8")
    return to_fp8(scaled).flatten(-2), byte


def dequantize_mxfp8(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``codes * 2**(scale - 127)`` in fp32, rounded once to ``dtype``; scale: uint8 ``[..., K / 32]``."""
    blocks = codes.float().unflatten(-1, (-1, MX_BLOCK))
    return blocks.mul_(decode_e8m0(scale).unsqueeze(-1)).flatten(-2).to(dtype)
