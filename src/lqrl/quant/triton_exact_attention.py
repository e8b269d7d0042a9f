"""The attention of exact mode on CUDA: prefill, full forward and decoding run one kernel with one tile.

A row of the tile is a query of one head; the queries of all heads that share a key head follow each other, so decoding
fills the tile with the heads of one token. A row meets the keys in blocks counted from its sequence's first key, one
after the other, whichever rows lie beside it. A block that a row does not see adds zeros to its sums, times a factor of
1. Operands should be finite: zero times NaN would reach rows that do not see that value.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.triton_casts import EMULATED, rounded_to_bf16, to_bf16
from lqrl.quant.triton_use import power_of_two, tiles

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


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, sequences, scale,
    q_token, q_head, k_base, k_token, k_head, v_base, v_token, v_head,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, BF16: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    q_ptr += (token * q_token + own * q_head)[:, None] + width[None, :]
    q = tl.load(q_ptr, mask=live[:, None] & in_width, other=0.0)
    k_ptr += base * k_base + head.to(tl.int64) * k_head + width[None, :]
    v_ptr += base * v_base + head.to(tl.int64) * v_head + value_width[None, :]
    end = first + tl.minimum((tile * BM + BM - 1) // GROUP, queries - 1) + 1
    start = 0
    if WINDOW:
        start = tl.maximum(first + tile * BM // GROUP - WINDOW + 1, 0) // BN * BN
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BDV), tl.float32)
    for block in range(start, end, BN):
        keys = block + tl.arange(0, BN)
        exists, key = (keys < end)[:, None], keys.to(tl.int64)[:, None]
        k = tl.load(k_ptr + key * k_token, mask=exists & in_width, other=0.0)
        v = tl.load(v_ptr + key * v_token, mask=exists & in_value, other=0.0)
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
    out = acc / total[:, None]
    out_ptr += (token * (tl.num_programs(1) * GROUP) + own)[:, None] * DV + value_width[None, :]
    tl.store(out_ptr, to_bf16(out) if BF16 else out, mask=live[:, None] & in_value)


def attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, longest: int, scaling: float, sliding_window: int | None
) -> Tensor:
    """`lqrl.quant.exact.attention` of checked tensors, ``D`` contiguous.

    Args:
        q: ``[N, H, D]``.
        k, v: ``[tokens, Hkv, D]`` or ``[slots, Hkv, L, D]``.
        table: ``[4, S]`` int64, contiguous, see `lqrl.quant.exact.Sequences`.
        longest: most queries of a sequence.
        scaling: factor of the scores.
        sliding_window: keys that a query sees, or ``None``.
    """
    (n, heads, width), value_width, kv_heads, sequences = q.shape, v.shape[-1], k.shape[1], table.shape[1]
    out = torch.empty(n, heads, value_width, dtype=q.dtype, device=q.device)
    if not n or not sequences:
        return out
    token, group = 0 if k.dim() == 3 else 2, heads // kv_heads
    tile = FP32_TILE if q.dtype == torch.float32 else TILE
    with torch.cuda.device_of(q):
        _attend[(tiles(longest * group, tile.rows), kv_heads, sequences)](
            q, k, v, out, table, sequences, scaling * _LOG2_E,
            q.stride(0), q.stride(1), k.stride(0), k.stride(token), k.stride(1),
            v.stride(0), v.stride(token), v.stride(1),
            GROUP=group, D=width, DV=value_width, WINDOW=sliding_window or 0, BF16=q.dtype == torch.bfloat16,
            BM=tile.rows, BN=tile.keys, BD=max(16, power_of_two(width)), BDV=max(16, power_of_two(value_width)),
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=q.dtype == torch.float32,
        )  # fmt: skip
    return out
