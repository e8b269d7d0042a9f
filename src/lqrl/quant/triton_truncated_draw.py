"""The draw of a token after top-k and top-p on CUDA, without a sort: one program a row.

Both keep the tokens whose logits are at least some threshold; of those that equal it, the first few. The threshold is
found by bisection: a pass adds up how many logits lie above a guess and what they weigh. It ends when one token, or
only equal ones, lie between the guesses. Blocks whose largest logit is below the guess are not read, so a pass over a
sharp distribution reads few. Weights are those of `lqrl.quant.triton_exact_draw`: integers, whose sums have no order.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.exact_truncation import UNIT_BITS
from lqrl.quant.triton_exact_draw import BLOCK, Draws, block_sums, load_logits, row_totals, token_weights
from lqrl.quant.triton_use import power_of_two

_TOGETHER = 4  # blocks that are read at once
_UNIT = tl.constexpr(2.0**UNIT_BITS)
_WEIGHTLESS = tl.constexpr(32.0)  # exp(-32) is less than half a unit
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _at_least(
    logits_ptr, largest_ptr, row, vocabulary, blocks, top, inverse, threshold,
    TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many logits of a row are at least ``threshold``, and the sum of their weights; int64."""
    count = tl.zeros([TOGETHER * BLOCK], tl.int32)
    mass = tl.zeros([TOGETHER * BLOCK], tl.int64)
    for start in range(0, blocks, TOGETHER):
        block = start + tl.arange(0, TOGETHER)
        largest = tl.load(largest_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
        if tl.max(largest, 0) >= threshold:
            column = start * BLOCK + tl.arange(0, TOGETHER * BLOCK)
            logit = load_logits(logits_ptr, row, column, vocabulary)
            inside = logit >= threshold
            count += inside.to(tl.int32)
            mass += tl.where(inside, token_weights(logit - top, inverse), 0)
    return tl.sum(count, 0).to(tl.int64), tl.sum(mass, 0)


@triton.jit
def _above(x):
    """The next larger fp32 number."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)


@triton.jit
def _bisect(
    logits_ptr, largest_ptr, row, vocabulary, blocks, top, inverse, low, count_low, mass_low, goal,
    BY_MASS: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``low <= threshold < high`` with nothing between them but equal logits, or one.

    The logits from ``low`` on reach ``goal`` tokens (``BY_MASS``: weight), those from ``high`` on do not.
    """
    high = _above(top)
    count_high, mass_high = count_low * 0, mass_low * 0
    middle = low * 0.5 + high * 0.5
    while (count_low - count_high > 1) & (middle > low) & (middle < high):
        count, mass = _at_least(logits_ptr, largest_ptr, row, vocabulary, blocks, top, inverse, middle, TOGETHER, BLOCK)
        reached = (mass if BY_MASS else count) >= goal
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        count_low, count_high = tl.where(reached, count, count_low), tl.where(reached, count_high, count)
        mass_low, mass_high = tl.where(reached, mass, mass_low), tl.where(reached, mass_high, mass)
        middle = low * 0.5 + high * 0.5
    return low, high, count_low, count_high, mass_low, mass_high


@triton.jit
def _pick(
    logits_ptr, largest_ptr, row, vocabulary, blocks, top, inverse, low, high, equal, target,
    TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first kept token whose cumulative weight is above ``target``; ``equal`` tokens below ``high`` are kept."""
    token, before, seen = target * 0 + vocabulary - 1, target * 0, equal * 0  # vocabulary may be the constant 1
    for start in range(0, blocks, TOGETHER):
        block = start + tl.arange(0, TOGETHER)
        largest = tl.load(largest_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
        if tl.max(largest, 0) >= low:
            column = start * BLOCK + tl.arange(0, TOGETHER * BLOCK)
            logit = load_logits(logits_ptr, row, column, vocabulary)
            ties = ((logit >= low) & (logit < high)).to(tl.int64)
            kept = (logit >= high) | ((ties > 0) & (seen + tl.cumsum(ties, 0) <= equal))
            weights = tl.where(kept, token_weights(logit - top, inverse), 0)
            after = before + tl.sum(weights, 0)
            chosen = start * BLOCK + tl.sum((before + tl.cumsum(weights, 0) <= target).to(tl.int64), 0)
            token = tl.where((before <= target) & (target < after), chosen, token)
            before, seen = after, seen + tl.sum(ties, 0)
    return token


@triton.jit(do_not_specialize=["top_k", "share_bits"])
def _draw(
    logits_ptr, largest_ptr, uniform_ptr, log_total_ptr, tokens_ptr, log_mass_ptr, vocabulary, blocks, inverse,
    top_k, share_bits, BY_COUNT: tl.constexpr, BY_MASS: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    largest = tl.load(largest_ptr + row * blocks + index, mask=index < blocks, other=float("-inf"))
    top = tl.max(largest, 0)
    reach = _WEIGHTLESS / inverse
    low = tl.maximum(top - reach, _LOWEST)
    count, mass = _at_least(logits_ptr, largest_ptr, row, vocabulary, blocks, top, inverse, low, TOGETHER, BLOCK)
    if BY_COUNT:
        while (count < top_k) & (low > _LOWEST):  # further down than anything that has weight
            reach = reach * 8
            low = tl.maximum(top - reach, _LOWEST)
            count, mass = _at_least(
                logits_ptr, largest_ptr, row, vocabulary, blocks, top, inverse, low, TOGETHER, BLOCK
            )
        goal = tl.minimum(count, top_k)
        low, high, count, count_high, mass, mass_high = _bisect(
            logits_ptr, largest_ptr, row, vocabulary, blocks, top, inverse, low, count, mass, goal,
            False, TOGETHER, BLOCK,
        )  # fmt: skip
        equal = goal - count_high
        one = (mass - mass_high) // tl.maximum(count - count_high, 1)
        kept = mass_high + equal * one
    if BY_MASS:
        share = (mass * 0 + share_bits).to(tl.float64, bitcast=True)  # a Python number would come as fp32
        whole = (kept if BY_COUNT else mass).to(tl.float64)
        goal = tl.maximum(tl.math.ceil(share * whole).to(tl.int64), 1)
        low, high, count, count_high, mass, mass_high = _bisect(
            logits_ptr, largest_ptr, row, vocabulary, blocks, top, inverse, low, count, mass, goal,
            True, TOGETHER, BLOCK,
        )  # fmt: skip
        one = tl.maximum((mass - mass_high) // tl.maximum(count - count_high, 1), 1)
        equal = (goal - mass_high + one - 1) // one
        kept = mass_high + equal * one
    target = tl.minimum((tl.load(uniform_ptr + row) * kept.to(tl.float64)).to(tl.int64), kept - 1)
    token = _pick(
        logits_ptr, largest_ptr, row, vocabulary, blocks, top, inverse, low, high, equal, target, TOGETHER, BLOCK
    )
    log_mass = tl.log(kept.to(tl.float64) / _UNIT) - tl.load(log_total_ptr + row)
    tl.store(tokens_ptr + row, token)
    tl.store(log_mass_ptr + row, tl.minimum(log_mass.to(tl.float32), 0.0))


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Draws, Tensor]:
    """A token for each row of the tokens that top-k, then top-p of what it kept, leave.

    Args:
        logits: fp32 ``[N, V]``, contiguous.
        uniform: in ``[0, 1)``, float64 ``[N]``, contiguous.
        temperature: divides the logits.
        top_k: most likely tokens that are kept; 0 for all.
        top_p: smallest set with at least this share of their mass is kept; 1 for all.

    Returns:
        The draws, with the totals of the whole vocabulary, and fp32 ``[N]`` the log of the kept mass.

    Raises:
        NotImplementedError: for a vocabulary whose sums would not fit 63 bits.
    """
    (rows, vocabulary), inverse = logits.shape, 1 / float(temperature)
    largest, sums = block_sums(logits, inverse)
    found = row_totals(logits, largest, sums, temperature)
    log_mass = torch.empty(rows, dtype=torch.float32, device=logits.device)
    blocks = largest.shape[1]
    (share_bits,) = struct.unpack("<q", struct.pack("<d", top_p))
    if rows:
        with torch.cuda.device_of(logits):
            _draw[(rows,)](
                logits, largest, uniform, found.log_total, found.tokens, log_mass, vocabulary, blocks, inverse,
                min(top_k, vocabulary), share_bits, BY_COUNT=top_k > 0, BY_MASS=top_p < 1,
                TOGETHER=_TOGETHER, BLOCK=BLOCK, BLOCKS=power_of_two(blocks), num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
    return found, log_mass
