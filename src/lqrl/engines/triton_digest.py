"""`tensor_digest` of many tensors in one pass over their bytes and a few launches."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
# Launches take options of the compiler besides the kernel's parameters; constexpr stands for the number it holds.
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.engines.digest import word_size
from lqrl.quant.triton_use import on_device

_WIDTH = 2**15  # words that share one table of place values, as in `lqrl.engines.digest`
_SECOND = tl.constexpr(2**32)  # as there
_MIX_1 = tl.constexpr(-4658895280553007687)  # of `lqrl.engines.sampling.mix64`
_MIX_2 = tl.constexpr(-7723592293110705685)
_BLOCK = 1024  # words of one program's tile
_ROWS = 64  # blocks of place values that one program walks, so that it computes those once


@triton.jit
def _shift(x, bits: tl.constexpr):
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _mix64(x):
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


@triton.jit
def _digest(
    table_ptr, jobs_ptr, out_ptr, WORD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One job: a column of tiles of one tensor. The table holds each tensor's address, words and place in ``out``."""
    job = jobs_ptr + tl.program_id(0).to(tl.int64) * 3
    row = table_ptr + tl.load(job) * 3
    words_ptr = tl.load(row).to(tl.pointer_type(WORD))
    words = tl.load(row + 1)
    column = tl.load(job + 1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(job + 2)
    place = _mix64(column.to(tl.int64) + 1) | 1
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for step in range(0, ROWS):
        offsets = (block + step) * WIDTH + column
        part = tl.load(words_ptr + offsets, mask=offsets < words, other=0).to(tl.int64)
        mixed = (part ^ ((part >> 32) & 0xFFFFFFFF)) * place
        mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
        total += mixed * (_mix64(block + step + _SECOND) | 1)
    tl.atomic_add(out_ptr + tl.load(row + 2), tl.sum(total, 0), sem="relaxed")


_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@lru_cache(maxsize=64)
def _jobs(words: tuple[int, ...], device: torch.device) -> Tensor:
    """``[J, 3]``: tensor, column of tiles, first block of the columns of all tensors.

    A model's are the same at every refresh; made anew on a busy host they take longer than the digest.
    """
    counts = torch.tensor(words, dtype=torch.int64)
    columns = torch.minimum(counts, torch.tensor(_WIDTH)).add(_BLOCK - 1).div(_BLOCK, rounding_mode="floor")
    bands = counts.add(_WIDTH * _ROWS - 1).div(_WIDTH * _ROWS, rounding_mode="floor")
    jobs = columns * bands
    tensor = torch.arange(len(words)).repeat_interleave(jobs)
    place = torch.arange(int(jobs.sum())) - (jobs.cumsum(0) - jobs)[tensor]
    return torch.stack([tensor, place % columns[tensor], place // columns[tensor] * _ROWS], 1).to(device)


def tensor_digests(tensors: Sequence[Tensor]) -> Tensor:
    """Digests of tensors on one device: int64 ``[T]``, the values of `tensor_digest`."""
    out = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    rows: dict[int, list[tuple[int, int, int]]] = {size: [] for size in _WORDS}
    held = []  # copies that must live until the launches
    for place, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        if not tensor.is_contiguous():
            held.append(tensor := tensor.contiguous())
        size = word_size(tensor)
        if tensor.data_ptr() % size:  # the address of a view may be odd for its words; a copy's is not
            held.append(tensor := tensor.clone())
        rows[size].append((tensor.data_ptr(), tensor.nbytes // size, place))
    with torch.cuda.device_of(out):
        for size, table in rows.items():
            if table:
                jobs = _jobs(tuple(words for _, words, _ in table), out.device)
                _digest[(len(jobs),)](
                    on_device(torch.tensor(table), out.device), jobs, out,
                    WORD=_WORDS[size], WIDTH=_WIDTH, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=4,
                )  # fmt: skip
    return out
