"""The policy update as functions: score a batch, accumulate gradients over micro-batches, sum over ranks.

Nothing here knows Lightning: the Trainer and an explicit Fabric loop pass their own ``forward`` and ``backward``.
Only ``forward`` goes through a wrapper such as DDP or FSDP2.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lqrl.algorithms import Correction, KLPenalty, PolicyLoss
from lqrl.algorithms.correction import effective_share
from lqrl.learner.seeds import derive_seed
from lqrl.phases import phase
from lqrl.quant.triton_use import on_device
from lqrl.rollouts.batching import microbatches, minibatches
from lqrl.types import ClipRange, LossOutput, Maximum, Ratio, TrainBatch

log = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor], Tensor]
Backward = Callable[[Tensor], None]
Watch = Callable[[TrainBatch, Tensor], None]
NoSync = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Objective:
    """What is minimised: a policy loss, the correction of the rollout mismatch, and a KL penalty.

    Attributes:
        loss: the policy loss.
        correction: weights that account for the engine not being the learner.
        kl: penalty towards the reference policy, or ``None``.
    """

    loss: PolicyLoss
    correction: Correction
    kl: KLPenalty | None = None


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_sum(value: Tensor) -> Tensor:
    """Sum over ranks; the value itself with one process."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value


def all_max(value: Tensor) -> Tensor:
    """Maximum over ranks, element by element, NaN if one of them is; the value itself with one process."""
    if world_size() > 1:
        nan = value.isnan()  # which backends compare as they like
        both = torch.stack([value.masked_fill(nan, -math.inf), nan.to(value.dtype)])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        value = both[0].masked_fill(both[1] > 0, math.nan)
    return value


def sum_ratios(ratios: Iterable[dict[str, Ratio]], device: torch.device) -> dict[str, float]:
    """Add micro-batches' and ranks' sums and counts and divide once, and find their maxima.

    At most one collective for all sums and one for all maxima.
    """
    total: dict[str, Ratio] = {}
    for metrics in ratios:
        for name, ratio in metrics.items():
            kind = Maximum if isinstance(ratio, Maximum) else Ratio
            pair = kind(*(part.detach().double().to(device) for part in ratio))
            total[name] = total[name] + pair if name in total else pair
    all_names = _of_all_ranks({name: isinstance(ratio, Maximum) for name, ratio in total.items()})
    values: dict[str, float] = {}
    for kind, nothing, over_ranks in ((Ratio, 0.0, all_sum), (Maximum, -math.inf, all_max)):
        names = sorted(name for name, largest in all_names.items() if largest == (kind is Maximum))
        if names:
            none = torch.tensor([nothing, 0.0], dtype=torch.float64, device=device)
            pairs = over_ranks(torch.stack([torch.stack(tuple(total[n])) if n in total else none for n in names]))
            values |= {n: float(kind(*pair).value) for n, pair in zip(names, pairs, strict=True)}
    return effective_share(values)


def _of_all_ranks(largest: dict[str, bool]) -> dict[str, bool]:
    """Every name of any rank, and whether it is a maximum: one with nothing to learn has fewer than others."""
    if world_size() == 1:
        return largest
    gathered: list[dict[str, bool]] = [{} for _ in range(world_size())]
    dist.all_gather_object(gathered, largest)
    return {name: kind for each in gathered for name, kind in each.items()}


class Part(NamedTuple):
    """A micro-batch.

    Attributes:
        rows: int64, which of the batch, on its device.
        batch: those rows, without columns that no row uses.
        mask: their ``attention_mask`` on the CPU.
    """

    rows: Tensor
    batch: TrainBatch
    mask: Tensor


@phase("score")
@torch.no_grad()
def score(forward: Forward, batch: TrainBatch, *, token_budget: int) -> Tensor:
    """Log-probs ``[B, T]`` of a batch without gradients, in micro-batches; 0 where nothing is trained."""
    scored = torch.zeros_like(batch.rollout_logprobs)
    for make in parts_of(batch, token_budget):
        rows, part, mask = make()
        scored[rows, : part.input_ids.shape[1]] = forward(part.input_ids, mask)
    return scored * batch.loss_mask


def fresh_rows(batch: TrainBatch, policy_version: int) -> Tensor:
    """``[B]`` bool: rows that the policy of ``policy_version`` sampled.

    Raises:
        ValueError: when the batch does not say who sampled it.
    """
    if batch.policy_versions is None:
        raise ValueError(
            "exact mode asks which policy sampled each row, and TrainBatch.policy_versions is None: make the batch "
            "with rollouts.to_train_batch"
        )
    return batch.policy_versions == policy_version


def as_sampled(batch: TrainBatch) -> TrainBatch:
    """The engine's log-probs as those of the old policy; in exact mode a proximal pass gives the same bits."""
    return replace(batch, old_logprobs=batch.behavior_logprobs * batch.loss_mask)


def correct(batch: TrainBatch, objective: Objective) -> tuple[TrainBatch, dict[str, Ratio]]:
    """Fill in correction weights and ACR's clip scale from ``old_logprobs`` and the engine's log-probs."""
    assert batch.old_logprobs is not None
    out = objective.correction(batch.old_logprobs, batch.behavior_logprobs, batch.loss_mask)
    corrected = replace(
        batch, loss_mask=batch.loss_mask & out.keep, correction_weights=out.weights, clip_scale=out.clip_scale
    )
    return corrected, out.metrics


def penalized(
    logprobs: Tensor, batch: TrainBatch, objective: Objective, *, denom: Tensor, clip_range: ClipRange
) -> LossOutput:
    """The policy loss of a micro-batch, and the KL penalty where there is one; see `PolicyLoss`."""
    out = objective.loss(logprobs, batch, denom=denom, clip_range=clip_range)
    if objective.kl is None or batch.ref_logprobs is None:
        return out
    reduction = objective.loss.reduction
    penalty = objective.kl(logprobs, batch.ref_logprobs, batch.loss_mask, denom=denom, reduction=reduction)
    return LossOutput(out.loss + penalty.loss, out.metrics | penalty.metrics)


def parts_of(batch: TrainBatch, token_budget: int) -> list[Callable[[], Part]]:
    """The micro-batches of a batch, each made when it is called, without a look at the GPU: the host has the masks.

    Args:
        batch: on any device.
        token_budget: most real tokens of one.
    """
    device = batch.input_ids.device
    masks = batch.attention_mask.bool().cpu().numpy()  # why numpy: see `lqrl.modeling.backbone.pack`
    lengths = masks.sum(1)

    def make(rows: Tensor) -> Part:
        index, used = on_device(rows, device), masks[rows.numpy()].any(0).nonzero()[0]
        width = int(used[-1]) + 1 if len(used) else 1
        part = batch.rows(index)
        cut = {
            name: value[:, :width]  # no row uses the columns behind
            for name, value in vars(part).items()
            if isinstance(value, Tensor) and value.dim() == 2
        }
        return Part(index, replace(part, **cut), torch.from_numpy(masks[rows.numpy(), :width]))

    return [partial(make, rows) for rows in microbatches(torch.from_numpy(lengths), token_budget)]


@phase("forward_backward")
def accumulate_gradients(
    forward: Forward,
    batch: TrainBatch,
    objective: Objective,
    *,
    clip_range: ClipRange,
    token_budget: int,
    backward: Backward,
    no_sync: NoSync = contextlib.nullcontext,
    anchor: Callable[[], Tensor],
    watch: Watch | None = None,
) -> list[dict[str, Ratio]] | None:
    """Backward passes of one optimizer step; the gradient is that of the whole minibatch over all ranks.

    Args:
        forward: ``(input_ids, attention_mask) -> logprobs [b, T]`` with gradients.
        batch: this rank's minibatch; ``old_logprobs`` may be ``None`` when the rollout's policy is the current one:
            then the old policy is the detached current one, and its forward pass is saved.
        objective: loss, correction, penalty.
        clip_range: clip widths of this iteration.
        token_budget: most real tokens a forward pass.
        backward: runs the backward pass of a scalar.
        no_sync: context that keeps gradients local; every micro-batch but the last runs in it.
        anchor: a zero that went through ``forward``, so that a rank with no rows still joins the reduction.
        watch: is given each micro-batch and its log-probs, before their backward pass.

    Returns:
        The metrics of each micro-batch, none on a rank without rows; or ``None``, on every rank, when no rank has
        anything to learn. Then there are no gradients.
    """
    reduction = objective.loss.reduction
    corrected_ahead = batch.old_logprobs is not None
    metrics: list[dict[str, Ratio]] = []
    if corrected_ahead:
        batch, correction_metrics = correct(batch, objective)
        metrics.append(correction_metrics)
    # The denominator is that of the whole step, known before the first forward; a token that the correction rejects
    # on the fly (no proximal pass) stays in it, one rejected ahead has left it.
    denom = all_sum(reduction.count(batch.loss_mask).float())
    if float(denom) == 0.0:
        return None
    scale = float(world_size())  # DDP and FSDP average over ranks; the denominator already counts all of them
    parts = parts_of(batch, token_budget)
    if not parts:
        backward(anchor())
        return metrics
    for i, make in enumerate(parts):
        _, part, mask = make()
        with no_sync() if i + 1 < len(parts) else contextlib.nullcontext():
            logprobs = forward(part.input_ids, mask)
            if watch is not None:
                watch(part, logprobs.detach())
            if not corrected_ahead:
                part, correction_metrics = correct(replace(part, old_logprobs=logprobs.detach()), objective)
                metrics.append(correction_metrics)
            out = penalized(logprobs, part, objective, denom=denom, clip_range=clip_range)
            metrics.append(out.metrics)
            backward(out.loss * scale)
    return metrics


def update_policy(
    batch: TrainBatch,
    objective: Objective,
    *,
    forward: Forward,
    optimizer: Any,
    backward: Backward,
    no_sync: NoSync,
    parameters: Sequence[nn.Parameter],
    clip_range: ClipRange,
    token_budget: int,
    num_minibatches: int,
    num_epochs: int,
    max_grad_norm: float | None,
    seed: int,
    watch: Watch | None = None,
) -> dict[str, float]:
    """All optimizer steps of one iteration: ``num_epochs`` passes over ``num_minibatches`` shuffled minibatches.

    Without ``old_logprobs`` the old policy is the detached current one until the first step, and what the engine said
    from then on: several steps need rollouts whose log-probs are the learner's, see `as_sampled`. The mismatch is then
    measured before the first step.

    A step without a signal on any rank, or whose gradients are not finite, is skipped, counted and reported.

    Args:
        watch: see `accumulate_gradients`; called before the first step only.

    Returns:
        Metrics averaged over tokens, micro-batches, steps and ranks.
    """
    device = parameters[0].device
    # A rank without rows still takes part: its wrapper must see a forward pass, or the others wait for ever.
    dummy = torch.zeros(1, 2, dtype=torch.long, device=device), torch.ones(1, 2, dtype=torch.bool, device=device)
    collected: list[dict[str, Ratio]] = []
    norms: list[Tensor] = []
    for epoch in range(num_epochs):
        for rows in minibatches(len(batch), num_minibatches, seed=derive_seed(seed, epoch)):
            optimizer.zero_grad(set_to_none=True)
            part, moved = batch.rows(rows), bool(norms)
            known = moved and part.old_logprobs is None
            metrics = accumulate_gradients(
                forward,
                as_sampled(part) if known else part,
                objective,
                clip_range=clip_range,
                token_budget=token_budget,
                backward=backward,
                no_sync=no_sync,
                anchor=lambda: forward(*dummy).sum() * 0.0,
                watch=None if moved else watch,
            )
            collected += map(_without_mismatch, metrics or []) if known else metrics or []
            if metrics is not None:
                norms += _step(optimizer, parameters, max_grad_norm)
    lr = float(optimizer.param_groups[0]["lr"])
    return sum_ratios(collected, device) | _summary(batch, norms, num_epochs * num_minibatches) | {"train/lr": lr}


@phase("step")
def _step(optimizer: Any, parameters: Sequence[nn.Parameter], max_grad_norm: float | None) -> list[Tensor]:
    """Clip and step; the gradient norm, or nothing where no step was taken."""
    norm = clip_gradients_(parameters, max_grad_norm)
    # A norm of 0 is no signal either: the optimizer would still move by its momentum.
    if not bool(torch.isfinite(norm)) or float(norm) == 0:
        return []
    optimizer.step()
    return [norm]


def _summary(batch: TrainBatch, norms: Sequence[Tensor], steps: int) -> dict[str, float]:
    """What ``steps`` optimizer steps did; ``norms`` are the gradient norms of those that were taken."""
    if len(norms) < steps:
        log.warning("%d of %d optimizer steps skipped: no signal, or gradients not finite", steps - len(norms), steps)
    return {
        "train/grad_norm": float(torch.stack(list(norms)).mean()) if norms else 0.0,
        "train/skipped_steps": float(steps - len(norms)),
        "train/proximal_skipped": float(batch.old_logprobs is None),
        "train/rows": float(all_sum(torch.tensor(float(len(batch)), device=batch.input_ids.device))),
    }


def _without_mismatch(metrics: dict[str, Ratio]) -> dict[str, Ratio]:
    """A distance from the engine to itself is no measurement."""
    return {name: ratio for name, ratio in metrics.items() if not name.startswith("mismatch/")}


def step_schedule(scheduler: Any) -> None:
    """Step a schedule of the learning rate, if there is one, after an iteration, also one without an optimizer step."""
    if scheduler is None:
        return
    with warnings.catch_warnings():  # torch's, of the latter
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        scheduler.step()


def clip_gradients_(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
    """Clip to a global norm, or only measure it with ``None``; returns the norm before."""
    limit = float("inf") if max_norm is None else max_norm
    norm = nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
