"""From what happened to what is learned: pad, drop, split into minibatches, pack into micro-batches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lqrl.types import Advantages, Completion, Prompt, RolloutBatch, TrainBatch


def pad_rollouts(
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Completion]],
    *,
    rewards: Tensor,
    reward_terms: Tensor,
    accuracy: Tensor,
    term_names: tuple[str, ...],
    pad_token_id: int,
    group_offset: int = 0,
) -> RolloutBatch:
    """Lay prompts and completions out as ``[B, T]`` rows, right-padded with ``pad_token_id``.

    Args:
        prompts: P prompts.
        groups: the completions of each, in the same order.
        rewards: ``[B]``, in the order of the flattened groups; ``reward_terms`` and ``accuracy`` likewise.
        reward_terms: ``[B, K]``.
        accuracy: ``[B]``.
        term_names: K names.
        pad_token_id: fills the columns behind a row.
        group_offset: id of the first group, so that batches of several rounds can be joined.
    """
    rows = [(g, p, c) for g, (p, cs) in enumerate(zip(prompts, groups, strict=True)) for c in cs]
    width = max((len(p.input_ids) + len(c.token_ids) for _, p, c in rows), default=1)
    shape = (len(rows), width)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    attention_mask, completion_mask = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    logprobs, log_mass = torch.zeros(shape), torch.zeros(shape)
    token_versions = torch.full(shape, -1, dtype=torch.long)
    for row, (_, prompt, completion) in enumerate(rows):
        start, stop = len(prompt.input_ids), len(prompt.input_ids) + len(completion.token_ids)
        input_ids[row, :start] = torch.tensor(prompt.input_ids)
        input_ids[row, start:stop] = completion.token_ids
        attention_mask[row, :stop] = True
        completion_mask[row, start:stop] = True
        logprobs[row, start:stop] = completion.logprobs
        log_mass[row, start:stop] = completion.log_mass
        versions = completion.token_versions
        token_versions[row, start:stop] = completion.policy_version if versions is None else versions
    return RolloutBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        completion_mask=completion_mask,
        rollout_logprobs=logprobs,
        rollout_log_mass=log_mass,
        rewards=rewards,
        reward_terms=reward_terms,
        accuracy=accuracy,
        prompt_ids=torch.tensor([p.id for _, p, _ in rows], dtype=torch.long),
        group_ids=torch.tensor([g + group_offset for g, _, _ in rows], dtype=torch.long),
        sample_index=torch.tensor([c.sample_index for _, _, c in rows], dtype=torch.long),
        truncated=torch.tensor([c.finish_reason == "length" for _, _, c in rows], dtype=torch.bool),
        policy_versions=torch.tensor([c.policy_version for _, _, c in rows], dtype=torch.long),
        term_names=term_names,
        token_versions=token_versions,
    )


def to_train_batch(rollout: RolloutBatch, advantages: Advantages) -> TrainBatch:
    """Keep the rows and tokens that carry a signal, and cut the columns that no kept row uses."""
    keep = advantages.keep & (rollout.lengths > 0)
    mask = rollout.completion_mask if advantages.token_keep is None else rollout.completion_mask & advantages.token_keep
    values = advantages.values if advantages.values.dim() == 2 else advantages.values[:, None]
    width = int(rollout.attention_mask[keep].sum(1).max()) if bool(keep.any()) else 1
    cut = lambda x: x[keep][:, :width]  # noqa: E731
    return TrainBatch(
        input_ids=cut(rollout.input_ids),
        attention_mask=cut(rollout.attention_mask),
        loss_mask=cut(mask),
        advantages=cut((values * mask).float()),
        rollout_logprobs=cut(rollout.rollout_logprobs),
        rollout_log_mass=cut(rollout.rollout_log_mass),
        group_ids=rollout.group_ids[keep],
        prompt_ids=rollout.prompt_ids[keep],
        policy_versions=rollout.policy_versions[keep],
        token_versions=None if rollout.token_versions is None else cut(rollout.token_versions),
    )


def minibatches(rows: int, count: int, *, seed: int) -> list[Tensor]:
    """Split ``rows`` shuffled rows into ``count`` parts of nearly equal size; a part may be empty.

    The shuffle depends on ``seed`` alone. One part is returned in the original order.
    """
    if count == 1:
        return [torch.arange(rows)]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return list(order.tensor_split(count))


def microbatches(lengths: Tensor, token_budget: int) -> list[Tensor]:
    """Group rows so that each group holds at most ``token_budget`` real tokens; a longer row stands alone.

    There are as few groups as rows of falling length allow, and they are of nearly equal size: a last group of a few
    tokens would take the host as long to launch as a full one, and the GPU would wait.

    Args:
        lengths: ``[B]`` real tokens a row (the forward computes no padding, so padding is not counted).
        token_budget: most tokens of a forward and backward pass.

    Returns:
        Row indices, longest rows first. Rows of similar length meet, which also keeps attention's padded work small.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    ends = list(accumulate(lengths[order].tolist()))
    count = len(_stops(ends, token_budget))
    most = bisect_left(range(token_budget), True, key=lambda most: len(_stops(ends, most)) <= count)
    return [order[a:b] for a, b in pairwise([0, *_stops(ends, most)])]


def _stops(ends: Sequence[int], most: int) -> list[int]:
    """Where groups of rows end that are filled one after the other, to ``most`` tokens or with one longer row.

    Rows without tokens follow any. ``ends``: tokens of all rows up to and with each.
    """
    stops: list[int] = []
    start = before = 0
    while start < len(ends):
        start = bisect_right(ends, max(before + most, ends[start]), start)
        before = ends[start - 1]
        stops.append(start)
    return stops
