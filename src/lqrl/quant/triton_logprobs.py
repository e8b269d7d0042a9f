"""Log-probs of given tokens, and the gradient of their logits, on CUDA: each in one pass over the logits."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.triton_casts import to_bf16
from lqrl.quant.triton_use import tiles

_BLOCK = 4096
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _logprobs(
    logits_ptr, targets_ptr, logprobs_ptr, partition_ptr, vocabulary, inverse, BLOCK: tl.constexpr
):  # fmt: skip
    """One row; each lane keeps the largest of its logits and the sum of their exponentials."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    odd = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < vocabulary, other=float("-inf")) * inverse
        odd |= (x != x).to(tl.int32)  # a maximum passes NaN over
        higher = tl.maximum(largest, x)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2((largest - base) * _LOG2_E) + tl.exp2((x - base) * _LOG2_E)
        largest = higher
    top = tl.max(largest, 0)
    mass = tl.sum(tl.where(largest == float("-inf"), 0.0, total * tl.exp2((largest - top) * _LOG2_E)), 0)
    log_mass = tl.where(tl.max(odd, 0) == 0, tl.log(mass), float("nan"))
    value = tl.load(logits_ptr + tl.load(targets_ptr + row)) * inverse
    tl.store(logprobs_ptr + row, (value - top) - log_mass)
    tl.store(partition_ptr + row, top + log_mass)


def logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets`` and log-partitions, fp32 ``[N]``: `lqrl.algorithms.logprobs.Normalize`.

    A row with NaN or +inf gives NaN.

    Args:
        logits: fp32 ``[N, V]``.
        targets: ``[N]`` int64.
        temperature: divides the logits; above 0.
    """
    logits, targets = logits.contiguous(), targets.contiguous()
    found, partition = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        with torch.cuda.device_of(logits):
            _logprobs[(len(logits),)](
                logits, targets, found, partition, logits.shape[1], 1.0 / temperature, BLOCK=_BLOCK, num_warps=8
            )
    return found, partition


@triton.jit
def _slope(
    logits_ptr, targets_ptr, partition_ptr, grad_ptr, out_ptr, vocabulary, inverse, BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocabulary
    scale = tl.load(grad_ptr + row).to(tl.float32) * inverse
    x = tl.load(logits_ptr + row * vocabulary + column, mask=mask, other=float("-inf")) * inverse
    share = tl.exp2((x - tl.load(partition_ptr + row)) * _LOG2_E)
    out = (tl.where(column == tl.load(targets_ptr + row), 1.0, 0.0) - share) * scale
    tl.store(out_ptr + row * vocabulary + column, to_bf16(out) if BF16 else out, mask=mask)


def slope(
    logits: Tensor, targets: Tensor, partition: Tensor, grad: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits from that of the log-probs, see `lqrl.algorithms.logprobs.Slope`.

    Args:
        logits: fp32 ``[N, V]``; overwritten where ``dtype`` is fp32.
        targets: ``[N]`` int64.
        partition: fp32 ``[N]``, from `logprobs`.
        grad: ``[N]``.
        temperature: divided the logits.
        dtype: of the result, fp32 or bf16; others are made of fp32.
    """
    logits, bf16 = logits.contiguous(), dtype == torch.bfloat16
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device) if bf16 else logits
    if len(logits):
        with torch.cuda.device_of(logits):
            _slope[(len(logits), tiles(logits.shape[1], _BLOCK))](
                logits, targets.contiguous(), partition.contiguous(), grad.contiguous(), out, logits.shape[1],
                1.0 / temperature, BF16=bf16, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
    return out.to(dtype)
