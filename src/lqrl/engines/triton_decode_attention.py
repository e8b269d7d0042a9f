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
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

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
_ROWS = 16  # of a tile of query heads: the least that tensor cores take
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
def _share(positions_ptr, row, split, splits, window, BN: tl.constexpr):
    """First key of a program's part, and the end of it."""
    length = tl.load(positions_ptr + row).to(tl.int32) + 1
    start = tl.maximum(length - window, 0)
    part = tl.cdiv(tl.cdiv(length - start, BN), splits) * BN
    first = start + split * part
    return first, tl.minimum(first + part, length)


@triton.jit
def _query(
    pointers, exists, unit, D: tl.constexpr, KIND: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Queries as the product takes them, and what turns each row's products into scores."""
    width = tl.arange(0, BD)
    q = tl.load(pointers + width[None, :], mask=exists[:, None] & (width < D)[None, :], other=0.0)
    unit = tl.full((BG,), 1.0, tl.float32) * unit
    if tl.float16 == KIND:
        wide = q.to(tl.float32)
        power = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
        q = wide * (0x7F000000 - power).to(tl.float32, bitcast=True)[:, None]  # below 2
        unit *= power.to(tl.float32, bitcast=True)
    return q.to(tl.float32) if EMULATED else q.to(KIND), unit


@triton.jit(do_not_specialize=["splits", "window", "scale_slot", "scale_head"])
def _decode(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, part_ptr, state_ptr, positions_ptr, scale, splits, window,
    k_slot, k_head, k_token, v_slot, v_head, v_token, scale_slot, scale_head,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KIND: tl.constexpr,
    BY_LAYER: tl.constexpr, BY_TOKEN: tl.constexpr, SPLIT: tl.constexpr, EACH: tl.constexpr,
    BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """``BY_LAYER``: one scale for all keys, one for all values. ``BY_TOKEN``: a scale for each token and head.

    ``EACH``: values in an element of ``v_ptr``, 2 if it holds pairs of codes.
    """
    next_may_begin()
    split, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group_tiles: tl.constexpr = (GROUP + BG - 1) // BG
    head, group = tl.program_id(0) // group_tiles, tl.program_id(0) % group_tiles * BG + tl.arange(0, BG)
    first, end = _share(positions_ptr, row, split, splits, window, BN)
    if first >= end:
        return
    width, value_width, column = tl.arange(0, BD), tl.arange(0, BDV), tl.arange(0, BDV // EACH)
    own = (row * (tl.num_programs(0) // group_tiles) + head) * GROUP + group
    unit = scale * tl.load(k_scale_ptr) if BY_LAYER else scale
    q, unit = _query(q_ptr + own[:, None] * D, group < GROUP, unit, D, KIND, BG, BD)
    k_ptr += row * k_slot + head * k_head
    v_ptr += row * v_slot + head * v_head
    scale_at = row * scale_slot + head * scale_head
    largest = tl.full((BG,), float("-inf"), tl.float32)
    totals = tl.zeros((BG, BN), tl.float32)  # added up after the loop: a sum over keys waits for all warps
    acc, odd = tl.zeros((BG, BDV // EACH), tl.float32), tl.zeros((BG, BDV // EACH), tl.float32)
    for block in range(first, end, BN):
        key = block + tl.arange(0, BN)
        live = key < end
        seen = live[:, None] if BD == D else live[:, None] & (width < D)[None, :]
        k = tl.load(k_ptr + key[:, None] * k_token + width[None, :], mask=seen, other=0.0)
        seen = live[:, None] if BDV == DV else live[:, None] & (column < DV // EACH)[None, :]
        v = tl.load(v_ptr + key[:, None] * v_token + column[None, :], mask=seen, other=0.0)
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
    exists, mask = group < GROUP, (group < GROUP)[:, None] & (value_width < DV)[None, :]
    if SPLIT:
        own = own * splits + split
        tl.store(state_ptr + own * 2, largest, mask=exists)
        tl.store(state_ptr + own * 2 + 1, total, mask=exists)
    else:
        acc /= total[:, None]
    pointers = (part_ptr if SPLIT else out_ptr) + own[:, None] * DV + value_width[None, :]
    tl.store(pointers, acc if SPLIT or tl.float32 == KIND else to_bf16(acc), mask=mask)


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
    first, end = _share(positions_ptr, row, split, splits, window, BN)
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
    (keys, k_scale), (values, v_scale) = _codes(k), _codes(v)
    (rows, heads, width), kv_heads, value_width = q.shape, keys.shape[1], values.shape[3]
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
    programs = kv_heads * tiles(group, _ROWS)
    longest = min(keys.shape[2], window)
    splits = splits or splits_of(programs * rows, tiles(longest, tile.keys), multiprocessors(q.device))
    parts = torch.empty(rows * heads * splits if splits > 1 else 0, value_width + 2, device=q.device)
    part, state = parts.flatten().split([parts.shape[0] * value_width, parts.shape[0] * 2])
    scale_strides = k_scale.stride()[:2] if k_scale is not None and by_token else (0, 0)
    value_block = max(16 + 16 * pairs, power_of_two(value_width))
    with torch.cuda.device_of(q):
        _decode[(programs, splits, rows)](
            q, keys, values, k_scale, v_scale, out, part, state, positions, scaling * _LOG2_E, splits, window,
            *keys.stride()[:3], *values.stride()[:3], *scale_strides,
            GROUP=group, D=width, DV=value_width, KIND=kind,
            BY_LAYER=k_scale is not None and not by_token, BY_TOKEN=by_token, SPLIT=splits > 1,
            EACH=1 + pairs, BG=_ROWS, BN=tile.keys, BD=max(16, power_of_two(width)), BDV=value_block,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        if splits > 1:
            _join[(heads, rows)](
                part, state, positions, out, splits, window,
                DV=value_width, BF16=q.dtype == torch.bfloat16, S=power_of_two(splits), BN=tile.keys,
                BDV=value_block, num_warps=4 if splits > 8 else 1,
            )  # fmt: skip
    return out
