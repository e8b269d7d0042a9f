"""Arithmetic of heads in Triton kernels: norm, rotation and codes, with the bits of one function after the other.

Each product and sum is rounded to the compute dtype where transformers rounds it; codes and scales are those of
`lqrl.quant.numerics.kv`; head norms are those of `lqrl.quant.exact.rms_norm`, whose squares are added in the same order
because heads are read in tiles whose rows lie in threads as that kernel's do: see `least_rows`.

bf16 is multiplied and added two numbers at a time. A product or sum of two bf16 that was rounded to fp32 before gives
the same bf16: fp32 has more than twice its digits, and among subnormal numbers what the first rounding drops is less
than a fourth of what would turn the second. Products in fp32 are instructions of their own, so that all this has the
same bits in kernels whose other products and sums are fused.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportReturnType=false, reportAssignmentType=false
# Inline assembly may give several results; tensors of a kernel are more than their annotation says.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.kv import KVCacheMethod
from lqrl.quant.numerics.kv import KV_SCALE_FLOOR
from lqrl.quant.triton_casts import EMULATED, quotient, to_bf16, to_e4m3, to_integer
from lqrl.quant.triton_exact_rows import WARPS, aligned

PLAIN, INT8, FP8, LAYER = (tl.constexpr(kind) for kind in range(4))
"""Codes of a cache: none, with a scale for each token and head (two kinds), with one a layer."""
_FLOOR = tl.constexpr(KV_SCALE_FLOOR)


@triton.jit
def _alone(a, b):
    """A product of fp32 that no sum may swallow."""
    if EMULATED:
        return a * b
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _narrow(x, BF16: tl.constexpr):
    """fp32 rounded to the compute dtype."""
    if not BF16:
        return x
    elif EMULATED:
        return to_bf16(x)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def _product(a, b, BF16: tl.constexpr):
    """``a * b``, rounded; a product of bf16 is a sum with -0, which capability 8 has too."""
    if not BF16:
        return _alone(a, b)
    elif EMULATED:
        return to_bf16(a.to(tl.float32) * b.to(tl.float32))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 zero;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, $1, $2, zero;
            }""",
            "=r,r,r",
            [a, b],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _sum(a, b, BF16: tl.constexpr):
    """``a + b``, rounded."""
    if not BF16:
        return a + b
    elif EMULATED:
        return to_bf16(a.to(tl.float32) + b.to(tl.float32))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 one;
            mov.b32 one, 0x3f803f80;
            fma.rn.bf16x2 $0, $1, one, $2;
            }""",
            "=r,r,r",
            [a, b],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def partner(column: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """The column of the other half that each of a head's columns is turned with."""
    half: tl.constexpr = D // 2
    together: tl.constexpr = 8 if half % 8 == 0 else 4 if half % 4 == 0 else 2 if half % 2 == 0 else 1
    other = tl.where(column < half, column + half, column - half)
    return tl.max_contiguous(tl.multiple_of(other, together), together)


@triton.jit
def rotation_of(
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, weight_ptr: tl.tensor | None,
    D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Weights of a norm at columns and at their `partner`, cosines and sines: what `turned` takes, for each row.

    A tile whose rows are equal, so that a thread reads neighbors and what it needs.
    """
    column, row = tl.arange(0, BD), tl.zeros((BH,), tl.int32)[:, None]
    inside = (row == 0) & (column < D)[None, :]
    own, other = row + column[None, :], row + partner(column, D)[None, :]
    cos = tl.load(cos_ptr + own, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + own, mask=inside, other=0.0)
    if weight_ptr is not None:
        x_weight = tl.load(weight_ptr + own, mask=inside, other=0.0)
        y_weight = tl.load(weight_ptr + other, mask=inside, other=0.0)
        return x_weight, y_weight, cos, sin
    else:
        return cos, cos, cos, sin


@triton.jit
def turned(
    x: tl.tensor, y: tl.tensor, x_weight: tl.tensor, y_weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, eps: float,
    D: tl.constexpr, NORM: tl.constexpr, BF16: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Heads ``[BH, BD]`` normed and rotated, in the compute dtype as all that comes in.

    ``x`` is 0 beyond its ``D`` columns; ``y`` and ``y_weight`` are ``x`` and its weight at the `partner` columns.
    """
    if NORM:
        wide = x.to(tl.float32)
        mean = tl.math.div_rn(tl.sum(_alone(wide, wide), 1), D * 1.0)
        inverse = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))[:, None]
        x = _product(_narrow(_alone(wide, inverse), BF16), x_weight, BF16)
        y = _product(_narrow(_alone(y.to(tl.float32), inverse), BF16), y_weight, BF16)
    return _sum(_product(x, cos, BF16), _product(y, sin, BF16), BF16)


@triton.jit
def _magnitude(x):
    """Bits of the largest magnitude of each row, which are ordered as the numbers are, NaN above inf."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _scales(x, scale_ptr, place, exists, KIND: tl.constexpr):
    """The scale of each row, NaN where an element is NaN or inf: made and kept for a token, read for a layer."""
    if KIND == LAYER:
        return tl.zeros(place.shape, tl.float32) + tl.load(scale_ptr)
    else:
        magnitude = _magnitude(x)
        amax = magnitude.to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.math.div_rn(amax, 127.0 if KIND == INT8 else 448.0), _FLOOR)
        scale = tl.where(magnitude >= 0x7F800000, float("nan"), scale)
        tl.store(scale_ptr + place, scale, mask=exists)
        return scale


@triton.jit
def _codes(x, scale, KIND: tl.constexpr):
    """Codes of fp32 ``x``; ``scale`` has one element for each row."""
    if KIND == INT8:
        codes = to_integer(_alone(x, tl.math.div_rn(1.0, scale)[:, None]))
        return tl.where((scale == scale)[:, None], codes, 0).to(tl.int8)
    elif KIND == FP8:
        codes = to_e4m3(_alone(x, tl.math.div_rn(1.0, scale)[:, None]))
        return tl.where((scale == scale)[:, None], codes, 0x7F).to(tl.uint8)
    else:
        finite, scale = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000, scale[:, None]
        most = scale * 512.0  # what is larger saturates
        codes = to_e4m3(quotient(tl.minimum(tl.maximum(x, -most), most), scale))
        return tl.where(finite, codes, 0x7F).to(tl.uint8)


@triton.jit
def store(
    x: tl.tensor, pointers: tl.tensor, scale_ptr: tl.tensor, place: tl.tensor, exists: tl.tensor,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Keys or values ``[BH, BD]`` of the compute dtype as the cache holds them.

    Args:
        x: 0 beyond its ``WIDTH`` columns.
        pointers: ``[BH]``, where the rows go.
        scale_ptr: the layer's scale, or where a scale for each row goes, at ``place``.
        place: ``[BH]``.
        exists: ``[BH]``; other rows are not stored.
        WIDTH: of a head.
        KIND: of the codes.
        BLOCK: columns of ``x``.
    """
    column = tl.arange(0, BLOCK)
    mask = exists[:, None] & (column < WIDTH)[None, :]
    pointers = pointers[:, None] + column[None, :]
    if KIND == PLAIN:
        tl.store(pointers, x, mask=mask)
    else:
        # Codes go in pieces as long as those of ``x`` are read in: the compiler gives neighbors to a thread by the
        # widest access, and the squares of a norm would be added in another order.
        most: tl.constexpr = 128 // x.dtype.primitive_bitwidth
        pointers = tl.multiple_of(pointers, (1, most if WIDTH % most == 0 else 1))
        wide = x.to(tl.float32)
        tl.store(pointers, _codes(wide, _scales(wide, scale_ptr, place, exists, KIND), KIND), mask=mask)


@triton.jit
def new_heads(
    q_ptr: tl.tensor, k_ptr: tl.tensor, q_norm_ptr: tl.tensor | None, k_norm_ptr: tl.tensor | None,
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, eps: float,
    GROUP: tl.constexpr, D: tl.constexpr, BF16: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The ``GROUP`` queries of a token at ``q_ptr`` and, in the row after them, its key: ``[BH, BD]``, turned."""
    row, column = tl.arange(0, BH), tl.arange(0, BD)
    inside, other, is_key = (column < D)[None, :], partner(column, D)[None, :], row == GROUP
    mask = (row <= GROUP)[:, None] & inside
    heads = tl.where(is_key, k_ptr, q_ptr + row * D)[:, None]
    x = tl.load(heads + column[None, :], mask=mask, other=0.0)
    y = tl.load(heads + other, mask=mask, other=0.0)
    x_weight, y_weight, cos, sin = rotation_of(cos_ptr, sin_ptr, None, D, BH, BD)
    if q_norm_ptr is not None:
        norms = tl.where(is_key, k_norm_ptr, q_norm_ptr)[:, None]
        x_weight = tl.load(norms + column[None, :], mask=mask, other=0.0)
        y_weight = tl.load(norms + other, mask=mask, other=0.0)
    return turned(x, y, x_weight, y_weight, cos, sin, eps, D, q_norm_ptr is not None, BF16)


def kind_of(method: KVCacheMethod | None) -> int:
    """Which codes the kernels make."""
    if method is None:
        return PLAIN.value
    if not method.per_token:
        return LAYER.value
    return INT8.value if method.code_dtype == torch.int8 else FP8.value


def _neighbors(width: int, itemsize: int) -> int:
    """Elements of a head that a thread reads at once."""
    neighbors = 16 // itemsize
    while width % neighbors:
        neighbors //= 2
    return neighbors


def least_rows(width: int, itemsize: int) -> int:
    """Least rows of a tile of heads in which the threads hold those as in a tile of `lqrl.quant.exact.rms_norm`."""
    block = 1 << max(width - 1, 0).bit_length()
    return max(1, WARPS * 32 * _neighbors(width, itemsize) // block)


def as_norms_read(x: Tensor, width: int) -> Tensor:
    """``x``, or a copy of it in which heads begin where they do in the tensor that `lqrl.quant.exact` norms."""
    x = x if x.stride(0) % _neighbors(width, x.element_size()) == 0 else x.clone(memory_format=torch.contiguous_format)
    return aligned(x)
