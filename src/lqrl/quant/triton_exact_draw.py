"""Log-softmax and the draw of a token in exact mode on CUDA: one pass over the logits, then one program a row.

The weight of a token is ``exp((logit - largest) / temperature)``, at most 1, in units of ``2**-45`` and cut off below.
Sums of these integers have no order. The first kernel adds those of a block of tokens, from the block's largest logit
on; the second one brings the sums of the blocks to the largest of all, adds them, and looks inside the block of a draw.
The sum of 2**18 - 1 of the largest weights fits 63 bits; what is cut off adds up to less than ``V * 2**-44``.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.exact_truncation import MAX_VOCABULARY, UNIT_BITS
from lqrl.quant.triton_use import power_of_two, tiles

_UNIT = tl.constexpr(2.0**UNIT_BITS)
BLOCK = 1024  # tokens whose weights are added before the draw looks inside; part of the arithmetic
_TOGETHER = 4  # blocks of one program
_ROWS = 128  # log-probs of one program
_TOTAL, _FIRST, _DRAW = (tl.constexpr(kind) for kind in range(3))  # what is asked: no token, the first largest, a draw


class Draws(NamedTuple):
    """What a pass over ``[N, V]`` logits found.

    Attributes:
        tokens: int64 ``[N]``; undefined where none were asked for.
        largest: fp32 ``[N]``, largest logit over temperature; NaN where a logit is NaN or inf.
        log_total: float64 ``[N]``, log of the sum of the weights.
    """

    tokens: Tensor
    largest: Tensor
    log_total: Tensor


@triton.jit
def load_logits(logits_ptr: tl.tensor, row: tl.tensor, column: tl.tensor, vocabulary: tl.tensor) -> tl.tensor:
    """Logits of a row; -inf past its end."""
    return tl.load(logits_ptr + row * vocabulary + column, mask=column < vocabulary, other=float("-inf"))


@triton.jit
def token_weights(distance: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """int64 weights of logits that lie ``distance`` above the largest."""
    return (tl.exp(distance * inverse) * _UNIT).to(tl.int64)


@triton.jit
def _sum_blocks(
    logits_ptr, largest_ptr, sums_ptr, vocabulary, blocks, inverse, TOGETHER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest logit of some blocks of a row and the sum of their weights: -1 where a logit is NaN or inf."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    logit = load_logits(logits_ptr, row, block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], vocabulary)
    good = tl.min((logit < float("inf")).to(tl.int32), 1) != 0
    logit = tl.where(good[:, None], logit, float("-inf"))
    largest = tl.max(logit, 1)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    sums = tl.sum(token_weights(logit - base[:, None], inverse), 1)
    tl.store(largest_ptr + row * blocks + block, largest, mask=block < blocks)
    tl.store(sums_ptr + row * blocks + block, tl.where(good, sums, -1), mask=block < blocks)


@triton.jit
def _finish(
    logits_ptr, largest_ptr, sums_ptr, uniform_ptr, tokens_ptr, top_ptr, log_total_ptr, vocabulary, blocks,
    temperature, inverse, ASKED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The row's total; a draw is the first token whose cumulative weight is above ``uniform * total``."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    largest = tl.load(largest_ptr + row * blocks + index, mask=index < blocks, other=float("-inf"))
    sums = tl.load(sums_ptr + row * blocks + index, mask=index < blocks, other=0)
    odd = tl.min(sums, 0) < 0
    top = tl.max(largest, 0)
    # Beside a block of -inf alone stands the sum 0; its factor is 0, or NaN in a row of nothing else.
    factor = tl.exp((largest.to(tl.float64) - top.to(tl.float64)) * inverse)
    weights = tl.where(sums > 0, sums.to(tl.float64) * factor, 0.0).to(tl.int64)
    total = tl.sum(weights, 0)
    tl.store(top_ptr + row, tl.where(odd, float("nan"), tl.math.div_rn(top, temperature)))
    tl.store(log_total_ptr + row, tl.log(total.to(tl.float64) / _UNIT))
    if ASKED != _TOTAL:
        place = tl.arange(0, BLOCK)
        if ASKED == _FIRST:
            block = tl.minimum(tl.min(tl.where(largest == top, index, BLOCKS), 0), blocks - 1)
            logit = load_logits(logits_ptr, row, block * BLOCK + place, vocabulary)
            chosen = tl.min(tl.where(logit == top, place, BLOCK), 0)
        else:
            target = tl.minimum((tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64), total - 1)
            # A row without weights picks some token; the engine reports its log-prob.
            block = tl.minimum(tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0), blocks - 1)
            logit = load_logits(logits_ptr, row, block * BLOCK + place, vocabulary)
            inside = token_weights(logit - tl.max(tl.where(index == block, largest, float("-inf")), 0), inverse)
            mass = tl.sum(inside, 0)
            own = tl.maximum(tl.sum(tl.where(index == block, weights, 0), 0), 1).to(tl.float64)
            rest = (target - tl.sum(tl.where(index < block, weights, 0), 0)).to(tl.float64) / own
            rest = tl.minimum((rest * mass.to(tl.float64)).to(tl.int64), mass - 1)
            chosen = tl.sum((tl.cumsum(inside, 0) <= rest).to(tl.int32), 0)
        tl.store(tokens_ptr + row, tl.minimum(block * BLOCK + chosen, vocabulary - 1).to(tl.int64))


@triton.jit(do_not_specialize=["rows"])
def _token_logprobs(
    logits_ptr, tokens_ptr, largest_ptr, log_total_ptr, out_ptr, rows, vocabulary, temperature, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    token = tl.load(tokens_ptr + row, mask=mask, other=0)
    chosen = tl.math.div_rn(tl.load(logits_ptr + row * vocabulary + token, mask=mask, other=0.0), temperature)
    largest = tl.load(largest_ptr + row, mask=mask, other=0.0).to(tl.float64)
    out = chosen.to(tl.float64) - largest - tl.load(log_total_ptr + row, mask=mask, other=0.0)
    tl.store(out_ptr + row, out.to(tl.float32), mask=mask)


def block_sums(logits: Tensor, inverse: float) -> tuple[Tensor, Tensor]:
    """The largest logit of each `BLOCK` of contiguous fp32 logits ``[N, V]``, and the sum of the weights from it on.

    Returns:
        fp32 and int64 ``[N, blocks]``; the sum is -1 where a logit is NaN or inf.

    Raises:
        NotImplementedError: for a vocabulary whose sums would not fit 63 bits.
    """
    rows, vocabulary = logits.shape
    if vocabulary > MAX_VOCABULARY:
        raise NotImplementedError(
            f"exact mode on CUDA adds weights of at most {MAX_VOCABULARY} tokens, got a vocabulary of {vocabulary}; "
            "set exact to false"
        )
    blocks = tiles(vocabulary, BLOCK)
    largest = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):
            _sum_blocks[(rows, tiles(blocks, _TOGETHER))](
                logits, largest, sums, vocabulary, blocks, inverse, TOGETHER=_TOGETHER, BLOCK=BLOCK,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
    return largest, sums


def row_totals(
    logits: Tensor,
    largest: Tensor,
    sums: Tensor,
    temperature: float,
    uniform: Tensor | None = None,
    asked: int = _TOTAL.value,
) -> Draws:
    """What the blocks of `block_sums` add up to; and a token, if one is asked for."""
    (rows, vocabulary), blocks, device = logits.shape, largest.shape[1], logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    top = torch.empty(rows, dtype=torch.float32, device=device)
    log_total = torch.empty(rows, dtype=torch.float64, device=device)
    if rows:
        with torch.cuda.device_of(logits):
            _finish[(rows,)](
                logits, largest, sums, uniform, tokens, top, log_total, vocabulary, blocks, float(temperature),
                1 / float(temperature), ASKED=asked, BLOCK=BLOCK, BLOCKS=power_of_two(blocks), num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
    return Draws(tokens, top, log_total)


def totals(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """``largest`` and ``log_total`` of each row of contiguous fp32 logits ``[N, V]``, see `Draws`.

    Raises:
        NotImplementedError: for a vocabulary whose sums would not fit 63 bits.
    """
    _, largest, log_total = row_totals(logits, *block_sums(logits, 1 / float(temperature)), temperature)
    return largest, log_total


def draw(logits: Tensor, uniform: Tensor | None, temperature: float) -> Draws:
    """A token for each row of contiguous fp32 logits ``[N, V]``, and what `totals` gives.

    Args:
        logits: see above.
        uniform: in ``[0, 1)``, float64 ``[N]``, contiguous; ``None`` takes the first of the largest logits.
        temperature: divides the logits.

    Raises:
        NotImplementedError: as `totals`.
    """
    blocks = block_sums(logits, 1 / float(temperature))
    return row_totals(logits, *blocks, temperature, uniform, (_FIRST if uniform is None else _DRAW).value)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float, largest: Tensor, log_total: Tensor) -> Tensor:
    """``logit / temperature - largest - log_total`` of one token a row, in float64, rounded once: fp32 ``[N]``."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):
            _token_logprobs[(tiles(rows, _ROWS),)](
                logits, tokens, largest, log_total, out, rows, vocabulary, float(temperature), BLOCK=_ROWS,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out
