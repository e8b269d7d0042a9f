"""Log-softmax and the draw of a token in exact mode on CUDA, with integer sums, which have no order.

The weight of a token is ``exp(logit - largest)`` in fp32, at most 1, in units of ``2**-45`` and cut off below. The sum
of 2**18 - 1 of the largest weights fits 63 bits; what is cut off adds up to less than ``V * 2**-45``.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.exact import tempered
from lqrl.quant.triton_use import power_of_two, tiles

UNIT_BITS = 45
MAX_VOCABULARY = 2 ** (63 - UNIT_BITS) - 1
_UNIT = tl.constexpr(2.0**UNIT_BITS)
_BLOCK = 1024  # tokens whose weights are added before the draw looks inside


@dataclass(frozen=True)
class Weights:
    """What a draw from each row needs.

    Attributes:
        logits: fp32 ``[N, V]``, before the temperature.
        temperature: divides them.
        largest: fp32 ``[N]``, of the tempered logits.
        sums: int64 ``[N, blocks]``, weights of neighboring tokens added.
    """

    logits: Tensor
    temperature: float
    largest: Tensor
    sums: Tensor

    def log_total(self) -> Tensor:
        """Log of the sum of a row's weights, float64 ``[N]``."""
        return self.sums.sum(1).double().mul_(2.0**-UNIT_BITS).log_()


@triton.jit
def _units(logits_ptr, largest_ptr, row, block, vocabulary, temperature, TEMPERED: tl.constexpr, BLOCK: tl.constexpr):
    """int64 weights of one block of one row; 0 beyond the vocabulary."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + row * vocabulary + column, mask=column < vocabulary, other=float("-inf"))
    if TEMPERED:
        logit = tl.math.div_rn(logit, temperature)
    return (tl.exp(logit - tl.load(largest_ptr + row)) * _UNIT).to(tl.int64)


@triton.jit
def _sum_blocks(
    logits_ptr, largest_ptr, sums_ptr, vocabulary, temperature, TEMPERED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    units = _units(logits_ptr, largest_ptr, row, block, vocabulary, temperature, TEMPERED, BLOCK)
    tl.store(sums_ptr + row * tl.num_programs(1) + block, tl.sum(units, 0))


@triton.jit
def _draw(
    logits_ptr, largest_ptr, sums_ptr, uniform_ptr, tokens_ptr, vocabulary, blocks, temperature,
    TEMPERED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulative weight is above ``uniform * total``: first its block, then inside."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    sums = tl.load(sums_ptr + row * blocks + index, mask=index < blocks, other=0)
    total = tl.sum(sums, 0)
    target = (tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    block = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    block = tl.minimum(block, blocks - 1)  # NaN logits; the engine reports their log-probs
    target -= tl.sum(tl.where(index < block, sums, 0), 0)
    units = _units(logits_ptr, largest_ptr, row, block, vocabulary, temperature, TEMPERED, BLOCK)
    token = block * BLOCK + tl.sum((tl.cumsum(units, 0) <= target).to(tl.int32), 0)
    tl.store(tokens_ptr + row, tl.minimum(token, vocabulary - 1).to(tl.int64))


def weigh(logits: Tensor, temperature: float) -> Weights:
    """The weights of each row of contiguous fp32 logits ``[N, V]``.

    Raises:
        NotImplementedError: for a vocabulary whose sums would not fit 63 bits.
    """
    rows, vocabulary = logits.shape
    if vocabulary > MAX_VOCABULARY:
        raise NotImplementedError(
            f"exact mode on CUDA adds weights of at most {MAX_VOCABULARY} tokens, got a vocabulary of {vocabulary}; "
            "set exact to false"
        )
    largest = tempered(logits.amax(1), temperature)
    sums = torch.empty(rows, tiles(vocabulary, _BLOCK), dtype=torch.int64, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):
            _sum_blocks[tuple(sums.shape)](
                logits, largest, sums, vocabulary, temperature, TEMPERED=temperature != 1, BLOCK=_BLOCK, num_warps=4
            )
    return Weights(logits, temperature, largest, sums)


def draw(weights: Weights, uniform: Tensor) -> Tensor:
    """A token for each row by its uniform in ``[0, 1)``, float64 ``[N]``; int64 ``[N]``."""
    rows, vocabulary = weights.logits.shape
    tokens, blocks = torch.empty(rows, dtype=torch.int64, device=weights.logits.device), weights.sums.shape[1]
    if rows:
        with torch.cuda.device_of(tokens):
            _draw[(rows,)](
                weights.logits, weights.largest, weights.sums, uniform, tokens, vocabulary, blocks, weights.temperature,
                TEMPERED=weights.temperature != 1, BLOCK=_BLOCK, BLOCKS=power_of_two(blocks), num_warps=4,
            )  # fmt: skip
    return tokens
