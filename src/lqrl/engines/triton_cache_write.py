"""From the product of query, key and value layers to rotated queries and a filled cache, in one launch.

Head norms, rotation, quantization and the write into the slots give the bits of one after the other: each product and
sum is rounded to the compute dtype where transformers rounds it, codes and scales are those of
`lqrl.quant.numerics.kv`, and head norms are those of `lqrl.quant.exact.rms_norm`, whose squares are added in the same
order because heads are read in tiles whose rows lie in threads as that kernel's do: see `_least_rows`.

A program takes many heads of one token, for which it reads the rotation once, and bf16 is multiplied and added two
numbers at a time: prefills are bound by instructions. A product or sum of two bf16 that was rounded to fp32 before
gives the same bf16: fp32 has more than twice its digits, and a product that fp32 cannot hold is less than half the
least bf16.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAssignmentType=false
# Launches take options of the compiler besides the kernel's parameters; inline assembly may give several results.
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.engines.layers import Rotation
from lqrl.quant.kv import KVCacheMethod
from lqrl.quant.triton_casts import EMULATED, to_bf16
from lqrl.quant.triton_exact_rows import WARPS, aligned, norm_factor
from lqrl.quant.triton_kv import LAYER, PLAIN, codes_of, kind_of, row_scales
from lqrl.quant.triton_use import power_of_two, tiles

_FEW_TOKENS = 1024  # so many do not fill a GPU with programs of several tiles
_MOST_TIMES = 4  # tiles of a program, which hold the registers of a thread


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
        return a * b
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
def _partner(column: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """The column of the other half that each of a head's columns is turned with."""
    half: tl.constexpr = D // 2
    together: tl.constexpr = 8 if half % 8 == 0 else 4 if half % 4 == 0 else 2 if half % 2 == 0 else 1
    other = tl.where(column < half, column + half, column - half)
    return tl.max_contiguous(tl.multiple_of(other, together), together)


@triton.jit
def _rotation_of(
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, weight_ptr: tl.tensor | None,
    D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Weights of a norm at columns and at their `_partner`, cosines and sines: what `_turned` takes, for each row.

    A tile whose rows are equal, so that a thread reads neighbors and what it needs.
    """
    column, row = tl.arange(0, BD), tl.zeros((BH,), tl.int32)[:, None]
    inside = (row == 0) & (column < D)[None, :]
    own, other = row + column[None, :], row + _partner(column, D)[None, :]
    cos = tl.load(cos_ptr + own, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + own, mask=inside, other=0.0)
    if weight_ptr is not None:
        x_weight = tl.load(weight_ptr + own, mask=inside, other=0.0)
        y_weight = tl.load(weight_ptr + other, mask=inside, other=0.0)
        return x_weight, y_weight, cos, sin
    else:
        return cos, cos, cos, sin


@triton.jit
def _turned(
    x: tl.tensor, y: tl.tensor, x_weight: tl.tensor, y_weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, eps: float,
    D: tl.constexpr, NORM: tl.constexpr, BF16: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Heads ``[BH, BD]`` normed and rotated, in the compute dtype as all that comes in.

    ``x`` is 0 beyond its ``D`` columns; ``y`` and ``y_weight`` are ``x`` and its weight at the `_partner` columns.
    """
    if NORM:
        wide = x.to(tl.float32)
        inverse = norm_factor(wide, eps, D)[:, None]
        x = _product(_narrow(wide * inverse, BF16), x_weight, BF16)
        y = _product(_narrow(y.to(tl.float32) * inverse, BF16), y_weight, BF16)
    return _sum(_product(x, cos, BF16), _product(y, sin, BF16), BF16)


@triton.jit
def _scales(x, scale_ptr, place, exists, KIND: tl.constexpr):
    """The scale of each row, NaN where an element is NaN or inf: made and kept for a token, read for a layer."""
    if KIND == LAYER:
        return tl.zeros(place.shape, tl.float32) + tl.load(scale_ptr)
    else:
        scale = row_scales(x, KIND)
        tl.store(scale_ptr + place, scale, mask=exists)
        return scale


@triton.jit
def _store(
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
        tl.store(pointers, codes_of(wide, _scales(wide, scale_ptr, place, exists, KIND), KIND), mask=mask)


@triton.jit
def _heads(x_ptr, head, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Some heads of a token, and the `_partner` of each column."""
    column = tl.arange(0, BD)
    mask = (head < HEADS)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + head[:, None] * D + column[None, :], mask=mask, other=0.0)
    y = tl.load(x_ptr + head[:, None] * D + _partner(column, D)[None, :], mask=mask, other=0.0)
    return x, y


@triton.jit
def _store_queries(
    q_ptr, out_ptr, weight_ptr, cos_ptr, sin_ptr, eps, first,
    HEADS: tl.constexpr, D: tl.constexpr, BF16: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """``TIMES`` tiles of a token's heads from the ``first`` on. All are read before any is stored."""
    head = first + tl.arange(0, BH)
    tables = _rotation_of(cos_ptr, sin_ptr, weight_ptr, D, BH, BD)
    held = (_heads(q_ptr, head, HEADS, D, BD),)
    for index in tl.static_range(1, TIMES):
        held += (_heads(q_ptr, head + index * BH, HEADS, D, BD),)
    for index in tl.static_range(TIMES):
        own = head + index * BH
        x, y = held[index]
        x = _turned(x, y, *tables, eps, D, weight_ptr is not None, BF16)
        _store(x, out_ptr + own * D, None, own, own < HEADS, D, PLAIN, BD)


@triton.jit(do_not_specialize=["scale_slot", "scale_head"])
def _rotate_and_store(
    q_ptr, k_ptr, v_ptr, v_row, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, positions_ptr, slots_ptr,
    out_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    key_slot, key_head, value_slot, value_head, scale_slot, scale_head,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KIND: tl.constexpr,
    BF16: tl.constexpr, BH: tl.constexpr, TIMES: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """The first programs of a token take ``TIMES * BH`` heads of its query, the others ``BH`` of its key and value."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token)
    cos_ptr += position * D
    sin_ptr += position * D
    q_parts: tl.constexpr = (HEADS + BH * TIMES - 1) // (BH * TIMES)
    if part < q_parts:
        _store_queries(
            q_ptr + token * Q_ROW, out_ptr + token * (HEADS * D), q_norm_ptr, cos_ptr, sin_ptr, eps, part * BH * TIMES,
            HEADS, D, BF16, BH, BD, TIMES,
        )  # fmt: skip
    else:
        slot = token if slots_ptr is None else tl.load(slots_ptr + token)
        head = (part - q_parts) * BH + tl.arange(0, BH)
        exists, width = head < KV_HEADS, tl.arange(0, BDV)
        seen = exists[:, None] & (width < DV)[None, :]
        k, other = _heads(k_ptr + token * K_ROW, head, KV_HEADS, D, BD)
        v = tl.load(v_ptr + token * v_row + (head * DV)[:, None] + width[None, :], mask=seen, other=0.0)
        tables = _rotation_of(cos_ptr, sin_ptr, k_norm_ptr, D, BH, BD)
        k = _turned(k, other, *tables, eps, D, k_norm_ptr is not None, BF16)
        place = slot * scale_slot + position + head * scale_head
        at = head.to(tl.int64)  # of the cache, which may be larger than int32 counts
        keys = key_ptr + slot * key_slot + position * D + at * key_head
        _store(k, keys, key_scale_ptr, place, exists, D, KIND, BD)
        values = value_ptr + slot * value_slot + position * DV + at * value_head
        _store(v, values, value_scale_ptr, place, exists, DV, KIND, BDV)


def _neighbors(width: int, itemsize: int) -> int:
    """Elements of a head that a thread reads at once."""
    neighbors = 16 // itemsize
    while width % neighbors:
        neighbors //= 2
    return neighbors


def _least_rows(width: int, itemsize: int) -> int:
    """Least rows of a tile of heads in which the threads hold those as in a tile of `lqrl.quant.exact.rms_norm`."""
    block = 1 << max(width - 1, 0).bit_length()
    return max(1, WARPS * 32 * _neighbors(width, itemsize) // block)


def _as_norms_read(x: Tensor, width: int) -> Tensor:
    """``x``, or a copy of it in which heads begin where they do in the tensor that `lqrl.quant.exact` norms."""
    x = x if x.stride(0) % _neighbors(width, x.element_size()) == 0 else x.clone(memory_format=torch.contiguous_format)
    return aligned(x)


def _times(tokens: int, heads: int, rows: int) -> int:
    """Tiles of ``rows`` heads that a program takes."""
    return 1 if tokens <= _FEW_TOKENS else max(1, min(_MOST_TIMES, heads // rows))


def rotate_and_store(
    product: Sequence[Tensor],
    rotation: Rotation,
    positions: Tensor,
    slots: Tensor | None,
    views: Sequence[Tensor],
    method: KVCacheMethod | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    times: int | None = None,
) -> Tensor:
    """Norm and rotate the heads of ``N`` tokens; write keys and values into the cache.

    Args:
        product: ``[N, H * D]``, ``[N, Hkv * D]`` and ``[N, Hkv * Dv]`` fp32 or bf16, elements of a row side by side.
        rotation: tables and norms of the layer.
        positions: ``[N]`` int64, on the device.
        slots: ``[N]`` int64; ``None``: token ``i`` goes to slot ``i``.
        views: keys ``[slots, Hkv, L, D]`` and values ``[slots, Hkv, L, Dv]`` as the cache holds them, and under a
            format with scales per token both scales ``[slots, Hkv, L, 1]``; each contiguous.
        method: the cache's low-bit format, or ``None``.
        scales: calibrated scales of the layer's keys and values, for a format that has them.
        times: tiles of heads of a program, instead of what suits the number of tokens. They change no bit.

    Returns:
        The queries ``[N, H, D]``.
    """
    q, k, v = product
    keys, values = (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in views[:2])
    (_, kv_heads, _, width), value_width = keys.shape, values.shape[3]
    tokens, heads, itemsize = len(q), q.shape[1] // width, q.element_size()
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    key_scale, value_scale = views[2:] if len(views) > 2 else scales or (None, None)
    scale_strides = (views[2].stride(0), views[2].stride(1)) if len(views) > 2 else (0, 0)
    if rotation.query_norm is not None:
        q, k = _as_norms_read(q, width), _as_norms_read(k, width)
    rows = _least_rows(width, itemsize)
    times = times or _times(tokens, heads, rows)
    with torch.cuda.device_of(q):
        _rotate_and_store[(tokens, tiles(heads, rows * times) + tiles(kv_heads, rows))](
            q, k, v, v.stride(0), rotation.cos, rotation.sin,
            rotation.query_norm, rotation.key_norm, rotation.eps, positions, slots,
            out, keys, values, key_scale, value_scale,
            *keys.stride()[:2], *values.stride()[:2], *scale_strides,
            Q_ROW=q.stride(0), K_ROW=k.stride(0), HEADS=heads, KV_HEADS=kv_heads, D=width, DV=value_width,
            KIND=kind_of(method), BF16=q.dtype == torch.bfloat16, BH=rows, TIMES=times, BD=power_of_two(width),
            BDV=power_of_two(value_width), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out
