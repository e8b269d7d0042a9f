"""The attention of exact mode on CUDA: prefill, full forward and decoding run one kernel with one tile.

A row of the tile is a query of one head; the queries of all heads that share a key head follow each other, so decoding
fills the tile with the heads of one token. A row meets the keys in blocks counted from its sequence's first key, one
after the other, whichever rows lie beside it. A block that a row does not see adds zeros to its sums, times a factor of
1. Operands should be finite: zero times NaN would reach rows that do not see that value.

Keys and values of a low-bit cache are read as codes. Each becomes ``code * scale`` in fp32, rounded once to the dtype
of the queries, before anything else is done with it: the bits are those of values that were dequantized before.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.kv import Cached
from lqrl.quant.triton_casts import EMULATED, from_e4m3, opaque, rounded_to_bf16, to_bf16
from lqrl.quant.triton_use import TENSOR_CORES_FP8, power_of_two, tiles, use_triton

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
def _read(ptr, scale_ptr, scale_at, key, token, scale_token, exists, within, BF16: tl.constexpr):
    """A block of keys or values, made of codes where they have scales; 0 where they do not exist."""
    x = tl.load(ptr + key[:, None] * token, mask=exists[:, None] & within, other=0.0)
    if scale_ptr is not None:
        x = from_e4m3(x) if x.dtype == tl.uint8 else x.to(tl.float32)
        x *= tl.load(scale_ptr + scale_at + key * scale_token, mask=exists, other=0.0)[:, None]
        x = opaque(to_bf16(x)) if BF16 else x
    return x


@triton.jit(do_not_specialize=["k_scale_base", "k_scale_head", "v_scale_base", "v_scale_head"])
def _attend(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, table_ptr, sequences, scale,
    q_token, q_head, k_base, k_token, k_head, v_base, v_token, v_head,
    k_scale_base, k_scale_token, k_scale_head, v_scale_base, v_scale_token, v_scale_head,
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
    k_scale_at = base * k_scale_base + head.to(tl.int64) * k_scale_head
    v_scale_at = base * v_scale_base + head.to(tl.int64) * v_scale_head
    end = first + tl.minimum((tile * BM + BM - 1) // GROUP, queries - 1) + 1
    start = 0
    if WINDOW:
        start = tl.maximum(first + tile * BM // GROUP - WINDOW + 1, 0) // BN * BN
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BDV), tl.float32)
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
    out = acc / total[:, None]
    out_ptr += (token * (tl.num_programs(1) * GROUP) + own)[:, None] * DV + value_width[None, :]
    tl.store(out_ptr, to_bf16(out) if BF16 else out, mask=live[:, None] & in_value)


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


def attention(
    q: Tensor,
    k: Tensor | Cached,
    v: Tensor | Cached,
    table: Tensor,
    longest: int,
    scaling: float,
    sliding_window: int | None,
) -> Tensor:
    """`lqrl.quant.exact.attention` of checked tensors.

    Args:
        q: ``[N, H, D]``.
        k, v: ``[tokens, Hkv, D]`` or ``[slots, Hkv, L, D]``, or codes of that shape with their scales.
        table: ``[4, S]`` int64, contiguous, see `lqrl.quant.exact.Sequences`.
        longest: most queries of a sequence.
        scaling: factor of the scores.
        sliding_window: keys that a query sees, or ``None``.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    (keys, k_scale, k_strides), (values, v_scale, v_strides) = _operand(k), _operand(v)
    (n, heads, width), value_width, kv_heads, sequences = q.shape, values.shape[-1], keys.shape[1], table.shape[1]
    out = torch.empty(n, heads, value_width, dtype=q.dtype, device=q.device)
    if not n or not sequences:
        return out
    group = heads // kv_heads
    tile = FP32_TILE if q.dtype == torch.float32 else TILE
    with torch.cuda.device_of(q):
        _attend[(tiles(longest * group, tile.rows), kv_heads, sequences)](
            q, keys, values, k_scale, v_scale, out, table, sequences, scaling * _LOG2_E,
            q.stride(0), q.stride(1), *k_strides[:3], *v_strides[:3], *k_strides[3:], *v_strides[3:],
            GROUP=group, D=width, DV=value_width, WINDOW=sliding_window or 0, BF16=q.dtype == torch.bfloat16,
            BM=tile.rows, BN=tile.keys, BD=max(16, power_of_two(width)), BDV=max(16, power_of_two(value_width)),
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=q.dtype == torch.float32,
        )  # fmt: skip
    return out
