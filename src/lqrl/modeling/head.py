"""The output head of a causal language model, in full or low precision."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lqrl.algorithms.logprobs import Normalize, Product, Slope
from lqrl.modeling.trial import kernels_work
from lqrl.quant import exact
from lqrl.quant.linear import AlignedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OutputHead(NamedTuple):
    """What `chunked_logprobs` multiplies hidden states with.

    Attributes:
        weight: ``[V, H]``, the parameter that gets the gradient; the embedding's where they are tied.
        product: the product with low-bit codes where the head is aligned, else ``None``.
    """

    weight: Tensor
    product: Product | None


def output_head(model: PreTrainedModel, *, rounds_logits: bool = False) -> OutputHead:
    """The learner's head as it is now; the low-bit codes are those of this moment.

    Args:
        model: the policy.
        rounds_logits: logits have values that the dtype of the hidden states holds, see
            `lqrl.modeling.arithmetic.Arithmetic`.
    """
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    product = head.product() if isinstance(head, AlignedLinear) else None
    if rounds_logits:
        product = partial(_rounded, product=product or partial(F.linear, weight=head.weight.detach()))
    return OutputHead(head.weight, product)


def _rounded(hidden: Tensor, product: Product) -> Tensor:
    return product(hidden).to(hidden.dtype).float()


class HeadKernels(NamedTuple):
    """What `chunked_logprobs` computes from a chunk of logits with; ``None`` for tensor operations."""

    normalize: Normalize | None
    slope: Slope | None


def head_kernels(device: torch.device, *, exact: bool) -> HeadKernels:
    """One pass over the logits each, where a trial finds them right; ``exact``: the log-probs of an exact engine."""
    if not kernels_work(device):
        return HeadKernels(exact_logprobs if exact else None, None)
    from lqrl.quant import triton_logprobs

    return HeadKernels(exact_logprobs if exact else triton_logprobs.logprobs, triton_logprobs.slope)


def exact_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets`` and log-partitions by the arithmetic that an exact engine reports, see `Normalize`."""
    rows = exact.normalizer(logits, temperature)
    logprobs = exact.token_logprobs(logits, targets, temperature, rows)
    return logprobs, (rows.largest.double() + rows.log_total).float()
