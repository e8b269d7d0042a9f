"""From the product of query, key and value layers to rotated queries and a filled cache, in one launch.

Head norms, rotation, quantization and the write into the slots give the bits of one after the other, see
`lqrl.engines.triton_heads`. A program takes many heads of one token, for which it reads the rotation once: prefills are
bound by instructions.
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
from lqrl.engines.triton_heads import PLAIN, as_norms_read, kind_of, least_rows, partner, rotation_of, store, turned
from lqrl.quant.kv import KVCacheMethod
from lqrl.quant.triton_exact_rows import WARPS
from lqrl.quant.triton_use import power_of_two, tiles

_FEW_TOKENS = 1024  # so many do not fill a GPU with programs of several tiles
_MOST_TIMES = 4  # tiles of a program, which hold the registers of a thread


@triton.jit
def _heads(x_ptr, head, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Some heads of a token, and the `partner` of each column."""
    column = tl.arange(0, BD)
    mask = (head < HEADS)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + head[:, None] * D + column[None, :], mask=mask, other=0.0)
    y = tl.load(x_ptr + head[:, None] * D + partner(column, D)[None, :], mask=mask, other=0.0)
    return x, y


@triton.jit
def _store_queries(
    q_ptr, out_ptr, weight_ptr, cos_ptr, sin_ptr, eps, first,
    HEADS: tl.constexpr, D: tl.constexpr, BF16: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """``TIMES`` tiles of a token's heads from the ``first`` on. All are read before any is stored."""
    head = first + tl.arange(0, BH)
    tables = rotation_of(cos_ptr, sin_ptr, weight_ptr, D, BH, BD)
    held = (_heads(q_ptr, head, HEADS, D, BD),)
    for index in tl.static_range(1, TIMES):
        held += (_heads(q_ptr, head + index * BH, HEADS, D, BD),)
    for index in tl.static_range(TIMES):
        own = head + index * BH
        x, y = held[index]
        x = turned(x, y, *tables, eps, D, weight_ptr is not None, BF16)
        store(x, out_ptr + own * D, None, own, own < HEADS, D, PLAIN, BD)


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
        tables = rotation_of(cos_ptr, sin_ptr, k_norm_ptr, D, BH, BD)
        k = turned(k, other, *tables, eps, D, k_norm_ptr is not None, BF16)
        place = slot * scale_slot + position + head * scale_head
        at = head.to(tl.int64)  # of the cache, which may be larger than int32 counts
        keys = key_ptr + slot * key_slot + position * D + at * key_head
        store(k, keys, key_scale_ptr, place, exists, D, KIND, BD)
        values = value_ptr + slot * value_slot + position * DV + at * value_head
        store(v, values, value_scale_ptr, place, exists, DV, KIND, BDV)


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
        q, k = as_norms_read(q, width), as_norms_read(k, width)
    rows = least_rows(width, itemsize)
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
