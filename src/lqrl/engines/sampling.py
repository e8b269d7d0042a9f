"""Drawing tokens: counter-based uniforms, top-k and top-p, and an inverse-CDF draw; pure functions of tensors."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from lqrl.quant import exact
from lqrl.quant.exact_truncation import MAX_VOCABULARY
from lqrl.quant.triton_use import serves
from lqrl.types import SamplingParams

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_NUCLEUS = 1024  # most likely tokens that top-p tries before it sorts the whole vocabulary
_BLOCK = 512  # tokens whose weights are summed before the draw looks inside


class Sampled(NamedTuple):
    """Tokens ``[R]`` int64, their processed log-probs ``[R]`` and the log of the kept mass ``[R]``, both float32.

    ``log_mass`` is ``None`` when nothing was truncated.
    """

    tokens: Tensor
    logprobs: Tensor
    log_mass: Tensor | None


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014) on int64 with wrap-around; a bijection."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def sample_keys(seed: int, prompt_ids: Tensor, sample_index: Tensor) -> Tensor:
    """One key for each sample: ``[N]`` int64 from ``[N]`` int64 ids, equal on every device.

    Args:
        seed: any integer; taken modulo 2**64.
        prompt_ids: stable ids of the prompts.
        sample_index: which sample of its prompt.

    Raises:
        TypeError: for a seed that is no integer.
    """
    try:
        seed = operator.index(seed)
    except TypeError as error:
        raise TypeError(f"seed must be an integer, got {seed!r}; two fractions would be one seed") from error
    wrapped = (seed + 2**63) % 2**64 - 2**63
    key = mix64(torch.full_like(prompt_ids, wrapped) + _GOLDEN)
    key = mix64((key ^ prompt_ids) + _GOLDEN)
    return mix64((key ^ sample_index) + _GOLDEN)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniforms in ``[0, 1)`` with 53 bits: ``[N, T]`` float64 from keys ``[N]`` and token positions ``[T]``."""
    bits = _shift(mix64(keys[:, None] + (positions + 1)[None, :] * _GOLDEN), 11)
    return bits.double() * 2.0**-53


def _pick(cumulative: Tensor, target: Tensor) -> Tensor:
    """First column of ``cumulative`` ``[R, K]`` above ``target`` ``[R]``, itself below the last; it has weight."""
    column = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return column.clamp_max_(cumulative.shape[1] - 1)  # NaN weights; the engine reports their log-probs


def draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one column of each row in proportion to its weight.

    Sums of blocks come first, so that only one block of each row is accumulated in float64.

    Args:
        weights: ``[R, V]`` float32, not negative, not all 0.
        uniform: ``[R]`` float64 in ``[0, 1)``.

    Returns:
        Columns ``[R]`` int64 and sums of the rows ``[R]`` float64.
    """
    width = weights.shape[1]
    if width <= 2 * _BLOCK:
        cumulative = weights.cumsum(1, dtype=torch.float64)
        total = cumulative[:, -1]
        return _pick(cumulative, uniform * total), total  # u <= 1 - 2**-53, so u * total rounds to less than the total
    whole = width // _BLOCK
    sums = weights[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).sum(2)
    if width % _BLOCK:
        sums = torch.cat([sums, weights[:, whole * _BLOCK :].sum(1, keepdim=True)], 1)
    cumulative = sums.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = uniform * total
    block = _pick(cumulative, target)[:, None]
    before = (cumulative.gather(1, block) - sums.gather(1, block)).squeeze(1)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inner = weights.gather(1, columns.clamp_max(width - 1)).masked_fill_(columns >= width, 0)
    inner = inner.cumsum(1, dtype=torch.float64)
    # The block's sum was rounded to fp32: the rest may lie above its float64 sum, or below 0.
    rest = torch.minimum((target - before).clamp_min_(0), torch.nextafter(inner[:, -1], torch.zeros_like(total)))
    return block.squeeze(1) * _BLOCK + _pick(inner, rest), total


def sample(logits: Tensor, uniform: Tensor | None, params: SamplingParams) -> Sampled:
    """Draw a token for each row after temperature, then top-k, then top-p of what top-k kept.

    On NVIDIA GPUs Triton kernels draw; their tokens are those of `sample_eager` unless a uniform, or the edge of what
    is kept, falls within rounding of the boundary of two.

    Args:
        logits: ``[R, V]`` float32.
        uniform: ``[R]`` float64, see `uniforms`; not read when ``params.temperature`` is 0.
        params: sampling settings.

    Returns:
        The tokens with log-probs under the distribution they were drawn from; greedy tokens with those of
        temperature 1.
    """
    if not has_draw_kernel(params, logits.device, logits.shape[1]):
        return sample_eager(logits, uniform, params)
    if params.truncates:
        return sample_exact(logits, uniform, params)
    from lqrl.engines import triton_draw

    uniform = _given(uniform) if params.temperature else None
    return Sampled(*triton_draw.draw(logits.contiguous(), uniform, params.temperature or 1.0), None)


def has_draw_kernel(params: SamplingParams, device: torch.device, vocabulary: int) -> bool:
    """Whether `sample` runs kernels of this library, which ask the host nothing, as eager top-p does."""
    return serves(device) and (vocabulary <= MAX_VOCABULARY or not params.truncates)


def sample_eager(logits: Tensor, uniform: Tensor | None, params: SamplingParams) -> Sampled:
    """`sample` in torch operations."""
    if params.temperature not in (0, 1):
        logits = logits / params.temperature
    if params.truncates:
        return _sample_truncated(logits, _given(uniform), params)
    if params.temperature == 0:
        largest, best = logits.max(1, keepdim=True)
        total = torch.sub(logits, largest).exp_().sum(1, dtype=torch.float64)
        return Sampled(best.squeeze(1), -total.log().float(), None)
    largest = logits.amax(1, keepdim=True)  # several times faster than max, which also looks for the place
    weights = torch.sub(logits, largest).exp_()
    tokens, total = draw(weights, _given(uniform))
    chosen = logits.gather(1, tokens[:, None]) - largest
    return Sampled(tokens, chosen.squeeze(1) - total.log().float(), None)


def sample_exact(logits: Tensor, uniform: Tensor | None, params: SamplingParams) -> Sampled:
    """`sample` with log-probs that are the learner's in exact mode, as bits: ``logprobs + log_mass`` of each token.

    Arguments and result as for `sample`. A row's token and log-prob depend on its logits and uniform alone.
    """
    temperature = params.temperature or 1.0
    if not params.truncates:
        tokens, rows = exact.sample(logits, _given(uniform) if params.temperature else None, temperature)
        return Sampled(tokens, exact.token_logprobs(logits, tokens, temperature, rows), None)
    tokens, rows, mass = exact.sample_truncated(logits, _given(uniform), temperature, params.top_k, params.top_p)
    full = exact.token_logprobs(logits, tokens, temperature, rows)
    # One of these differences is exact whatever the numbers are, so that the sum of both parts is `full` again.
    logprobs = full - torch.maximum(mass, full)
    return Sampled(tokens, logprobs, full - logprobs)


def _sample_truncated(logits: Tensor, uniform: Tensor, params: SamplingParams, few: bool = True) -> Sampled:
    """Draw from the most likely tokens, in order; ``few``: look at `_NUCLEUS` of them first when only top-p is set."""
    vocabulary = logits.shape[1]
    few = few and params.top_k == 0 and vocabulary > 4 * _NUCLEUS
    if params.top_k > 0 or few:
        values, ids = logits.topk(min(params.top_k or _NUCLEUS, vocabulary), 1)
    else:
        values, ids = logits.sort(1, descending=True)
    largest = values[:, :1]
    weights = torch.sub(values, largest).exp_()
    total = torch.sub(logits, largest).exp_().sum(1, dtype=torch.float64)
    wide = None
    if params.top_p < 1:
        mass = weights.cumsum(1, dtype=torch.float64)
        goal = params.top_p * (mass[:, -1] if params.top_k > 0 else total)[:, None]
        wide = mass[:, -1] < goal[:, 0] if few else None
        weights = weights * (mass - weights < goal)
    tokens, kept = draw(torch.zeros_like(logits).scatter_(1, ids, weights), uniform)
    chosen = (logits.gather(1, tokens[:, None]) - largest).squeeze(1)
    out = Sampled(tokens, chosen - kept.log().float(), (kept.log() - total.log()).float().clamp_max_(0))
    if wide is not None and bool(wide.any()):
        rows = wide.nonzero().squeeze(1)
        again = _sample_truncated(logits[rows], uniform[rows], params, few=False)
        for mine, theirs in zip(out, again, strict=True):
            if mine is not None and theirs is not None:
                mine.index_copy_(0, rows, theirs)
    return out


def _given(uniform: Tensor | None) -> Tensor:
    if uniform is None:
        raise ValueError("sampling at a temperature above 0 needs one uniform a row; see sampling.uniforms")
    return uniform
