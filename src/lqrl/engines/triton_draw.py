"""The draw of a token from all of the vocabulary on CUDA: one pass over the logits, then one program a row.

The first kernel keeps the largest logit of each block of tokens and the sum of ``exp(logit - largest)``. The second one
turns these into integers, whose sums have no order, finds the block that the uniform falls into, and the token inside.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.triton_use import power_of_two, tiles

_BLOCK = 1024  # tokens that are summed before the draw looks inside
_TOGETHER = 4  # blocks of one program
_UNIT = tl.constexpr(2.0**45)  # integer weights: 2**18 - 1 of the largest fit 63 bits


@triton.jit
def _summarize(
    logits_ptr, largest_ptr, sums_ptr, vocabulary, blocks, inverse, TOGETHER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logit = tl.load(logits_ptr + row * vocabulary + column, mask=column < vocabulary, other=float("-inf")) * inverse
    largest = tl.max(logit, 1)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(largest_ptr + row * blocks + block, largest, mask=block < blocks)
    tl.store(sums_ptr + row * blocks + block, tl.sum(tl.exp(logit - base[:, None]), 1), mask=block < blocks)


@triton.jit
def _units(weights):
    """Weights as integers; NaN is nothing here, `_pick` reports it."""
    return tl.where(weights == weights, weights * _UNIT, 0.0).to(tl.int64)


@triton.jit
def _pick(
    logits_ptr, largest_ptr, sums_ptr, uniform_ptr, tokens_ptr, logprobs_ptr, vocabulary, blocks, inverse,
    DRAW: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Without ``DRAW``: the first of the largest logits."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    largest = tl.load(largest_ptr + row * blocks + index, mask=index < blocks, other=float("-inf"))
    sums = tl.load(sums_ptr + row * blocks + index, mask=index < blocks, other=0.0)
    top = tl.max(largest, 0)
    weights = sums.to(tl.float64) * tl.exp(largest.to(tl.float64) - top.to(tl.float64))
    units = _units(weights)
    total = tl.sum(units, 0)
    if DRAW:
        uniform = tl.load(uniform_ptr + row)
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        block = tl.sum((tl.cumsum(units, 0) <= target).to(tl.int32), 0)
    else:
        target = total * 0
        block = tl.min(tl.where(largest == top, index, BLOCKS), 0)
    block = tl.minimum(block, blocks - 1)  # NaN logits
    place = tl.arange(0, BLOCK)
    column = block * BLOCK + place
    logit = tl.load(logits_ptr + row * vocabulary + column, mask=column < vocabulary, other=float("-inf")) * inverse
    if DRAW:
        inside = _units(tl.exp(logit - tl.max(logit, 0)).to(tl.float64))
        mass = tl.sum(inside, 0)
        own = tl.sum(tl.where(index == block, units, 0), 0)
        rest = (target - tl.sum(tl.where(index < block, units, 0), 0)).to(tl.float64) / tl.maximum(own, 1).to(
            tl.float64
        )
        rest = tl.minimum((rest * mass.to(tl.float64)).to(tl.int64), mass - 1)
        chosen = tl.sum((tl.cumsum(inside, 0) <= rest).to(tl.int32), 0)
    else:
        chosen = tl.min(tl.where(logit == top, place, BLOCK), 0)
    chosen = tl.minimum(chosen, BLOCK - 1)
    token = tl.minimum(block * BLOCK + chosen, vocabulary - 1)
    value = tl.sum(tl.where(place == chosen, logit, 0.0), 0)
    log_total = tl.log(total.to(tl.float64) / _UNIT).to(tl.float32)
    odd = tl.sum((weights != weights).to(tl.int32), 0) != 0
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, tl.where(odd, float("nan"), (value - top) - log_total))


@functools.cache
def _inverse(temperature: float) -> float:
    """What torch multiplies by, on CUDA, to divide by a number: the fp32 reciprocal of its fp32 value."""
    return float(torch.ones(()) / torch.tensor(temperature, dtype=torch.float32))


def draw(logits: Tensor, uniform: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs of `lqrl.engines.sampling.sample` without truncation.

    Args:
        logits: fp32 ``[R, V]``, contiguous.
        uniform: float64 ``[R]`` in ``[0, 1)``; ``None`` takes the first of the largest logits.
        temperature: divides the logits; above 0.

    Returns:
        int64 ``[R]`` and fp32 ``[R]``; a row with NaN or inf has the log-prob NaN.
    """
    rows, vocabulary = logits.shape
    blocks = tiles(vocabulary, _BLOCK)
    largest, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    inverse = _inverse(temperature)
    if rows:
        with torch.cuda.device_of(logits):
            _summarize[(rows, tiles(blocks, _TOGETHER))](
                logits, largest, sums, vocabulary, blocks, inverse, TOGETHER=_TOGETHER, BLOCK=_BLOCK,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            _pick[(rows,)](
                logits, largest, sums, logits if uniform is None else uniform.contiguous(), tokens, logprobs,
                vocabulary, blocks, inverse, DRAW=uniform is not None, BLOCK=_BLOCK, BLOCKS=power_of_two(blocks),
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return tokens, logprobs
