"""Conversions inside Triton kernels whose bits are those of torch's casts.

The compiler's own casts round to nearest even, as torch does. Triton's interpreter does not, so there the same rounding
is done on bits; kernels can be checked without a GPU.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportReturnType=false
# A default of a constexpr parameter is the plain value; inline assembly may give several results.
from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

EMULATED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def from_bf16(bits: tl.tensor) -> tl.tensor:
    """fp32 values of bf16 bit patterns (int16)."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x: tl.tensor) -> tl.tensor:
    """bf16 nearest to an fp32 value, ties to even."""
    if EMULATED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def rounded_to_bf16(x: tl.tensor) -> tl.tensor:
    """The fp32 value of `to_bf16`."""
    return from_bf16(to_bf16(x).to(tl.int16, bitcast=True))


@triton.jit
def to_e4m3(x: tl.tensor, CLAMP: tl.constexpr = True) -> tl.tensor:
    """Bits (uint8) of the e4m3 nearest to an fp32 value, ties to even, saturating at 448; not for NaN.

    ``CLAMP`` may be left out for values whose nearest e4m3 is at most 448.
    """
    if CLAMP:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if EMULATED:
        # The step of a magnitude in [2**e, 2**(e + 1)) is 2**(e - 3), e at least -6: adding 2**(e + 20) rounds to it.
        magnitude = tl.abs(x)
        power = (tl.maximum(magnitude, 0.015625).to(tl.int32, bitcast=True) & 0x7F800000) + (20 << 23)
        value = magnitude + power.to(tl.float32, bitcast=True) - power.to(tl.float32, bitcast=True)
        normal = (value.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
        code = tl.where(value < 0.015625, (value * 512.0).to(tl.int32), normal)
        return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(bits: tl.tensor) -> tl.tensor:
    """fp32 values of e4m3 bit patterns (uint8): the same fields in fp16 mean 2**-8 of the value, but for NaN."""
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def int8_to_fp16(x: tl.tensor) -> tl.tensor:
    """fp16 values of int8, four in five instructions: a byte ``x + 128`` below the byte 0x64 is the fp16 1152 + x."""
    if EMULATED:
        return x.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, offset;
            xor.b32 bytes, $2, 0x80808080;
            mov.b32 offset, 0x64806480;
            prmt.b32 $0, bytes, 0x64646464, 0x4140;
            prmt.b32 $1, bytes, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, offset;
            sub.f16x2 $1, $1, offset;
            }""",
            "=&r,=&r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def int8_pairs_to_fp16(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """fp16 values of the int8 in the low and in the high bytes of int16."""
    if EMULATED:
        return (x << 8 >> 8).to(tl.float16), (x >> 8).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, offset;
            xor.b32 bytes, $2, 0x80808080;
            mov.b32 offset, 0x64806480;
            prmt.b32 $0, bytes, 0x64646464, 0x4240;
            prmt.b32 $1, bytes, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, offset;
            sub.f16x2 $1, $1, offset;
            }""",
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def e4m3_to_fp16(x: tl.tensor) -> tl.tensor:
    """fp16 values of e4m3 (capability 8.9 and above), in fewer registers than the compiler's cast."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=&r,=&r,r",
        [x],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_pairs_to_fp16(x: tl.tensor, NATIVE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """fp16 values of the e4m3 in the low and in the high bytes of int16; ``NATIVE``: capability 8.9 and above."""
    if EMULATED or not NATIVE:
        low, high = from_e4m3((x & 0xFF).to(tl.uint8)), from_e4m3(((x >> 8) & 0xFF).to(tl.uint8))
        return low.to(tl.float16), high.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def from_e2m1(codes: tl.tensor) -> tl.tensor:
    """fp32 values of 4-bit codes (uint8): the same fields in fp16 mean 2**-14 of the value."""
    wide = codes.to(tl.uint16)
    half = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def from_e8m0(byte: tl.tensor) -> tl.tensor:
    """fp32 ``2**(byte - 127)``, NaN for 255."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 1 << 22, wide << 23)
    return tl.where(wide == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def opaque(x: tl.tensor) -> tl.tensor:
    """bf16 ``x``, made in a way that the compiler does not look into.

    Where tensor cores read registers (capability 8.x and 12.x), it permutes the inner dimension of a product to suit an
    operand that was loaded in fewer bits. The sums would be others than those of plain values.
    """
    if not EMULATED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    return x


@triton.jit
def settled(acc: tl.tensor) -> tl.tensor:
    """fp32 ``acc`` once it is there, for sums whose products read an operand from registers.

    Such products of Hopper's tensor cores run on while the loop goes on, and the compiler (triton 3.6) reuses the
    registers that they still read. A sum that is looked at must be there.
    """
    if not EMULATED:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def quotient(x: tl.tensor, divisor: tl.tensor) -> tl.tensor:
    """``x / divisor`` rounded to nearest even, in five operations an element where many share a divisor.

    Two corrections by exact remainders times the reciprocal: the first leaves an error below one unit in the last
    place, the second none (P. Markstein, IBM Journal of Research and Development 34, 1990). For finite divisors whose
    reciprocal is normal; a quotient so small that its remainder underflows may be off in its last place.
    """
    if EMULATED:  # the interpreter rounds a fused multiply-add twice
        return tl.math.div_rn(x, divisor)
    else:
        inverse = tl.math.div_rn(1.0, divisor)
        near = x * inverse
        near = tl.fma(tl.fma(near, -divisor, x), inverse, near)
        return tl.fma(tl.fma(near, -divisor, x), inverse, near)


@triton.jit
def to_integer(x: tl.tensor) -> tl.tensor:
    """int32 nearest to an fp32 value, ties to even, as int8 needs it: right for magnitudes below 2**22.

    The sum rounds to whole numbers and keeps the integer in its low bits. Launch with ``enable_fp_fusion=False``: a
    fused multiply-add would skip the rounding of ``x``.
    """
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
