"""Laying out, splitting and collecting rollouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lqrl.data import UniformBudget
from lqrl.engines.base import StaleEngineError
from lqrl.rewards import RewardSum, RewardTerm
from lqrl.rollouts import (
    Refill,
    check_fresh,
    collect,
    microbatches,
    minibatches,
    pad_rollouts,
    rollout_metrics,
    to_train_batch,
)
from lqrl.testing import BernoulliEngine, ScriptedEngine
from lqrl.types import Advantages, Completion, Prompt, SamplingParams


def completion(prompt_id: int, index: int, tokens: list[int], logprobs: list[float]) -> Completion:
    return Completion(
        prompt_id, index, torch.tensor(tokens), torch.tensor(logprobs), torch.zeros(len(tokens)), "stop", 3, "text"
    )


def two_groups() -> tuple[list[Prompt], list[list[Completion]]]:
    prompts = [Prompt(10, (5, 6)), Prompt(11, (7,))]
    groups = [
        [completion(10, 0, [8, 2], [-0.1, -0.2]), completion(10, 1, [9, 9, 2], [-0.3, -0.4, -0.5])],
        [completion(11, 0, [4], [-0.6])],
    ]
    return prompts, groups


def padded():
    prompts, groups = two_groups()
    zeros = torch.zeros(3)
    return pad_rollouts(
        prompts, groups, rewards=torch.tensor([1.0, 0.0, 0.5]), reward_terms=zeros[:, None], accuracy=zeros,
        term_names=("r",), pad_token_id=0,
    )  # fmt: skip


def test_rows_are_prompt_then_completion_then_padding():
    batch = padded()
    assert batch.input_ids.tolist() == [[5, 6, 8, 2, 0], [5, 6, 9, 9, 2], [7, 4, 0, 0, 0]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.completion_mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]


def test_a_column_holds_the_logprob_of_its_own_token():
    batch = padded()
    expected = torch.tensor([[0, 0, -0.1, -0.2, 0], [0, 0, -0.3, -0.4, -0.5], [0, -0.6, 0, 0, 0]])
    assert torch.equal(batch.rollout_logprobs, expected)


def test_groups_and_identities_follow_the_rows():
    batch = padded()
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.prompt_ids.tolist() == [10, 10, 11]
    assert batch.sample_index.tolist() == [0, 1, 0]
    assert batch.lengths.tolist() == [2, 3, 1]


def test_a_train_batch_drops_rows_and_unused_columns():
    keep = torch.tensor([True, False, True])
    batch = to_train_batch(padded(), Advantages(torch.tensor([2.0, 9.0, -1.0]), keep))
    assert batch.input_ids.tolist() == [[5, 6, 8, 2], [7, 4, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, 2, 2], [0, -1, 0, 0]]


def test_dropped_tokens_leave_the_loss_mask():
    token_keep = torch.ones(3, 5, dtype=torch.bool)
    token_keep[0, 2] = False
    batch = to_train_batch(padded(), Advantages(torch.ones(3), torch.ones(3, dtype=torch.bool), token_keep))
    assert batch.loss_mask[0].int().tolist() == [0, 0, 0, 1, 0]


def test_a_train_batch_of_nothing_has_no_rows():
    batch = to_train_batch(padded(), Advantages(torch.zeros(3), torch.zeros(3, dtype=torch.bool)))
    assert len(batch) == 0
    assert batch.loss_mask.sum() == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_microbatches_hold_every_row_once_within_the_budget(lengths, budget):
    sizes = torch.tensor(lengths)
    groups = microbatches(sizes, budget)
    assert sorted(torch.cat(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or int(sizes[group].sum()) <= budget


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 200))
def test_microbatches_are_as_few_and_as_even_as_sorted_rows_can_be(lengths, budget):
    def filled(most):
        groups = []
        for length in sorted(lengths, reverse=True):
            if not groups or (length and sum(groups[-1]) + length > most):
                groups.append([])
            groups[-1].append(length)
        return groups

    sizes = torch.tensor(lengths)
    made = [sizes[group].tolist() for group in microbatches(sizes, budget)]
    assert len(made) == len(filled(budget))
    least = next(most for most in range(budget + 1) if len(filled(most)) <= len(made))
    assert made == filled(least)


def test_rows_without_tokens_are_no_micro_batch_of_their_own():
    assert [group.tolist() for group in microbatches(torch.tensor([0, 7, 0, 3]), 5)] == [[1], [3, 0, 2]]
    assert [group.tolist() for group in microbatches(torch.tensor([0, 7, 0]), 5)] == [[1, 0, 2]]


def test_no_micro_batch_is_left_with_a_few_tokens():
    groups = microbatches(torch.full((100,), 10), 330)  # 33, 33, 33 and 1 rows if each were filled
    assert [len(group) for group in groups] == [25, 25, 25, 25]


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 5))
def test_minibatches_partition_the_rows_and_depend_on_the_seed_alone(rows, count, seed):
    parts = minibatches(rows, count, seed=seed)
    assert len(parts) == count
    assert sorted(torch.cat(parts).tolist()) == list(range(rows))
    assert all(torch.equal(a, b) for a, b in zip(parts, minibatches(rows, count, seed=seed), strict=True))


def test_an_engine_without_weights_or_behind_is_refused():
    engine = ScriptedEngine(lambda p, i: [1])
    with pytest.raises(StaleEngineError, match="EngineRefresh"):
        check_fresh(engine, 0, 0)
    engine.policy_version = 3
    check_fresh(engine, 3, 0)
    check_fresh(engine, 5, 2)
    with pytest.raises(StaleEngineError, match="version 3, the learner is at 5"):
        check_fresh(engine, 5, 1)


def first_token(prompt: Prompt, completions) -> list[float]:
    return [float(c.token_ids[0] == 1) for c in completions]


REWARD = RewardSum([RewardTerm(first_token, "right")])


def gather(engine, prompts, **options):
    return collect(
        engine, prompts, SamplingParams(max_tokens=2), REWARD, decode=str, budget=UniformBudget(4),
        pad_token_id=0, seed=1, **options,
    )  # fmt: skip


def prompts_of(*ids: int) -> list[Prompt]:
    return [Prompt(i, (1, 2)) for i in ids]


def test_collect_scores_and_decodes_every_completion():
    rollouts = gather(ScriptedEngine(lambda p, i: [1 if i < p.id else 0]), prompts_of(1, 3))
    assert rollouts.batch.rewards.tolist() == [1, 0, 0, 0, 1, 1, 1, 0]
    assert rollouts.outcomes == [(1, 1.0, 4), (3, 3.0, 4)]
    assert rollouts.groups[0][0].text == "[1]"
    assert rollouts.generated_tokens == 8


def test_refill_replaces_groups_without_a_signal():
    # Pass rates 0 and 1 teach nothing; 2 prompts are wanted, so 20 and 21 take the places of 10 and 11.
    engine = ScriptedEngine(lambda p, i: [1 if (p.id >= 20 and i == 0) or p.id == 11 else 0])
    fresh = iter([prompts_of(20, 21)])
    rollouts = gather(engine, prompts_of(10, 11), refill=Refill(3), draw_more=lambda n: next(fresh) if n else None)
    assert [p.id for p in rollouts.prompts] == [20, 21]
    assert [o[0] for o in rollouts.outcomes] == [10, 11, 20, 21]
    assert rollouts.rounds == 2


def test_refill_stops_at_its_cap_and_fills_up_with_what_it_has():
    engine = ScriptedEngine(lambda p, i: [0])
    ids = iter(range(100, 200))
    rollouts = gather(
        engine, prompts_of(1, 2), refill=Refill(3), draw_more=lambda n: prompts_of(*[next(ids) for _ in range(n)])
    )
    assert rollouts.rounds == 3
    assert rollouts.generated_groups == 6
    assert [p.id for p in rollouts.prompts] == [1, 2]


def test_refill_can_be_told_to_raise_when_exhausted():
    with pytest.raises(RuntimeError, match="2 of 2 groups still have equal rewards"):
        gather(
            ScriptedEngine(lambda p, i: [0]), prompts_of(1, 2),
            refill=Refill(1, on_exhausted="raise"), draw_more=lambda n: [],
        )  # fmt: skip


def test_refill_judges_accuracy_not_the_shaped_reward():
    shaped = RewardSum(
        [RewardTerm(first_token, "right"), RewardTerm(lambda p, cs: [0.1 * c.sample_index for c in cs], "bonus")]
    )
    rollouts = collect(
        ScriptedEngine(lambda p, i: [0]), prompts_of(1), SamplingParams(max_tokens=1), shaped, decode=str,
        budget=UniformBudget(4), pad_token_id=0, seed=1, refill=Refill(2), draw_more=lambda n: None,
    )  # fmt: skip
    assert float(rollouts.batch.rewards.std()) > 0
    metrics = rollout_metrics(rollouts)
    assert float(metrics["rollout/equal_reward_fraction"].value) == 1.0


def test_rollout_metrics_name_every_term():
    rollouts = gather(BernoulliEngine({1: 1.0, 2: 0.0}), prompts_of(1, 2))
    values = {k: float(v.value) for k, v in rollout_metrics(rollouts).items()}
    assert values["rollout/reward"] == values["rollout/accuracy"] == values["rollout/reward_right"] == 0.5
    assert values["rollout/length"] == 1.0
    assert values["rollout/equal_reward_fraction"] == 1.0
