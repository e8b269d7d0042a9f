"""Rows of many matrices quantized together, with the bits of `lqrl.quant.triton_quantize` for each."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.triton_quantize import WIDEST, quantize_row, row_warps
from lqrl.quant.triton_use import on_device, power_of_two, tiles

_MATRICES = 128  # most of one launch
_BUFFER = 2**28  # bytes of codes that live and die together
_NEVER = 2**62  # first row of a matrix that is not there


@triton.jit
def _rows_of_many(
    table_ptr, columns, largest, floor, WORD: tl.constexpr, FP8: tl.constexpr, BF16: tl.constexpr,
    ROUND: tl.constexpr, ALIGNED: tl.constexpr, MATRICES: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One row of several matrices, whose rows are counted on from one to the next.

    The table holds each one's first row; then, of values, codes and scales, the address that row 0 would have, were all
    in one place with it.
    """
    row = tl.program_id(0).to(tl.int64)
    starts = tl.load(table_ptr + tl.arange(0, MATRICES))
    place = table_ptr + MATRICES + tl.sum((starts <= row).to(tl.int32), 0) - 1
    x_ptr = tl.load(place).to(tl.pointer_type(WORD))
    codes_ptr = tl.load(place + MATRICES).to(tl.pointer_type(tl.uint8 if FP8 else tl.int8))
    scale_ptr = tl.load(place + 2 * MATRICES).to(tl.pointer_type(tl.float32))
    quantize_row(
        x_ptr + row * columns, codes_ptr + row * columns, scale_ptr + row, columns, largest, floor,
        FP8, BF16, ROUND, ALIGNED, BLOCK, REST,
    )  # fmt: skip


class _Launch(NamedTuple):
    """Matrices of one width and dtype, contiguous, and where their codes and scales go."""

    weights: list[Tensor]
    made: list[tuple[Tensor, Tensor]]

    def table(self, together: int) -> Iterator[int]:
        """See `_rows_of_many`; as long for few matrices as for ``together``."""
        width, sizes = self.weights[0].shape[1], [len(weight) for weight in self.weights]
        starts, unused = list(accumulate(sizes, initial=0))[:-1], together - len(sizes)
        yield from starts
        yield from [_NEVER] * unused
        for tensors, row in (
            (self.weights, width * self.weights[0].element_size()),
            ([codes for codes, _ in self.made], width),
            ([scale for _, scale in self.made], 4),
        ):
            yield from (x.data_ptr() - start * row for x, start in zip(tensors, starts, strict=True))
            yield from [0] * unused

    def run(
        self, table: Tensor, export_dtype: torch.dtype, largest: float | None, floor: float, widest: int, together: int
    ) -> None:
        """Fill codes and scales; ``table`` is `table` on the device."""
        k, bf16 = self.weights[0].shape[1], self.weights[0].dtype == torch.bfloat16
        rows, block = sum(map(len, self.weights)), min(power_of_two(k), widest)
        inputs = all(w.data_ptr() % 16 == 0 for w in self.weights)
        outputs = all(codes.data_ptr() % 16 == 0 for codes, _ in self.made)
        if rows:
            _rows_of_many[(rows,)](
                table, k, float(largest or 0.0), float(floor),
                WORD=tl.int16 if bf16 else tl.float32, FP8=largest is None, BF16=bf16,
                ROUND=export_dtype == torch.bfloat16, MATRICES=together, ALIGNED=k % 16 == 0 and inputs and outputs,
                BLOCK=block, REST=tiles(k, block) - 1, num_warps=row_warps(block), enable_fp_fusion=False,
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
    places: dict[tuple[int, torch.dtype], list[int]] = {}
    for place, weight in enumerate(weights):
        places.setdefault((weight.shape[1], weight.dtype), []).append(place)
    found: list[tuple[Tensor, Tensor]] = [(w, w) for w in weights]
    launches: list[_Launch] = []
    for group in places.values():
        alike = [weights[place].detach().contiguous() for place in group]
        made = _storage(alike, torch.uint8 if largest is None else torch.int8)
        for place, (codes, scale) in zip(group, made, strict=True):
            found[place] = codes.view(torch.float8_e4m3fn) if largest is None else codes, scale
        cuts = range(0, len(group), together)
        launches += [_Launch(alike[cut : cut + together], made[cut : cut + together]) for cut in cuts]
    if launches:
        rows = array("q")
        for launch in launches:
            rows.extend(launch.table(together))
        # One copy for all: each takes the host as long as some matrices take the GPU.
        tables = on_device(torch.frombuffer(rows, dtype=torch.int64).view(len(launches), -1), weights[0].device)
        with torch.cuda.device_of(tables):
            for launch, table in zip(launches, tables, strict=True):
                launch.run(table, export_dtype, largest, floor, widest, together)
    return found


def _storage(weights: list[Tensor], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Room for codes and scales of matrices of one width, in buffers of at most `_BUFFER` codes or one matrix.

    A model's layers repeat, and what repeats is not parted: matrices that are multiplied as one lie in one buffer.
    """
    width, device, batches, room = weights[0].shape[1], weights[0].device, [], 0
    sizes = [len(weight) for weight in weights]
    together = _period(sizes)
    if sum(sizes[:together]) * width > _BUFFER:
        together = 1
    for place in range(0, len(sizes), together):
        some = sizes[place : place + together]
        if not batches or room < sum(some) * width:
            batches.append([])
            room = _BUFFER
        batches[-1] += some
        room -= sum(some) * width
    made: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        codes = torch.empty(sum(batch), width, dtype=dtype, device=device)
        scale = torch.empty(sum(batch), 1, dtype=torch.float32, device=device)
        made += zip(codes.split(batch), scale.split(batch), strict=True)
    return made


def _period(sizes: Sequence[int]) -> int:
    """The least number of ``sizes``, at least 1, that the others repeat; the last may be another: an output head."""
    for some in (sizes, sizes[:-1]):
        found = next((n for n in range(1, len(some)) if some[n:] == some[:-n]), len(some))
        if 0 < 2 * found <= len(some):
            return found
    return max(1, len(sizes))
