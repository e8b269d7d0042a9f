"""Group-relative advantages: rewards compared with those of the same prompt's other completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lqrl.types import Advantages, RolloutBatch


class AdvantageFn(ABC):
    """Turns what happened into credit; may drop rows and tokens before the learner's forward pass."""

    @abstractmethod
    def __call__(self, batch: RolloutBatch) -> Advantages:
        """Credit for the rows of ``batch``. All rows of a group must be in it."""
        ...


@dataclass(frozen=True)
class GRPO(AdvantageFn):
    """``A_i = (R_i - mean) / (std + std_eps)`` over the group (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The standard deviation has Bessel's correction, as in verl and TRL. Rows of a group whose rewards are all equal have
    advantage exactly 0 and are dropped, so they leave the loss's denominator (DAPO, arXiv 2503.14476; its refill is the
    sampler's). Rows without a reward (NaN) stay out of the baseline, get advantage 0 and are dropped.

    Attributes:
        std_eps: added to the standard deviation.
        drop_zero_variance: whether rows of constant groups are dropped.
    """

    std_eps: float = 1e-6
    drop_zero_variance: bool = True

    def __call__(self, batch: RolloutBatch) -> Advantages:
        """Advantages ``[B]`` of ``batch``.

        Raises:
            ValueError: when a group has one row only.
        """
        groups = _Groups.of(batch)
        return groups.advantages(groups.deviation / (groups.std + self.std_eps), drop_constant=self.drop_zero_variance)


@dataclass(frozen=True)
class DrGRPO(AdvantageFn):
    """``A_i = R_i - mean`` over the group (Dr. GRPO, arXiv 2503.20783); use with ``seq_mean_token_sum_norm``.

    Constant groups stay by default: the estimate is unbiased only while the denominator does not depend on the rewards.

    Attributes:
        drop_zero_variance: whether rows of constant groups are dropped (less to compute, larger steps).
    """

    drop_zero_variance: bool = False

    def __call__(self, batch: RolloutBatch) -> Advantages:
        """Advantages ``[B]`` of ``batch``.

        Raises:
            ValueError: when a group has one row only.
        """
        groups = _Groups.of(batch)
        return groups.advantages(groups.deviation, drop_constant=self.drop_zero_variance)


@dataclass(frozen=True)
class RLOO(AdvantageFn):
    """``A_i = R_i - mean of the others``, computed as ``n / (n - 1) * (R_i - mean)`` (leave-one-out, arXiv 2402.14740).

    Attributes:
        drop_zero_variance: whether rows of constant groups are dropped; see `DrGRPO`.
    """

    drop_zero_variance: bool = False

    def __call__(self, batch: RolloutBatch) -> Advantages:
        """Advantages ``[B]`` of ``batch``.

        Raises:
            ValueError: when a group has one row only.
        """
        groups = _Groups.of(batch)
        leave_one_out = groups.size / (groups.size - 1).clamp_min(1)
        return groups.advantages(leave_one_out * groups.deviation, drop_constant=self.drop_zero_variance)


@dataclass(frozen=True)
class _Groups:
    """Statistics of each row's group, over rows that have a reward.

    Sums are fp64, so that the order of rows does not show in fp32 results. All fields are ``[B]`` but the last.
    """

    scored: Tensor
    size: Tensor
    deviation: Tensor
    std: Tensor
    constant: Tensor
    zero_variance_fraction: float

    @classmethod
    def of(cls, batch: RolloutBatch) -> _Groups:
        ids, index = batch.group_ids.unique(return_inverse=True)
        _check_sizes(ids, index)
        scored = batch.rewards.isfinite()
        rewards = batch.rewards.double().masked_fill(~scored, 0)

        def total(x: Tensor) -> Tensor:
            return x.new_zeros(len(ids)).index_add_(0, index, x)

        def extreme(fill: float, reduce: str) -> Tensor:
            filled = rewards.masked_fill(~scored, fill)
            return filled.new_full((len(ids),), fill).scatter_reduce_(0, index, filled, reduce)

        size = total(scored.double())
        deviation = (rewards - (total(rewards) / size.clamp_min(1))[index]).masked_fill(~scored, 0)
        std = (total(deviation.square()) / (size - 1).clamp_min(1)).sqrt()
        # Equality, not std == 0: no rounding to argue about. A group without rewards is constant, too.
        constant = extreme(-torch.inf, "amax") <= extreme(torch.inf, "amin")
        fraction = constant.double().mean().item() if len(ids) else 0.0
        return cls(scored, size[index], deviation, std[index], constant[index], fraction)

    def advantages(self, values: Tensor, *, drop_constant: bool) -> Advantages:
        keep = self.scored & ~self.constant if drop_constant else self.scored
        metrics = {
            "adv/zero_variance_fraction": self.zero_variance_fraction,
            "adv/unscored_fraction": _fraction(~self.scored),
            "adv/kept_fraction": _fraction(keep),
        }
        return Advantages(values.masked_fill(self.constant | ~self.scored, 0).float(), keep, metrics=metrics)


def _check_sizes(ids: Tensor, index: Tensor) -> None:
    alone = torch.bincount(index, minlength=len(ids)) == 1
    if alone.any():
        raise ValueError(
            f"group {ids[alone][0].item()} has one completion ({int(alone.sum())} of {len(ids)} groups do): "
            "group baselines need group_size >= 2"
        )


def _fraction(flags: Tensor) -> float:
    return flags.double().mean().item() if len(flags) else 0.0
