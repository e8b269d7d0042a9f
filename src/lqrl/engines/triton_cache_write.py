"""From the product of query, key and value layers to rotated queries and a filled cache, in one launch.

Head norms, rotation, quantization and the write into the slots give the bits of one after the other: each product and
sum is rounded to the compute dtype where transformers rounds it, codes and scales are those of
`lqrl.quant.numerics.kv`, and head norms are those of `lqrl.quant.exact.rms_norm`. Their squares are added as that
kernel adds them, because they are read in tiles of the same shape by as many warps, with as many neighbors in a thread.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.engines.layers import Rotation
from lqrl.quant.kv import KVCacheMethod
from lqrl.quant.numerics.kv import KV_SCALE_FLOOR
from lqrl.quant.triton_casts import rounded_to_bf16, to_bf16, to_e4m3, to_integer
from lqrl.quant.triton_exact_rows import WARPS, aligned, norm_factor, rows_together
from lqrl.quant.triton_use import power_of_two, tiles

_TILE = 1024  # elements of a program, about, where no head norm says how many
_PLAIN, _INT8, _FP8, _LAYER = (tl.constexpr(kind) for kind in range(4))  # codes: none, a scale a token, one a layer
_FLOOR = tl.constexpr(KV_SCALE_FLOOR)


@triton.jit
def _rounded(x, BF16: tl.constexpr):
    return rounded_to_bf16(x) if BF16 else x


@triton.jit
def _normed(x, weight_ptr, column, inside, inverse, BF16: tl.constexpr):
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return _rounded(_rounded(x * inverse[:, None], BF16) * weight[None, :], BF16)


@triton.jit
def _turned(
    x_ptr, heads, exists, weight_ptr, cos_ptr, sin_ptr, eps,
    D: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both halves ``[BH, BLOCK]`` of the heads of a token, normed and rotated, rounded as the compute dtype."""
    half: tl.constexpr = D // 2
    column, whole = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    inside = column < half
    mask = exists[:, None] & inside[None, :]
    pointers = x_ptr + heads[:, None] * D + column[None, :]
    a = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(pointers + half, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        x = x_ptr + heads[:, None] * D + whole[None, :]
        x = tl.load(x, mask=exists[:, None] & (whole < D)[None, :], other=0.0).to(tl.float32)
        inverse = norm_factor(x, eps, D)
        a = _normed(a, weight_ptr, column, inside, inverse, BF16)
        b = _normed(b, weight_ptr + half, column, inside, inverse, BF16)
    cos_a = tl.load(cos_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + half + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + half + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = _rounded(_rounded(a * cos_a, BF16) + _rounded(b * sin_a, BF16), BF16)
    second = _rounded(_rounded(b * cos_b, BF16) + _rounded(a * sin_b, BF16), BF16)
    return first, second


@triton.jit
def _magnitude(x):
    """Bits of the largest magnitude of each row, which are ordered as the numbers are, NaN above inf."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _scales(magnitude, scale_ptr, place, exists, KIND: tl.constexpr):
    """The scale of each row, NaN where an element is NaN or inf: made and kept for a token, read for a layer."""
    scale = tl.zeros(magnitude.shape, tl.float32)
    if KIND == _LAYER:
        scale += tl.load(scale_ptr)
    elif KIND != _PLAIN:
        amax = magnitude.to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.math.div_rn(amax, 127.0 if KIND == _INT8 else 448.0), _FLOOR)
        scale = tl.where(magnitude >= 0x7F800000, float("nan"), scale)
        tl.store(scale_ptr + place, scale, mask=exists)
    return scale


@triton.jit
def _stored(x, scale, KIND: tl.constexpr, BF16: tl.constexpr):
    """What the cache holds of ``x``; ``scale`` has one element for each row."""
    if KIND == _INT8:
        codes = to_integer(x * tl.math.div_rn(1.0, scale)[:, None])
        return tl.where((scale == scale)[:, None], codes, 0).to(tl.int8)
    elif KIND == _FP8:
        codes = to_e4m3(x * tl.math.div_rn(1.0, scale)[:, None])
        return tl.where((scale == scale)[:, None], codes, 0x7F).to(tl.uint8)
    elif KIND == _LAYER:
        finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        return tl.where(finite, to_e4m3(tl.math.div_rn(x, scale[:, None])), 0x7F).to(tl.uint8)
    else:
        return to_bf16(x) if BF16 else x


@triton.jit
def _store_values(
    x_ptr, value_ptr, scale_ptr, first, place, value_head, scale_head,
    HEADS: tl.constexpr, DV: tl.constexpr, KIND: tl.constexpr, BF16: tl.constexpr, BV: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """The values of ``BV`` heads of a token, from head ``first`` on."""
    head, width = first + tl.arange(0, BV), tl.arange(0, BDV)
    exists = head < HEADS
    mask = exists[:, None] & (width < DV)[None, :]
    x = tl.load(x_ptr + head[:, None] * DV + width[None, :], mask=mask, other=0.0)
    value = value_ptr + (head * value_head)[:, None] + width[None, :]
    if KIND == _PLAIN:
        tl.store(value, x, mask=mask)
    else:
        wide = x.to(tl.float32)
        scale = _scales(_magnitude(wide), scale_ptr, place + head * scale_head, exists, KIND)
        tl.store(value, _stored(wide, scale, KIND, BF16), mask=mask)


@triton.jit(do_not_specialize=["scale_slot", "scale_head"])
def _rotate_and_store(
    q_ptr, k_ptr, v_ptr, v_row, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, positions_ptr, slots_ptr,
    out_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    key_slot, key_head, value_slot, value_head, scale_slot, scale_head,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KIND: tl.constexpr,
    BF16: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token)
    slot = token if slots_ptr is None else tl.load(slots_ptr + token)
    cos_ptr += position * D
    sin_ptr += position * D
    half: tl.constexpr = D // 2
    q_parts: tl.constexpr = (HEADS + BH - 1) // BH
    kv_parts: tl.constexpr = (KV_HEADS + BH - 1) // BH
    lane, column = tl.arange(0, BH), tl.arange(0, BLOCK)
    if part < q_parts:
        head = part * BH + lane
        exists = head < HEADS
        a, b = _turned(q_ptr + token * Q_ROW, head, exists, q_norm_ptr, cos_ptr, sin_ptr, eps, D, BF16, BLOCK)
        mask = exists[:, None] & (column < half)[None, :]
        query = out_ptr + (token * HEADS + head)[:, None] * D + column[None, :]
        tl.store(query, _stored(a, lane, _PLAIN, BF16), mask=mask)
        tl.store(query + half, _stored(b, lane, _PLAIN, BF16), mask=mask)
    elif part < q_parts + kv_parts:
        head = (part - q_parts) * BH + lane
        exists = head < KV_HEADS
        a, b = _turned(k_ptr + token * K_ROW, head, exists, k_norm_ptr, cos_ptr, sin_ptr, eps, D, BF16, BLOCK)
        place = slot * scale_slot + head * scale_head + position
        scale = _scales(tl.maximum(_magnitude(a), _magnitude(b)), key_scale_ptr, place, exists, KIND)
        mask = exists[:, None] & (column < half)[None, :]
        key = key_ptr + slot * key_slot + (head * key_head + position * D)[:, None] + column[None, :]
        tl.store(key, _stored(a, scale, KIND, BF16), mask=mask)
        tl.store(key + half, _stored(b, scale, KIND, BF16), mask=mask)
    else:
        _store_values(
            v_ptr + token * v_row, value_ptr + slot * value_slot + position * DV, value_scale_ptr,
            (part - q_parts - kv_parts) * BV, slot * scale_slot + position, value_head, scale_head,
            KV_HEADS, DV, KIND, BF16, BV, BDV,
        )  # fmt: skip


def _kind(method: KVCacheMethod | None) -> int:
    if method is None:
        return _PLAIN.value
    if not method.per_token:
        return _LAYER.value
    return _INT8.value if method.code_dtype == torch.int8 else _FP8.value


def _as_norms_read(x: Tensor, width: int) -> Tensor:
    """``x``, or a copy of it in which heads begin where they do in the tensor that `lqrl.quant.exact` norms."""
    neighbors = 16 // x.element_size()
    while width % neighbors:
        neighbors //= 2
    x = x if x.stride(0) % neighbors == 0 else x.clone(memory_format=torch.contiguous_format)
    return aligned(x)


def rotate_and_store(
    product: Sequence[Tensor],
    rotation: Rotation,
    positions: Tensor,
    slots: Tensor | None,
    views: Sequence[Tensor],
    method: KVCacheMethod | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
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

    Returns:
        The queries ``[N, H, D]``.
    """
    q, k, v = product
    keys, values = (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in views[:2])
    (_, kv_heads, _, width), value_width = keys.shape, values.shape[3]
    tokens, heads, kind = len(q), q.shape[1] // width, _kind(method)
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    key_scale, value_scale = views[2:] if len(views) > 2 else scales or (None, None)
    scale_strides = (views[2].stride(0), views[2].stride(1)) if len(views) > 2 else (0, 0)
    if rotation.query_norm is None:
        together = max(1, min(power_of_two(max(heads, kv_heads)), _TILE // power_of_two(width)))
    else:
        together, q, k = rows_together(power_of_two(width)), _as_norms_read(q, width), _as_norms_read(k, width)
    values_together = max(1, min(power_of_two(kv_heads), _TILE // power_of_two(value_width)))
    parts = tiles(heads, together) + tiles(kv_heads, together) + tiles(kv_heads, values_together)
    with torch.cuda.device_of(q):
        _rotate_and_store[(tokens, parts)](
            q, k, v, v.stride(0), rotation.cos, rotation.sin,
            rotation.query_norm, rotation.key_norm, rotation.eps, positions, slots,
            out, keys, values, key_scale, value_scale,
            *keys.stride()[:2], *values.stride()[:2], *scale_strides,
            Q_ROW=q.stride(0), K_ROW=k.stride(0), HEADS=heads, KV_HEADS=kv_heads, D=width, DV=value_width, KIND=kind,
            BF16=q.dtype == torch.bfloat16, BH=together, BV=values_together, BLOCK=power_of_two(width // 2),
            BDV=power_of_two(value_width), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out
