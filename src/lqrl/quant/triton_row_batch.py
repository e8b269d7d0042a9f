"""Rows of many matrices quantized together, with the bits of `lqrl.quant.triton_quantize` for each."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.triton_quantize import WIDEST, quantize_row, row_warps
from lqrl.quant.triton_use import on_device, power_of_two, tiles

_MATRICES = 64  # most of one launch
_BUFFER = 2**28  # bytes of codes that live and die together
_NEVER = 2**62  # first row of a matrix that is not there


@triton.jit
def _rows_of_many(
    table_ptr, codes_ptr, scale_ptr, columns, largest, floor, WORD: tl.constexpr, FP8: tl.constexpr,
    BF16: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr, MATRICES: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One row of several matrices, whose rows are counted on from one to the next.

    The table holds each one's first row; then the address that row 0 would have, were all in one place with it.
    """
    row = tl.program_id(0).to(tl.int64)
    starts = tl.load(table_ptr + tl.arange(0, MATRICES))
    matrix = tl.sum((starts <= row).to(tl.int32), 0) - 1
    x_ptr = tl.load(table_ptr + MATRICES + matrix).to(tl.pointer_type(WORD))
    quantize_row(
        x_ptr + row * columns, codes_ptr + row * columns, scale_ptr + row, columns, largest, floor,
        FP8, BF16, ROUND, ALIGNED, BLOCK, REST,
    )  # fmt: skip


def quantize_many(
    weights: Sequence[Tensor],
    export_dtype: torch.dtype,
    largest: float | None,
    floor: float,
    widest: int = WIDEST,
    together: int = _MATRICES,
) -> list[tuple[Tensor, Tensor]]:
    """`quantize_int8_rows` or `quantize_fp8_rows` of each, rounded to ``export_dtype`` first, in few launches.

    The results of matrices of one width are parts of common buffers of at most `_BUFFER` bytes, or one matrix.

    Args:
        weights: matrices ``[N, K]`` fp32 or bf16 on one device, K at least 1.
        export_dtype: fp32 or bf16.
        largest: largest int8 code; ``None`` for fp8.
        floor: smallest amax, or smallest scale of fp8.
        widest: longest row that is kept in registers, a power of two.
        together: most matrices of one launch, a power of two.

    Returns:
        Codes ``[N, K]`` and scales ``[N, 1]`` fp32 of each.
    """
    found: list[tuple[Tensor, Tensor]] = [(w, w) for w in weights]
    groups: dict[tuple[int, torch.dtype], list[list[int]]] = {}
    room: dict[tuple[int, torch.dtype], int] = {}
    for place, weight in enumerate(weights):
        key = weight.shape[1], weight.dtype
        batches = groups.setdefault(key, [])
        if not batches or len(batches[-1]) == together or room[key] < weight.numel():
            batches.append([])
            room[key] = _BUFFER
        batches[-1].append(place)
        room[key] -= weight.numel()
    for batches in groups.values():
        for places in batches:
            made = _batch([weights[place] for place in places], export_dtype, largest, floor, widest, together)
            for place, result in zip(places, made, strict=True):
                found[place] = result
    return found


def _batch(
    weights: list[Tensor], export_dtype: torch.dtype, largest: float | None, floor: float, widest: int, together: int
) -> list[tuple[Tensor, Tensor]]:
    first, sizes = weights[0], [len(weight) for weight in weights]
    k, rows, bf16 = first.shape[1], sum(sizes), first.dtype == torch.bfloat16
    weights = [w.detach() if w.is_contiguous() else w.detach().contiguous() for w in weights]
    codes = torch.empty(rows, k, dtype=torch.uint8 if largest is None else torch.int8, device=first.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=first.device)
    starts = list(accumulate(sizes, initial=0))[:-1]
    width = k * first.element_size()
    origins = [w.data_ptr() - start * width for w, start in zip(weights, starts, strict=True)]
    unused = [0] * (together - len(weights))
    table = torch.tensor([*starts, *(_NEVER for _ in unused), *origins, *unused], dtype=torch.int64)
    block = min(power_of_two(k), widest)
    if rows:
        with torch.cuda.device_of(first):
            _rows_of_many[(rows,)](
                on_device(table, first.device), codes, scale, k, float(largest or 0.0), float(floor),
                WORD=tl.int16 if bf16 else tl.float32, FP8=largest is None, BF16=bf16,
                ROUND=export_dtype == torch.bfloat16, MATRICES=together,
                ALIGNED=width % 16 == 0 and all(w.data_ptr() % 16 == 0 for w in weights),
                BLOCK=block, REST=tiles(k, block) - 1, num_warps=row_warps(block), enable_fp_fusion=False,
            )  # fmt: skip
    codes = codes.view(torch.float8_e4m3fn) if largest is None else codes
    return list(zip(codes.split(sizes), scale.split(sizes), strict=True))
