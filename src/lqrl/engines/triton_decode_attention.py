"""Attention of one new token a sequence over the slot cache: only live tokens are read, as the codes that they are.

The query heads that share a key head are rows of one tile. A sequence's keys may be split between several programs, so
that a few long sequences fill the GPU too; a second kernel joins the parts. How many programs there are depends on
shapes alone, and which of them find work on the positions, which stay on the device: a captured step serves any
lengths.

Codes of 8 bits are exact in fp16, so they are multiplied as they are, by queries that a power of two brings into the
range of fp16. A key's scale becomes a factor of its score, a value's one of its weight. Sums are fp32.

Codes are laid out for the tensor cores before they are converted, so they pass shared memory once. Keys lie along the
inner dimension of their product and are taken as they are; values lie across it, where only elements of 16 bits can be
turned, so that pairs of codes are read and make two products, of the even and of the odd columns.

The kernel may also take the new token as the product of its layers left it: `lqrl.engines.triton_new_token`.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.engines.triton_heads import new_heads, store
from lqrl.quant.kv import Cached
from lqrl.quant.triton_casts import (
    EMULATED,
    e4m3_pairs_to_fp16,
    e4m3_to_fp16,
    from_e4m3,
    int8_pairs_to_fp16,
    int8_to_fp16,
    to_bf16,
)
from lqrl.quant.triton_overlap import next_may_begin
from lqrl.quant.triton_use import TENSOR_CORES_FP8, multiprocessors, power_of_two, tiles, use_triton

_LOG2_E = 1.4426950408889634
ROWS = 16
"""Of a tile of query heads: the least that tensor cores take."""
_PER_SM = 4  # programs that a multiprocessor runs at a time
_MOST_SPLITS = 64
_NO_WINDOW = 2**30


@dataclass(frozen=True)
class Tile:
    """How the keys of a program are cut.

    Attributes:
        keys: of a block.
        warps, stages: of a program, and of its pipeline.
        registers: most of a thread, so that more programs run at a time; ``None`` leaves it to the compiler.
    """

    keys: int
    warps: int
    stages: int
    registers: int | None = None


def tile_of(width: int, bits: int) -> Tile:
    """For heads of ``width`` elements of ``bits`` bits."""
    if bits == 32:
        return Tile(16, 4, 1)  # outside the tensor cores
    return Tile(32 if width > 128 else 64 if width > 64 else 128, 4, 3)


@triton.jit
def _operand(x, KIND: tl.constexpr):
    """Numbers as the product takes them: fp32, bf16, or codes as fp16 (fp32 in the interpreter)."""
    if EMULATED:
        return from_e4m3(x) if x.dtype == tl.uint8 else x.to(tl.float32)
    elif x.dtype == tl.uint8:
        return from_e4m3(x).to(KIND)
    elif x.dtype == tl.int8 and tl.float16 == KIND:
        return int8_to_fp16(x)
    elif x.dtype == tl.float8e4nv and tl.float16 == KIND:
        return e4m3_to_fp16(x)
    else:
        return x.to(KIND)


@triton.jit
def _pairs(x, code: tl.constexpr):
    """Two such operands of pairs of codes, the even and the odd elements."""
    if code == tl.int8:
        even, odd = int8_pairs_to_fp16(x)
    else:
        even, odd = e4m3_pairs_to_fp16(x, code != tl.uint8)
    return (even.to(tl.float32), odd.to(tl.float32)) if EMULATED else (even, odd)


@triton.jit
def _add_values(acc, acc_odd, fade, weights, v, CODE: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr):
    """Weighted values added to ``acc`` times ``fade``; of pairs the even ones, the odd ones to ``acc_odd``."""
    acc, acc_odd = acc * fade[:, None], acc_odd * fade[:, None]
    if EACH == 2:
        even, odd = _pairs(v, CODE)
        acc = tl.dot(weights, even, acc, input_precision="ieee")
        acc_odd = tl.dot(weights, odd, acc_odd, input_precision="ieee")
    else:
        acc = tl.dot(weights, _operand(v, KIND), acc, input_precision="ieee")
    return acc, acc_odd


@triton.jit
def _share(position_ptr, split, splits, window, BN: tl.constexpr):
    """Position of a sequence's newest key; first key of a program's part, and the end of it."""
    position = tl.load(position_ptr).to(tl.int32)
    length = position + 1
    start = tl.maximum(length - window, 0)
    part = tl.cdiv(tl.cdiv(length - start, BN), splits) * BN
    first = start + split * part
    return position, first, tl.minimum(first + part, length)


@triton.jit
def _block(ptr, key, token, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A block of keys or values; 0 where they do not live."""
    column = tl.arange(0, BLOCK)
    seen = live[:, None] if BLOCK == WIDTH else live[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + key[:, None] * token + column[None, :], mask=seen, other=0.0)


@triton.jit
def _query(pointers, exists, D: tl.constexpr, BD: tl.constexpr):
    width = tl.arange(0, BD)
    return tl.load(pointers[:, None] + width[None, :], mask=exists[:, None] & (width < D)[None, :], other=0.0)


@triton.jit
def _scaled(q, unit, KIND: tl.constexpr, BG: tl.constexpr):
    """Queries as the product takes them, and what turns each row's products into scores."""
    unit = tl.full((BG,), 1.0, tl.float32) * unit
    if tl.float16 == KIND:
        wide = q.to(tl.float32)
        power = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
        q = wide * (0x7F000000 - power).to(tl.float32, bitcast=True)[:, None]  # below 2
        unit *= power.to(tl.float32, bitcast=True)
    return q.to(tl.float32) if EMULATED else q.to(KIND), unit


@triton.jit
def _new_token(
    q_ptr, new, k_scale_ptr, v_scale_ptr, row, head, position, writes, key_at, value_at, scale_at,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CODES: tl.constexpr, BF16: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """The queries of the new token, whose key and value go into the cache if this program ``writes``.

    All of the program's threads see them there afterwards, as they were rounded: no other program reads them.
    """
    k_ptr, v_ptr, v_row, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, key_ptr, value_ptr = new
    one, width = tl.arange(0, 1), tl.arange(0, BDV)
    value = v_ptr + row * v_row + head * DV + one[:, None] + width[None, :]
    v = tl.load(value, mask=(width < DV)[None, :], other=0.0)  # before it is known where it goes
    heads = new_heads(
        q_ptr + row * Q_ROW + head * GROUP * D, k_ptr + row * K_ROW + head * D, q_norm_ptr, k_norm_ptr,
        cos_ptr + position * D, sin_ptr + position * D, eps, GROUP, D, BF16, BG, BD,
    )  # fmt: skip
    lane = tl.arange(0, BG)
    store(heads, key_ptr + key_at + lane * 0, k_scale_ptr, scale_at + lane * 0, (lane == GROUP) & writes, D, CODES, BD)
    store(v, value_ptr + value_at + one, v_scale_ptr, scale_at + one, (one == 0) & writes, DV, CODES, BDV)
    tl.debug_barrier()
    return heads


@triton.jit
def _leave(
    acc, largest, total, out_ptr, state_ptr, own, exists,
    DV: tl.constexpr, KIND: tl.constexpr, SPLIT: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """The results of a tile of heads at ``own``, or their parts for `_join`."""
    width = tl.arange(0, BDV)
    mask = exists[:, None] & (width < DV)[None, :]
    if SPLIT:
        tl.store(state_ptr + own * 2, largest, mask=exists)
        tl.store(state_ptr + own * 2 + 1, total, mask=exists)
    else:
        acc /= total[:, None]
    pointers = out_ptr + own[:, None] * DV + width[None, :]
    tl.store(pointers, acc if SPLIT or tl.float32 == KIND else to_bf16(acc), mask=mask)


@triton.jit(do_not_specialize=["splits", "window", "scale_slot", "scale_head"])
def _decode(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, part_ptr, state_ptr, positions_ptr, scale, splits, window,
    k_slot, k_head, k_token, v_slot, v_head, v_token, scale_slot, scale_head, new,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, KIND: tl.constexpr,
    BY_LAYER: tl.constexpr, BY_TOKEN: tl.constexpr, SPLIT: tl.constexpr, EACH: tl.constexpr,
    BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """``BY_LAYER``: one scale for all keys, one for all values. ``BY_TOKEN``: a scale for each token and head.

    ``EACH``: values in an element of ``v_ptr``, 2 if it holds pairs of codes. ``new``: of `_new_token`, or none.
    """
    next_may_begin()
    split, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group_tiles: tl.constexpr = (GROUP + BG - 1) // BG
    head, group = tl.program_id(0) // group_tiles, tl.program_id(0) % group_tiles * BG + tl.arange(0, BG)
    position, first, end = _share(positions_ptr + row, split, splits, window, BN)
    if SPLIT and first >= end:
        return
    own = (row * (tl.num_programs(0) // group_tiles) + head) * GROUP + group
    unit = scale * tl.load(k_scale_ptr) if BY_LAYER else scale
    k_at, v_at = row * k_slot + head * k_head, row * v_slot + head * v_head
    scale_at = row * scale_slot + head * scale_head
    if new is not None:
        q = _new_token(
            q_ptr, new, k_scale_ptr, v_scale_ptr, row, head, position, end > position,
            k_at + position * k_token, (v_at + position * v_token) * EACH, scale_at + position,
            Q_ROW, K_ROW, GROUP, D, DV, CODES, out_ptr.dtype.element_ty == tl.bfloat16, BG, BD, BDV,
        )  # fmt: skip
    else:
        q = _query(q_ptr + own * D, group < GROUP, D, BD)
    q, unit = _scaled(q, unit, KIND, BG)
    largest = tl.full((BG,), float("-inf"), tl.float32)
    totals = tl.zeros((BG, BN), tl.float32)  # added up after the loop: a sum over keys waits for all warps
    acc, odd = tl.zeros((BG, BDV // EACH), tl.float32), tl.zeros((BG, BDV // EACH), tl.float32)
    for block in range(first, end, BN):
        key = block + tl.arange(0, BN)
        live = key < end
        k = _block(k_ptr + k_at, key, k_token, live, D, BD)
        v = _block(v_ptr + v_at, key, v_token, live, DV // EACH, BDV // EACH)
        scores = tl.dot(q, _operand(k.T, KIND), input_precision="ieee") * unit[:, None]
        if BY_TOKEN:  # a value's scale joins the exponent: its weight is at most 1 whatever the scales are
            v_scale = tl.load(v_scale_ptr + scale_at + key, mask=live, other=1.0)
            scores *= tl.load(k_scale_ptr + scale_at + key, mask=live, other=0.0)[None, :]
            scores += tl.math.log2(v_scale)[None, :]
        scores = tl.where(live[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights, fade = tl.math.exp2(scores - higher[:, None]), tl.math.exp2(largest - higher)
        totals = totals * fade[:, None] + (weights * (1.0 / v_scale)[None, :] if BY_TOKEN else weights)
        largest, weights = higher, weights if EMULATED else weights.to(KIND)
        acc, odd = _add_values(acc, odd, fade, weights, v, k_ptr.dtype.element_ty, KIND, EACH)
    total = tl.sum(totals, 1)
    if EACH == 2:
        acc = tl.interleave(acc, odd)
    if BY_LAYER:
        acc *= tl.load(v_scale_ptr)
    _leave(
        acc, largest, total, part_ptr if SPLIT else out_ptr, state_ptr, own * splits + split if SPLIT else own,
        group < GROUP, DV, KIND, SPLIT, BDV,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "window"])
def _join(
    part_ptr, state_ptr, positions_ptr, out_ptr, splits, window,
    DV: tl.constexpr, BF16: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, from the parts that found work."""
    next_may_begin()
    row = tl.program_id(1).to(tl.int64)
    own = row * tl.num_programs(0) + tl.program_id(0)
    split, width = tl.arange(0, S), tl.arange(0, BDV)
    _, first, end = _share(positions_ptr + row, split, splits, window, BN)
    live = (first < end) & (split < splits)
    place = own * splits + split
    largest = tl.load(state_ptr + place * 2, mask=live, other=float("-inf"))
    total = tl.load(state_ptr + place * 2 + 1, mask=live, other=0.0)
    factor = tl.math.exp2(largest - tl.max(largest, 0))
    mask = live[:, None] & (width < DV)[None, :]
    part = tl.load(part_ptr + place[:, None] * DV + width[None, :], mask=mask, other=0.0)
    out = tl.sum(part * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(out_ptr + own * DV + width, to_bf16(out) if BF16 else out, mask=width < DV)


def splits_of(programs: int, blocks: int, processors: int) -> int:
    """Parts of each sequence: a power of two, about one wave of programs, and no more than blocks of keys.

    Args:
        programs: that there are without splitting.
        blocks: of keys in the longest sequence that fits the cache.
        processors: multiprocessors of the GPU.
    """
    wanted = max(1, min(_PER_SM * processors // programs, blocks, _MOST_SPLITS))
    return 1 << (wanted.bit_length() - 1)


def _codes(x: Tensor | Cached) -> tuple[Tensor, Tensor | None]:
    if isinstance(x, Tensor):
        return x, None
    codes = x.codes
    if codes.dtype == torch.float8_e4m3fn and not use_triton(codes, TENSOR_CORES_FP8):
        codes = codes.view(torch.uint8)  # no instruction converts them
    return codes, x.scale


def attend(
    q: Tensor,
    k: Tensor | Cached,
    v: Tensor | Cached,
    positions: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """What `lqrl.modeling.attention.decode_attention` gives, up to rounding.

    Args:
        q: ``[R, H, D]`` fp32 or bf16, contiguous; row ``i`` belongs to slot ``i``.
        k, v: ``[slots, Hkv, L, D]`` in the dtype of ``q``, or codes of that shape with fp32 scales, one for all or
            ``[slots, Hkv, L, 1]``; elements of a head side by side.
        positions: ``[R]`` int64 on the device, below ``L``: the last key that a row sees.
        scaling: factor of the scores.
        sliding_window: a row sees this many keys, its own included; ``None`` for all.
        tile, splits: instead of what the shapes suggest.

    Returns:
        ``[R, H, Dv]`` in the dtype of ``q``.
    """
    return launch(q, q.shape[1:], k, v, positions, scaling, sliding_window, tile, splits)


def launch(
    q: Tensor,
    shape: tuple[int, int] | torch.Size,
    k: Tensor | Cached,
    v: Tensor | Cached,
    positions: Tensor,
    scaling: float,
    sliding_window: int | None,
    tile: Tile | None,
    splits: int | None,
    new: Sequence[Any] | None = None,
    **constants: int,
) -> Tensor:
    """`attend` for queries of ``shape``: heads and width. With ``new``, `_new_token`'s, ``q`` is a layer's product."""
    (keys, k_scale), (values, v_scale) = _codes(k), _codes(v)
    rows, (heads, width), kv_heads, value_width = len(q), shape, keys.shape[1], values.shape[3]
    out = torch.empty(rows, heads, value_width, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    window, group = sliding_window or _NO_WINDOW, heads // kv_heads
    by_token = k_scale is not None and k_scale.dim() == 4
    bits = 32 if q.dtype == torch.float32 else 8 * keys.element_size()
    kind = tl.float32 if bits == 32 else tl.bfloat16 if k_scale is None else tl.float16
    pairs = kind == tl.float16 and value_width % 2 == 0
    values = values.view(torch.int16) if pairs else values
    tile = tile or tile_of(max(width, value_width), bits)
    programs = kv_heads * tiles(group, ROWS)
    longest = min(keys.shape[2], window)
    splits = splits or splits_of(programs * rows, tiles(longest, tile.keys), multiprocessors(q.device))
    parts = torch.empty(rows * heads * splits if splits > 1 else 0, value_width + 2, device=q.device)
    part, state = parts.flatten().split([parts.shape[0] * value_width, parts.shape[0] * 2])
    scale_strides = k_scale.stride()[:2] if k_scale is not None and by_token else (0, 0)
    value_block = max(16 + 16 * pairs, power_of_two(value_width))
    with torch.cuda.device_of(q):
        _decode[(programs, splits, rows)](
            q, keys, values, k_scale, v_scale, out, part, state, positions, scaling * _LOG2_E, splits, window,
            *keys.stride()[:3], *values.stride()[:3], *scale_strides, new,
            GROUP=group, D=width, DV=value_width, KIND=kind,
            BY_LAYER=k_scale is not None and not by_token, BY_TOKEN=by_token, SPLIT=splits > 1,
            EACH=1 + pairs, BG=ROWS, BN=tile.keys, BD=max(16, power_of_two(width)), BDV=value_block,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
            **{"Q_ROW": 0, "K_ROW": 0, "CODES": 0, **constants},
        )  # fmt: skip
        if splits > 1:
            _join[(heads, rows)](
                part, state, positions, out, splits, window,
                DV=value_width, BF16=q.dtype == torch.bfloat16, S=power_of_two(splits), BN=tile.keys,
                BDV=value_block, num_warps=4 if splits > 8 else 1,
            )  # fmt: skip
    return out
