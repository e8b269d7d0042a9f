"""Group advantages: worked numbers, and what happens to odd groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.algorithms import GRPO, RLOO, AdvantageFn, DrGRPO
from lqrl.types import RolloutBatch

ALL: list[AdvantageFn] = [GRPO(), DrGRPO(), RLOO()]
NAN = float("nan")


def rollouts(rewards: list[float], group_ids: list[int] | None = None) -> RolloutBatch:
    rows = len(rewards)
    ids = torch.tensor(group_ids or [0] * rows)
    reward = torch.tensor(rewards, dtype=torch.float32)
    tokens, flags = torch.ones(rows, 2, dtype=torch.int64), torch.ones(rows, 2, dtype=torch.bool)
    return RolloutBatch(
        input_ids=tokens,
        attention_mask=flags,
        completion_mask=flags,
        rollout_logprobs=torch.zeros(rows, 2),
        rollout_log_mass=torch.zeros(rows, 2),
        rewards=reward,
        reward_terms=reward[:, None],
        accuracy=reward,
        prompt_ids=ids,
        group_ids=ids,
        sample_index=torch.arange(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        policy_versions=torch.zeros(rows, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Rewards [1, 0, 0, 1]: mean 1/2, deviations +-1/2, Bessel std sqrt(4 * 1/4 / 3) = 0.577350.
        (GRPO(), 0.866024),  # 0.5 / (0.577350 + 1e-6)
        (GRPO(std_eps=1e-4), 0.865875),
        (DrGRPO(), 0.5),
        (RLOO(), 0.666667),  # 1 - (0 + 0 + 1) / 3
    ],
)
def test_worked_numbers(estimator: AdvantageFn, expected: float) -> None:
    values = estimator(rollouts([1, 0, 0, 1])).values
    assert values.tolist() == pytest.approx([expected, -expected, -expected, expected], abs=1e-6)


def test_groups_may_differ_in_size_and_lie_in_any_order() -> None:
    # Group 9 holds rewards 1, 0 (mean 1/2); group 4 holds 3, 0, 0 (mean 1).
    advantages = DrGRPO()(rollouts([1, 3, 0, 0, 0], [9, 4, 4, 9, 4]))
    assert advantages.values.tolist() == [0.5, 2.0, -1.0, -0.5, -1.0]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), estimator=st.sampled_from(ALL))
def test_rows_may_be_permuted(data: st.DataObject, estimator: AdvantageFn) -> None:
    sizes = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    ids = [group for group, size in enumerate(sizes) for _ in range(size)]
    rewards = data.draw(st.lists(st.floats(-1, 1, width=32), min_size=len(ids), max_size=len(ids)))
    batch = rollouts(rewards, ids)
    order = torch.tensor(data.draw(st.permutations(range(len(ids)))))
    straight, permuted = estimator(batch), estimator(batch.rows(order))
    torch.testing.assert_close(permuted.values, straight.values[order], rtol=1e-6, atol=1e-7)
    assert torch.equal(permuted.keep, straight.keep[order])


@settings(max_examples=30, deadline=None)
@given(rewards=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8), estimator=st.sampled_from(ALL))
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], estimator: AdvantageFn) -> None:
    values = estimator(rollouts(rewards)).values
    assert values.double().sum().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("estimator", ALL, ids=lambda e: type(e).__name__)
def test_constant_group_is_exactly_zero_and_counted(estimator: AdvantageFn) -> None:
    # Any rounding of the mean would be divided by std_eps here, and be as large as real credit.
    advantages = estimator(rollouts([0.1, 0.1, 0.1, 1.0, 0.0], [0, 0, 0, 1, 1]))
    assert advantages.values[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages.values[3:].all()
    assert advantages.metrics["adv/zero_variance_fraction"] == 0.5


def test_tiny_differences_are_not_zero_variance() -> None:
    advantages = GRPO()(rollouts([1.0, 1.0 + 2**-23]))
    assert advantages.metrics["adv/zero_variance_fraction"] == 0
    assert advantages.values[0].item() < 0 < advantages.values[1].item()


@pytest.mark.parametrize(("drop", "kept"), [(True, [False, False, True, True]), (False, [True] * 4)])
@pytest.mark.parametrize("estimator", [GRPO, DrGRPO, RLOO])
def test_constant_groups_are_dropped_on_request(estimator: type[GRPO], drop: bool, kept: list[bool]) -> None:
    advantages = estimator(drop_zero_variance=drop)(rollouts([1, 1, 0, 1], [0, 0, 1, 1]))
    assert advantages.keep.tolist() == kept
    assert advantages.metrics["adv/kept_fraction"] == sum(kept) / 4


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Without the NaN the group is [1, 0]: mean 1/2, Bessel std sqrt(1/2), leave-one-out factor 2.
        (GRPO(std_eps=0), 0.707107),
        (DrGRPO(), 0.5),
        (RLOO(), 1.0),
    ],
)
def test_unscored_rows_stay_out_of_the_baseline(estimator: AdvantageFn, expected: float) -> None:
    advantages = estimator(rollouts([1, NAN, 0]))
    assert advantages.values.tolist() == pytest.approx([expected, 0, -expected], abs=1e-6)
    assert advantages.keep.tolist() == [True, False, True]
    assert advantages.metrics["adv/unscored_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("rewards", [[NAN, 1.0], [NAN, NAN]])
@pytest.mark.parametrize("estimator", ALL, ids=lambda e: type(e).__name__)
def test_fewer_than_two_scored_rows_give_no_credit(estimator: AdvantageFn, rewards: list[float]) -> None:
    advantages = estimator(rollouts(rewards))
    assert advantages.values.tolist() == [0.0, 0.0]
    assert not advantages.keep[0]
    assert advantages.metrics["adv/zero_variance_fraction"] == 1.0


@pytest.mark.parametrize("estimator", ALL, ids=lambda e: type(e).__name__)
def test_group_of_one_names_the_fix(estimator: AdvantageFn) -> None:
    with pytest.raises(ValueError, match=r"group 7 has one completion.*group_size >= 2"):
        estimator(rollouts([1, 0, 1], [3, 3, 7]))


@pytest.mark.parametrize("estimator", ALL, ids=lambda e: type(e).__name__)
def test_no_rows_give_no_advantages(estimator: AdvantageFn) -> None:
    assert estimator(rollouts([1, 0]).rows(torch.zeros(2, dtype=torch.bool))).values.shape == (0,)


def test_the_batch_is_not_changed() -> None:
    batch = rollouts([1, NAN, 0])
    before = batch.rewards.clone()
    GRPO()(batch)
    torch.testing.assert_close(batch.rewards, before, rtol=0, atol=0, equal_nan=True)
