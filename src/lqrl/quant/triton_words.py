"""4-bit codes as the tensor cores take them: a 32-bit word holds eight, and becomes eight bf16 values in registers.

The order of the inputs inside a product is free as long as both operands share it. A thread of a tensor core
instruction holds inputs that are neighbors in pairs only; with the order of `pair_order` its sixteen inputs of a block
of 64 are two whole words of the packed weight, and their scale is one. Values are ``code * scale`` in fp32, rounded
once to bf16, as in `lqrl.quant.triton_weight_only`; here the bits come about without fp32.
"""

# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# Inside a kernel tensors are indexed and permuted in ways that the stubs do not know.
from __future__ import annotations

import triton
import triton.language as tl

from lqrl.quant.triton_casts import EMULATED, from_bf16, from_e2m1, from_e4m3, from_e8m0, quotient, to_bf16

REORDERED = 64
"""Inputs that change places among themselves."""
_BLOCK = tl.constexpr(REORDERED)
INT4 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)  # and 3 is mxfp4


@triton.jit
def pair_order(BK: tl.constexpr) -> tl.tensor:
    """Which input stands where, int32 ``[BK]``; a thread's inputs are those of four successive values of place / 2."""
    place = tl.arange(0, BK)
    pair = place // 2 % (_BLOCK // 2)
    inside = pair % 4 * 16 + pair // 16 * 8 + pair // 8 % 2 * 4 + pair // 4 % 2 * 2
    return tl.max_contiguous(tl.multiple_of(place // _BLOCK * _BLOCK + inside + place % 2, 2), 2)


@triton.jit
def _joined(values, BN: tl.constexpr, BK: tl.constexpr) -> tl.tensor:
    """``[BN, BK]`` in `pair_order` from eight tensors ``[BN, BK / 8]``: the codes of each word, from the lowest on."""
    low = tl.join(tl.join(values[0], values[1]), tl.join(values[2], values[3]))
    high = tl.join(tl.join(values[4], values[5]), tl.join(values[6], values[7]))
    words = tl.reshape(tl.join(low, high), (BN, BK // _BLOCK, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(words, (0, 1, 3, 6, 5, 2, 4)), (BN, BK))


@triton.jit
def _int4_values(words: tl.tensor, scale: tl.tensor):
    """Eight bf16 tensors like ``words`` (int32 of codes + 8), scaled by bf16 bit patterns (int16) of the same shape.

    The bf16 bits 0x4300 plus a code are 128 plus the code; the difference to 136 is exact, its product rounded once.
    """
    if EMULATED:
        factor = from_bf16(scale)
        values = ()
        for place in tl.static_range(8):
            values = (*values, to_bf16((((words >> (4 * place)) & 15) - 8).to(tl.float32) * factor))
        return values
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 shifted, factor, one, less, none, a, b, c, d;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC308C308;
            mov.b32 none, 0x80008000;
            shr.u32 shifted, $8, 4;
            mov.b32 factor, {$9, $9};
            prmt.b32 a, $8, shifted, 0x4440;
            prmt.b32 b, $8, shifted, 0x5551;
            prmt.b32 c, $8, shifted, 0x6662;
            prmt.b32 d, $8, shifted, 0x7773;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 a, a, one, less;
            fma.rn.bf16x2 b, b, one, less;
            fma.rn.bf16x2 c, c, one, less;
            fma.rn.bf16x2 d, d, one, less;
            fma.rn.bf16x2 a, a, factor, none;
            fma.rn.bf16x2 b, b, factor, none;
            fma.rn.bf16x2 c, c, factor, none;
            fma.rn.bf16x2 d, d, factor, none;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            mov.b32 {$4, $5}, c;
            mov.b32 {$6, $7}, d;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,h",
            [words, scale],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _e2m1_table(scale: tl.tensor):
    """The bf16 values of the eight magnitudes times fp32 ``scale``: four int32 tensors, two of low bytes, two of high.

    ``scale`` and ``1.5 * scale`` are rounded; the others are these times powers of two.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 least, one, two, four, none, factor;
        .reg .f32 more;
        mov.b32 none, 0x80008000;
        mul.rn.f32 more, $4, 0f3FC00000;
        cvt.rn.bf16x2.f32 one, more, $4;
        prmt.b32 least, one, one, 0x1010;
        mov.b32 factor, 0x3F000000;
        fma.rn.bf16x2 least, least, factor, none;
        mov.b32 factor, 0x40004000;
        fma.rn.bf16x2 two, one, factor, none;
        mov.b32 factor, 0x40804080;
        fma.rn.bf16x2 four, one, factor, none;
        prmt.b32 $0, least, one, 0x6420;
        prmt.b32 $1, two, four, 0x6420;
        prmt.b32 $2, least, one, 0x7531;
        prmt.b32 $3, two, four, 0x7531;
        }""",
        "=&r,=&r,=&r,=&r,f",
        [scale],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _e2m1_values(words: tl.tensor, table, scale: tl.tensor):
    """Eight bf16 tensors like ``words`` (int32): magnitudes are looked up in `_e2m1_table`, byte by byte, then signed.

    ``scale``, fp32 like ``words``, is read where there is no table, in the interpreter.
    """
    if EMULATED:
        values = ()
        for place in tl.static_range(8):
            values = (*values, to_bf16(from_e2m1(((words >> (4 * place)) & 15).to(tl.uint8)) * scale))
        return values
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 select, shifted, low, high, sign, a, b, c, d;
            and.b32 select, $8, 0x77777777;
            shl.b32 shifted, $8, 4;
            prmt.b32 low, $9, $10, select;
            prmt.b32 high, $11, $12, select;
            prmt.b32 sign, $8, shifted, 0x1504;
            lop3.b32 high, sign, 0x80808080, high, 0xEA;
            prmt.b32 a, low, high, 0x5140;
            prmt.b32 b, low, high, 0x7362;
            shr.u32 select, select, 16;
            prmt.b32 low, $9, $10, select;
            prmt.b32 high, $11, $12, select;
            prmt.b32 sign, $8, shifted, 0x3726;
            lop3.b32 high, sign, 0x80808080, high, 0xEA;
            prmt.b32 c, low, high, 0x5140;
            prmt.b32 d, low, high, 0x7362;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            mov.b32 {$4, $5}, c;
            mov.b32 {$6, $7}, d;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r",
            [words, table[0], table[1], table[2], table[3]],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _spread(groups: tl.tensor, BN: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr) -> tl.tensor:
    """What each of ``COUNT`` groups ``[BN, COUNT]`` has, for each of its words ``[BN, WORDS]``."""
    return tl.reshape(tl.broadcast_to(groups[:, :, None], (BN, COUNT, WORDS // COUNT)), (BN, WORDS))


@triton.jit
def word_scales(
    scale_ptr: tl.tensor, rows: tl.tensor, start: int,
    K: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr, BK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scales as they are stored, ``[BN, COUNT]``, of ``rows`` (int64 ``[BN]``) and BK inputs from ``start``."""
    group = start // SIZE + tl.arange(0, COUNT) if COUNT * SIZE == BK else start // SIZE + tl.arange(0, COUNT) // COUNT
    pointers = scale_ptr + rows[:, None] * (K // SIZE) + group[None, :]
    if K % BK == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(group < K // SIZE)[None, :], other=0)


@triton.jit
def words_tile(
    words_ptr: tl.tensor, scale: tl.tensor, whole: tl.tensor, rows: tl.tensor, start: int,
    K: tl.constexpr, FORMAT: tl.constexpr, COUNT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """bf16 values of ``rows`` and BK inputs from ``start``, in `pair_order`.

    Inputs beyond K have the values of zero codes: the other operand is 0 there.

    Args:
        words_ptr: int32 ``[N, K / 8]``.
        scale: from `word_scales`: bf16 as int16 (int4), e4m3 as bytes (nvfp4), e8m0 (mxfp4).
        whole: fp32, what nvfp4's scales are divided by.
        rows: int64 ``[BN]``, of the weight.
        start: first input, a multiple of BK.
        K: inputs, a multiple of 64 and of SIZE.
        FORMAT: `INT4`, `NVFP4` or mxfp4.
        COUNT: scales of a row.
    """
    width: tl.constexpr = BK // 8
    word = start // 8 + tl.arange(0, width)
    pointers = words_ptr + rows[:, None] * (K // 8) + word[None, :]
    words = tl.load(pointers) if K % BK == 0 else tl.load(pointers, mask=(word < K // 8)[None, :], other=0)
    if FORMAT == INT4:
        values = _int4_values(words, _spread(scale, BN, COUNT, width))
    else:
        factor = quotient(from_e4m3(scale), whole) if FORMAT == NVFP4 else from_e8m0(scale)
        if EMULATED:
            values = _e2m1_values(words, None, _spread(factor, BN, COUNT, width))
        else:
            low, more_low, high, more_high = _e2m1_table(factor)
            table = (
                _spread(low, BN, COUNT, width), _spread(more_low, BN, COUNT, width),
                _spread(high, BN, COUNT, width), _spread(more_high, BN, COUNT, width),
            )  # fmt: skip
            values = _e2m1_values(words, table, words)
    return _joined(values, BN, BK)
