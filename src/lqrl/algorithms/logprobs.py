"""Log-probabilities of given tokens from hidden states, without a ``[N, V]`` tensor for the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_LOGITS = 2**27
"""Logits of one chunk when no size is given: 512 MiB in fp32; larger chunks are hardly faster on an H100."""

_CPU_BLOCK = 1024
"""Rows of the head that one product reads on the CPU; libraries walk a matrix this wide badly (up to 1.7x slower)."""


Product = Callable[[Tensor], Tensor]
"""A head that is not a plain matrix (low-bit codes): hidden states ``[N, H]`` to fp32 logits ``[N, V]``, row by row."""


Normalize = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Fp32 logits ``[N, V]``, targets ``[N]`` and a temperature to log-probs and log-partitions ``[N]``, row by row."""


Slope = Callable[[Tensor, Tensor, Tensor, Tensor, float, torch.dtype], Tensor]
"""Fp32 logits ``[N, V]``, which may be overwritten, targets, log-partitions and gradients of the log-probs ``[N]``, a
temperature and a dtype to the gradient of the logits ``[N, V]`` in that dtype."""


class LogprobsAndEntropy(NamedTuple):
    """Log-probs ``[N]`` (differentiable) and entropies ``[N]`` in nats (detached) of the same distributions."""

    logprobs: Tensor
    entropy: Tensor


@torch.no_grad()
def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The output head: ``hidden @ weight.T`` with fp32 sums and an fp32 result, also under autocast.

    Logits rounded to bf16 are off by up to 1/16 at a value of 20; that alone is a visible policy mismatch. Engine and
    learner both call this function. It is not meant to be differentiated: `chunked_logprobs` is.

    Args:
        hidden: ``[N, H]``, any float dtype.
        weight: ``[V, H]``, any float dtype.

    Returns:
        ``[N, V]`` float32 (float64 when an operand is).
    """
    if hidden.is_cuda or weight.shape[0] < 2 * _CPU_BLOCK:
        return wide_matmul(hidden, weight.T)
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=wide)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, weight.shape[0], _CPU_BLOCK):
            rows = slice(start, start + _CPU_BLOCK)
            torch.mm(hidden.to(wide), weight[rows].to(wide).T, out=logits[:, rows])
    return logits


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    product: Product | None = None,
    normalize: Normalize | None = None,
    slope: Slope | None = None,
) -> Tensor:
    """Log-probability of each target under ``softmax(head_logits(hidden, weight) / temperature)``.

    One chunk of logits is alive at a time. The forward keeps only the log-partition of each row; the backward computes
    the chunk's logits again and sums both gradients in fp32, whatever the dtype of the operands.

    Args:
        hidden: ``[N, H]`` final hidden states; row ``i`` predicts ``targets[i]``.
        weight: ``[V, H]`` output head.
        targets: ``[N]`` int64.
        temperature: divides the logits; 0 (greedy sampling) means 1.
        chunk_size: rows of a chunk; ``None`` bounds a chunk at 2**27 logits.
        product: computes the logits in place of `head_logits`; the backward is straight-through, on ``weight``.
        normalize: computes the log-probs from the logits in the place of ``logsumexp``.
        slope: computes the gradient of the logits in the place of tensor operations.

    Returns:
        ``[N]`` float32 (float64 when an operand is).

    Raises:
        ValueError: when shapes do not fit, or ``temperature`` or ``chunk_size`` is out of range.
    """
    _check(hidden, weight, targets, temperature, chunk_size)
    options = temperature or 1.0, chunk_size, False, product, normalize, slope
    return _ChunkedLogprobs.apply(hidden, weight, targets, *options)[0]


def logprobs_with_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    product: Product | None = None,
    normalize: Normalize | None = None,
) -> LogprobsAndEntropy:
    """`chunked_logprobs` and, in the same pass, the entropy of each row's distribution; arguments as there."""
    _check(hidden, weight, targets, temperature, chunk_size)
    options = temperature or 1.0, chunk_size, True, product, normalize, None
    return LogprobsAndEntropy(*_ChunkedLogprobs.apply(hidden, weight, targets, *options))


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int | None,
        with_entropy: bool,
        product: Product | None,
        normalize: Normalize | None,
        slope: Slope | None,
    ) -> tuple[Tensor, Tensor]:
        wide = _operand(weight)
        dtype = _accumulator(hidden, weight)
        logprobs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        log_partition = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs if with_entropy else logprobs[:0])
        for rows in _chunks(len(targets), len(weight), chunk_size):
            logits = head_logits(hidden[rows], wide) if product is None else product(hidden[rows])
            if normalize is not None:
                logprobs[rows], log_partition[rows] = normalize(logits, targets[rows], temperature)
                logits = _tempered_(logits, temperature) if with_entropy else logits
            else:
                logits = _tempered_(logits, temperature)
                log_partition[rows] = logits.logsumexp(1)
                logprobs[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - log_partition[rows]
            if with_entropy:
                probs = torch.sub(logits, log_partition[rows, None]).exp_()
                entropy[rows] = log_partition[rows] - probs.mul_(logits).sum(1)
        ctx.save_for_backward(hidden, weight, targets, log_partition)
        ctx.temperature, ctx.chunk_size, ctx.product, ctx.slope = temperature, chunk_size, product, slope
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, targets, log_partition = ctx.saved_tensors
        wide = _operand(weight)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dtype = _accumulator(hidden, weight)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        for rows in _chunks(len(targets), len(weight), ctx.chunk_size):
            logits = head_logits(hidden[rows], wide) if ctx.product is None else ctx.product(hidden[rows])
            row = targets[rows], log_partition[rows], grad_outputs[0][rows]
            narrow = torch.promote_types(hidden.dtype, wide.dtype)
            d_logits = (ctx.slope or _slope_)(logits, *row, ctx.temperature, narrow)
            if d_hidden is not None:
                d_hidden[rows] = wide_matmul(d_logits, wide).to(hidden.dtype)
            if d_weight is not None:
                _add_product_(d_weight, d_logits.T, hidden[rows])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *([None] * 7)


def _slope_(
    logits: Tensor, targets: Tensor, partition: Tensor, grad: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """``(onehot - softmax) / temperature`` times ``grad``, built in the logits' own storage."""
    scale = (grad / temperature).unsqueeze(1)
    slope = _tempered_(logits, temperature).sub_(partition[:, None]).exp_().mul_(-scale)
    return slope.scatter_add_(1, targets[:, None], scale.to(slope.dtype)).to(dtype)


def _tempered_(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits.div_(temperature)


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with sums and result in fp32 or wider; autocast would round both to bf16."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    with torch.autocast(a.device.type, enabled=False):
        if dtype in (torch.bfloat16, torch.float16):
            if a.is_cuda:
                return torch.mm(a, b, out_dtype=torch.float32)
            dtype = torch.float32
        return a.to(dtype) @ b.to(dtype)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`wide_matmul` added to ``total``, on CUDA without a tensor of the product."""
    if a.is_cuda and a.dtype == b.dtype in (torch.bfloat16, torch.float16) and total.dtype == torch.float32:
        with torch.autocast(a.device.type, enabled=False):
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += wide_matmul(a, b)


def _operand(weight: Tensor) -> Tensor:
    """``weight`` as `wide_matmul` multiplies it, so that a loop over chunks widens it once."""
    return weight if weight.is_cuda else weight.to(torch.promote_types(weight.dtype, torch.float32))


def _accumulator(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def _chunks(rows: int, vocabulary: int, chunk_size: int | None) -> Iterator[slice]:
    size = chunk_size or max(1, _CHUNK_LOGITS // vocabulary)
    for start in range(0, rows, size):
        yield slice(start, start + size)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [N, H] and weight [V, H], got {tuple(hidden.shape)} and {tuple(weight.shape)}; "
            "select the predicting rows first: hidden[mask]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"expected one target for each of {len(hidden)} rows, got shape {tuple(targets.shape)}")
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"temperature must be >= 0 and finite, got {temperature}; 0 scores greedy samples at temperature 1"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; use None to bound it by memory")
