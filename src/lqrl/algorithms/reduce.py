"""Reductions by name: how token losses become one scalar, the same however a step is split in micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lqrl.types import Maximum, Ratio

ReductionName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@dataclass(frozen=True)
class Reduction:
    """A weighted sum of token losses over a count that adds up.

    ``loss = (weights(mask) * token_loss).sum() / denom``, with ``denom`` the sum of ``count(mask)`` over all
    micro-batches and ranks of one optimizer step: the step's gradient does not depend on how its rows were split.

    ========================  ======================  =====================================
    name                      a token's weight        counts
    ========================  ======================  =====================================
    token_mean                1                       trained tokens (DAPO)
    seq_mean_token_mean       1 / tokens of its row   rows with trained tokens (GRPO, GSPO)
    seq_mean_token_sum        1                       rows with trained tokens
    seq_mean_token_sum_norm   1 / max_length          rows with trained tokens (Dr. GRPO)
    ========================  ======================  =====================================

    Attributes:
        name: one of the above.
        max_length: the constant length of ``seq_mean_token_sum_norm``: the longest completion the run allows.

    Raises:
        ValueError: for an unknown name, or a ``max_length`` that is missing, not positive or would be ignored.
    """

    name: ReductionName = "token_mean"
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(ReductionName):
            raise ValueError(f"unknown reduction {self.name!r}; choose one of {', '.join(get_args(ReductionName))}")
        if self.name == "seq_mean_token_sum_norm":
            if self.max_length is None or self.max_length < 1:
                raise ValueError(
                    f"seq_mean_token_sum_norm divides by a constant length, got max_length={self.max_length}; "
                    "set it to the run's max_tokens"
                )
        elif self.max_length is not None:
            raise ValueError(f"max_length has no meaning for {self.name}; drop it, or use seq_mean_token_sum_norm")

    def weights(self, mask: Tensor) -> Tensor:
        """``[B, T]`` float32 weight of each token, 0 where the ``[B, T]`` bool ``mask`` is false."""
        weights = mask.float()
        if self.name == "seq_mean_token_mean":
            return weights / weights.sum(1, keepdim=True).clamp_min(1)
        if self.max_length is not None:
            return weights / self.max_length
        return weights

    def count(self, mask: Tensor) -> Tensor:
        """This micro-batch's share of the denominator: a float32 scalar. Rows without trained tokens count nothing."""
        return (mask if self.name == "token_mean" else mask.any(1)).sum().float()

    def __call__(self, token_loss: Tensor, mask: Tensor, *, denom: Tensor) -> Tensor:
        """Reduce ``[B, T]`` to a scalar; 0 when ``denom`` says that the step trains nothing."""
        kept = token_loss.masked_fill(~mask, 0)
        return (self.weights(mask) * kept).sum() / denom.clamp_min(1)


def masked_ratio(values: Tensor, mask: Tensor) -> Ratio:
    """Sum of ``values`` and number of elements where ``mask`` is true, detached."""
    return Ratio(values.detach().float().masked_fill(~mask, 0).sum(), mask.sum().float())


def masked_max(values: Tensor, mask: Tensor) -> Maximum:
    """Largest of ``values`` where ``mask`` is true."""
    shown = values.detach().float().masked_fill(~mask, -torch.inf)
    largest = shown.amax() if mask.numel() else shown.new_tensor(-torch.inf)
    return Maximum(largest, mask.any().float())


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """``[B, 1]`` mean of each row over the true tokens of ``mask``; 0 for a row without any."""
    return values.masked_fill(~mask, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
