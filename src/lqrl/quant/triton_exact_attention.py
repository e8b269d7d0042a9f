"""The attention of exact mode on CUDA: prefill, full forward and decoding run one kernel with one tile.

A row of the tile is a query of one head; the queries of all heads that share a key head follow each other, so decoding
fills the tile with the heads of one token, and each key is read once for all of them. A row meets the keys in blocks
counted from its sequence's first key, one after the other, whichever rows lie beside it. A block that a row does not
see adds zeros to its sums, times a factor of 1. Operands should be finite: zero times NaN would reach rows that do not
see that value.

Sums begin anew with every `PART` keys, counted in the same way, and are joined in order. So a few long sequences can be
decoded by one program a part, with the bits that one program for all parts gives.

Keys and values of a low-bit cache are read as codes. Each becomes ``code * scale`` in fp32, rounded once to the dtype
of the queries, before anything else is done with it: the bits are those of values that were dequantized before.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Launches take options of the compiler besides the kernel's parameters; a call inside a kernel looks as if it never
# returned.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.exact import Sequences
from lqrl.quant.kv import Cached
from lqrl.quant.triton_casts import EMULATED, from_e4m3, opaque, rounded_to_bf16, to_bf16
from lqrl.quant.triton_use import (
    TENSOR_CORES_FP8,
    multiprocessors,
    power_of_two,
    shared_memory,
    tiles,
    use_triton,
)

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """How a sequence is cut: the same for every call, whatever it holds.

    Attributes:
        rows: queries, 64 or more so that Hopper's tensor cores take them with one instruction.
        keys: of a block; another number is another order of summation.
        warps, stages: of a program, and of its pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


TILE = Tile(64, 64, 4, 2)
FP32_TILE = Tile(16, 32, 4, 1)  # outside the tensor cores
PART = 1024
"""Keys whose sums begin anew, a multiple of every tile's; another number is another order of summation."""
_DECODE_STAGES = 3  # of one query a sequence, 8 to 14 % faster than 2 on an H200, where shared memory holds them
_DECODE_SHARED = 160 * 1024
_PER_SM = 2  # programs that a multiprocessor runs at a time
_WHOLE, _THROUGH, _SPLIT = (tl.constexpr(way) for way in range(3))


@triton.jit
def _read(ptr, scale_ptr, scale_at, key, token, scale_token, exists, within, BF16: tl.constexpr):
    """A block of keys or values, made of codes where they have scales; 0 where they do not exist."""
    x = tl.load(ptr + key[:, None] * token, mask=exists[:, None] & within, other=0.0)
    if scale_ptr is not None:
        x = from_e4m3(x) if x.dtype == tl.uint8 else x.to(tl.float32)
        x *= tl.load(scale_ptr + scale_at + key * scale_token, mask=exists, other=0.0)[:, None]
        x = opaque(to_bf16(x)) if BF16 else x
    return x


@triton.jit
def _no_keys(BM: tl.constexpr, BDV: tl.constexpr):
    """What `_part` gives of no keys."""
    return tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, BDV), tl.float32)


@triton.jit
def _part(
    q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_scale_at, v_scale_at, start, end, seen_to, scale,
    k_token, v_token, k_scale_token, v_scale_token, in_width, in_value,
    WINDOW: tl.constexpr, BF16: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighted sum of values over the keys from ``start`` to ``end``."""
    largest, total, acc = _no_keys(BM, BDV)
    for block in range(start, end, BN):
        keys = block + tl.arange(0, BN)
        exists, key = keys < end, keys.to(tl.int64)
        k = _read(k_ptr, k_scale_ptr, k_scale_at, key, k_token, k_scale_token, exists, in_width, BF16)
        v = _read(v_ptr, v_scale_ptr, v_scale_at, key, v_token, v_scale_token, exists, in_value, BF16)
        sees = keys[None, :] <= seen_to[:, None]
        if WINDOW:
            sees = sees & (keys[None, :] > seen_to[:, None] - WINDOW)
        if EMULATED:  # the interpreter has no bf16 products
            k, v = k.to(tl.float32), v.to(tl.float32)
            scores = tl.dot(q.to(tl.float32), k.T, input_precision="ieee")
        else:
            scores = tl.dot(q, k.T, input_precision="ieee")
        scores = tl.where(sees, scores * scale, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        weights = tl.math.exp2(scores - shift[:, None])
        fade = tl.math.exp2(largest - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        if BF16:
            weights = rounded_to_bf16(weights) if EMULATED else to_bf16(weights)
        acc = tl.dot(weights, v, acc, input_precision="ieee")
        largest = higher
    return largest, total, acc


@triton.jit
def _joined(largest, total, acc, part_largest, part_total, part_acc):
    """The same of the keys so far and of a later part; joined to no keys, a part is what it was.

    The fused multiply-adds are spelled out: two kernels could choose others.
    """
    higher = tl.maximum(largest, part_largest)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    fade, part_fade = tl.math.exp2(largest - shift), tl.math.exp2(part_largest - shift)
    total = tl.fma(part_total, part_fade, total * fade)
    acc = tl.fma(part_acc, tl.broadcast_to(part_fade[:, None], acc.shape), acc * fade[:, None])
    return higher, total, acc


@triton.jit(do_not_specialize=["parts", "k_scale_base", "k_scale_head", "v_scale_base", "v_scale_head"])
def _attend(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, state_ptr, table_ptr, sequences, parts, scale,
    q_token, q_head, k_base, k_token, k_head, v_base, v_token, v_head,
    k_scale_base, k_scale_token, k_scale_head, v_scale_base, v_scale_token, v_scale_head,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, BF16: tl.constexpr,
    WAY: tl.constexpr, PART: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """``WAY``: all keys lie in one part, a program goes through the parts, or it leaves the sums of one for `_join`."""
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile, split = (tile // parts, tile % parts) if WAY == _SPLIT else (tile, 0)
    queries = tl.load(table_ptr + sequences + sequence).to(tl.int32)
    if tile * BM >= queries * GROUP:
        return
    row = tl.load(table_ptr + sequence)
    base = tl.load(table_ptr + 2 * sequences + sequence)
    first = tl.load(table_ptr + 3 * sequences + sequence).to(tl.int32)
    place = tile * BM + tl.arange(0, BM)
    query = place // GROUP
    token, own = row + query, (head * GROUP + place % GROUP).to(tl.int64)
    live, seen_to = place < queries * GROUP, first + query
    width, value_width = tl.arange(0, BD), tl.arange(0, BDV)
    in_width, in_value = (width < D)[None, :], (value_width < DV)[None, :]
    end = first + tl.minimum((tile * BM + BM - 1) // GROUP, queries - 1) + 1
    start = tl.maximum(first + tile * BM // GROUP - WINDOW + 1, 0) // BN * BN if WINDOW else 0
    if WAY == _SPLIT:
        start, end = tl.maximum(split * PART, start), tl.minimum(split * PART + PART, end)
        if start >= end:
            return
    q_ptr += (token * q_token + own * q_head)[:, None] + width[None, :]
    q = tl.load(q_ptr, mask=live[:, None] & in_width, other=0.0)
    k_ptr += base * k_base + head.to(tl.int64) * k_head + width[None, :]
    v_ptr += base * v_base + head.to(tl.int64) * v_head + value_width[None, :]
    k_scale_at = base * k_scale_base + head.to(tl.int64) * k_scale_head
    v_scale_at = base * v_scale_base + head.to(tl.int64) * v_scale_head
    own = token * (tl.num_programs(1) * GROUP) + own
    if WAY == _THROUGH:
        largest, total, acc = _no_keys(BM, BDV)
        for part in range(start // PART * PART, end, PART):
            part_largest, part_total, part_acc = _part(
                q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_scale_at, v_scale_at, tl.maximum(part, start),
                tl.minimum(part + PART, end), seen_to, scale, k_token, v_token, k_scale_token, v_scale_token,
                in_width, in_value, WINDOW, BF16, BM, BN, BDV,
            )  # fmt: skip
            largest, total, acc = _joined(largest, total, acc, part_largest, part_total, part_acc)
    else:
        largest, total, acc = _part(
            q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_scale_at, v_scale_at, start, end, seen_to, scale,
            k_token, v_token, k_scale_token, v_scale_token, in_width, in_value, WINDOW, BF16, BM, BN, BDV,
        )  # fmt: skip
    mask = live[:, None] & in_value
    if WAY == _SPLIT:
        own = own * parts + split
        tl.store(out_ptr + own[:, None] * DV + value_width[None, :], acc, mask=mask)
        tl.store(state_ptr + own * 2, largest, mask=live)
        tl.store(state_ptr + own * 2 + 1, total, mask=live)
    else:
        out = acc / total[:, None]
        tl.store(out_ptr + own[:, None] * DV + value_width[None, :], to_bf16(out) if BF16 else out, mask=mask)


@triton.jit(do_not_specialize=["parts"])
def _join(
    part_ptr, state_ptr, out_ptr, table_ptr, sequences, parts,
    DV: tl.constexpr, WINDOW: tl.constexpr, BF16: tl.constexpr, PART: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """One head of the single query of a sequence, from its parts."""
    sequence = tl.program_id(1)
    if tl.load(table_ptr + sequences + sequence) == 0:
        return
    row = tl.load(table_ptr + sequence)
    first = tl.load(table_ptr + 3 * sequences + sequence).to(tl.int32)
    own = row * tl.num_programs(0) + tl.program_id(0)
    one, width = tl.arange(0, 1), tl.arange(0, BDV)[None, :]
    largest, total, acc = _no_keys(1, BDV)
    start = tl.maximum(first - WINDOW + 1, 0) // PART if WINDOW else 0
    for part in range(start, first // PART + 1):
        place = own * parts + part + one
        part_acc = tl.load(part_ptr + place[:, None] * DV + width, mask=width < DV, other=0.0)
        part_largest, part_total = tl.load(state_ptr + place * 2), tl.load(state_ptr + place * 2 + 1)
        largest, total, acc = _joined(largest, total, acc, part_largest, part_total, part_acc)
    out = acc / total[:, None]
    tl.store(out_ptr + own * DV + width, to_bf16(out) if BF16 else out, mask=width < DV)


def _operand(x: Tensor | Cached) -> tuple[Tensor, Tensor | None, list[int]]:
    """Numbers or codes as the kernel reads them, the scales of codes, and the strides of both: base, token, head."""
    values, scale = (x, None) if isinstance(x, Tensor) else x
    values = values if values.stride(-1) == 1 else values.contiguous()
    order = (0, 0, 1) if values.dim() == 3 else (0, 2, 1)
    strides = [values.stride(i) for i in order]
    if scale is None:
        return values, None, [*strides, 0, 0, 0]
    scale = scale.expand(*values.shape[:-1], 1)
    if values.dtype == torch.float8_e4m3fn and not use_triton(values, TENSOR_CORES_FP8):
        values = values.view(torch.uint8)  # no instruction converts them
    return values, scale, [*strides, *(scale.stride(i) for i in order)]


def _stages(tile: Tile, longest: int, device: torch.device) -> int:
    if longest == 1 and tile.stages > 1 and shared_memory(device) >= _DECODE_SHARED:
        return _DECODE_STAGES
    return tile.stages


def _way(split: bool | None, programs: int, parts: int, longest: int, device: torch.device) -> int:
    """Parts to programs of their own only where there are not enough programs else, and one query a sequence."""
    if parts == 1:
        return _WHOLE.value
    if split is None:
        split = longest == 1 and programs < _PER_SM * multiprocessors(device)
    return (_SPLIT if split else _THROUGH).value


def attention(
    q: Tensor,
    k: Tensor | Cached,
    v: Tensor | Cached,
    sequences: Sequences,
    scaling: float,
    sliding_window: int | None,
    *,
    part: int = PART,
    split: bool | None = None,
    stages: int | None = None,
) -> Tensor:
    """`lqrl.quant.exact.attention` of checked tensors.

    Args:
        q: ``[N, H, D]``.
        k, v: ``[tokens, Hkv, D]`` or ``[slots, Hkv, L, D]``, or codes of that shape with their scales.
        sequences: see there.
        scaling: factor of the scores.
        sliding_window: keys that a query sees, or ``None``.
        part: instead of `PART`, a multiple of the tile's keys; it changes the order of summation.
        split: a program for each part, or one for all; without, what the shapes suggest. It changes no bit. Only one
            query a sequence can be split.
        stages: of the pipeline, instead of the tile's; they change no bit.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    (keys, k_scale, k_strides), (values, v_scale, v_strides) = _operand(k), _operand(v)
    (n, heads, width), value_width, kv_heads, count = q.shape, values.shape[-1], keys.shape[1], len(sequences.table[0])
    out = torch.empty(n, heads, value_width, dtype=q.dtype, device=q.device)
    if not n or not count:
        return out
    group, bf16, window = heads // kv_heads, q.dtype == torch.bfloat16, sliding_window or 0
    tile = TILE if bf16 else FP32_TILE
    most = keys.shape[2] if keys.dim() == 4 else len(keys)
    parts = tiles(most if sequences.keys is None else min(most, sequences.keys), part)
    row_tiles, value_block = tiles(sequences.longest * group, tile.rows), max(16, power_of_two(value_width))
    stages = stages or _stages(tile, sequences.longest, q.device)
    way = _way(split, row_tiles * kv_heads * count, parts, sequences.longest, q.device)
    sums, state = out, out
    if way == _SPLIT.value:
        sums = torch.empty(n, heads, parts, value_width, dtype=torch.float32, device=q.device)
        state = torch.empty(n, heads, parts, 2, dtype=torch.float32, device=q.device)
        row_tiles *= parts
    with torch.cuda.device_of(q):
        _attend[(row_tiles, kv_heads, count)](
            q, keys, values, k_scale, v_scale, sums, state, sequences.table, count, parts, scaling * _LOG2_E,
            q.stride(0), q.stride(1), *k_strides[:3], *v_strides[:3], *k_strides[3:], *v_strides[3:],
            GROUP=group, D=width, DV=value_width, WINDOW=window, BF16=bf16, WAY=way, PART=part,
            BM=tile.rows, BN=tile.keys, BD=max(16, power_of_two(width)), BDV=value_block,
            num_warps=tile.warps, num_stages=stages, enable_fp_fusion=not bf16,
        )  # fmt: skip
        if way == _SPLIT.value:
            _join[(heads, count)](
                sums, state, out, sequences.table, count, parts, DV=value_width, WINDOW=window, BF16=bf16, PART=part,
                BDV=value_block, num_warps=1, enable_fp_fusion=not bf16,
            )  # fmt: skip
    return out
