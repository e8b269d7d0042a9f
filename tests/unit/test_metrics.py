"""Torchmetrics: worked numbers, and ranks that add up exactly."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import Metric

from lqrl.metrics import EffectiveSampleSize, MeanRatio, MismatchKL, PassAtK, TokenFraction
from lqrl.types import Ratio


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        # Two prompts with 1 and 3 successes in 4: pass@1 = (1/4 + 3/4) / 2.
        (1, 0.5),
        # 1 - C(3, 2) / C(4, 2) = 1/2 and 1 - C(1, 2) / C(4, 2) = 1.
        (2, 0.75),
        (4, 1.0),
    ],
)
def test_pass_at_k_worked_numbers(k: int, expected: float) -> None:
    metric = PassAtK(k)
    metric.update(torch.tensor([1, 3]), torch.tensor([4, 4]))
    assert metric.compute().item() == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_pass_at_k_is_the_average_over_all_draws(data: st.DataObject) -> None:
    trials = data.draw(st.integers(1, 7))
    successes, k = data.draw(st.integers(0, trials)), data.draw(st.integers(1, trials))
    outcomes = [1] * successes + [0] * (trials - successes)
    draws = [any(draw) for draw in itertools.combinations(outcomes, k)]
    metric = PassAtK(k)
    metric.update(torch.tensor([successes]), torch.tensor([trials]))
    assert metric.compute().item() == pytest.approx(sum(draws) / len(draws), abs=1e-6)


def test_pass_at_k_of_many_trials_does_not_overflow() -> None:
    metric = PassAtK(512)
    metric.update(torch.tensor([1]), torch.tensor([1024]))
    assert metric.compute().item() == pytest.approx(0.5)  # the one success is in half of all draws


def test_pass_at_k_takes_trials_that_differ() -> None:
    metric = PassAtK(1)
    metric.update(torch.tensor([1, 2]), torch.tensor([2, 8]))
    assert metric.compute().item() == pytest.approx(0.375)  # (1/2 + 1/4) / 2


def test_pass_at_k_names_too_few_trials() -> None:
    with pytest.raises(ValueError, match="pass@8 needs at least 8 completions"):
        PassAtK(8).update(torch.tensor([1]), torch.tensor([4]))


def test_pass_at_k_refuses_impossible_counts() -> None:
    with pytest.raises(ValueError, match="between 0 and trials"):
        PassAtK(1).update(torch.tensor([5]), torch.tensor([4]))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # log rho = old - behavior = 0.5, -0.5 (the third token is masked).
        ("k1", 0.0),
        ("k3", 0.127626),  # (e^.5 - 1.5 + e^-.5 - .5) / 2
    ],
)
def test_mismatch_kl_worked_numbers(estimator: str, expected: float) -> None:
    metric = MismatchKL(estimator)  # type: ignore[arg-type]
    old = torch.tensor([[-1.0, -2.0, torch.nan]])
    metric.update(old, torch.tensor([[-1.5, -1.5, 0.0]]), torch.tensor([[True, True, False]]))
    assert metric.compute().item() == pytest.approx(expected, abs=1e-6)


def test_mismatch_kl_has_its_sign() -> None:
    metric = MismatchKL("k1")
    metric.update(torch.tensor([[-3.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool))
    assert metric.compute().item() == 2.0  # log behavior - log old


def test_effective_sample_size_worked_numbers() -> None:
    metric = EffectiveSampleSize()
    metric.update(torch.tensor([4.0, 1.0, 1.0, 99.0]), torch.tensor([True, True, True, False]))
    assert metric.compute().item() == pytest.approx(36 / (3 * 18))  # (4 + 1 + 1)^2 / (3 * (16 + 1 + 1))


def test_effective_sample_size_over_batches_is_not_the_mean_of_theirs() -> None:
    metric = EffectiveSampleSize()
    metric.update(torch.tensor([1.0, 1.0]), torch.ones(2, dtype=torch.bool))
    metric.update(torch.tensor([3.0, 3.0]), torch.ones(2, dtype=torch.bool))
    assert metric.compute().item() == pytest.approx(64 / (4 * 20))  # each batch alone has 1


def test_mean_ratio_weighs_by_count() -> None:
    metric = MeanRatio()
    metric.update(Ratio(torch.tensor(1.0), torch.tensor(1.0)))
    metric.update(Ratio(torch.tensor(0.0), torch.tensor(3.0)))
    assert metric.compute().item() == 0.25


def test_token_fraction_counts_the_mask() -> None:
    metric = TokenFraction()
    metric.update(torch.tensor([[True, False, True]]), torch.tensor([[True, True, False]]))
    assert metric.compute().item() == 0.5


@pytest.mark.parametrize("metric", [PassAtK(1), MismatchKL(), EffectiveSampleSize(), MeanRatio(), TokenFraction()])
@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")
def test_nothing_seen_is_zero(metric: Metric) -> None:
    assert metric.compute().item() == 0


def updates(seed: int) -> list[tuple[Metric, tuple[object, ...]]]:
    """One update for each metric, of a size that depends on the seed."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 + seed
    old, behavior = (torch.randn(rows, 4, generator=generator) for _ in range(2))
    mask = torch.rand(rows, 4, generator=generator) < 0.7
    trials = torch.randint(4, 9, (rows,), generator=generator)
    successes = torch.minimum(torch.randint(0, 9, (rows,), generator=generator), trials)
    return [
        (PassAtK(3), (successes, trials)),
        (MismatchKL("k1"), (old, behavior, mask)),
        (MismatchKL("k3"), (old, behavior, mask)),
        (EffectiveSampleSize(), ((old - behavior).exp(), mask)),
        (MeanRatio(), (Ratio(old[mask].sum(), mask.sum()),)),
        (TokenFraction(), (old > 0, mask)),
    ]


@pytest.mark.parametrize("index", range(6), ids=["pass", "k1", "k3", "ess", "mean", "fraction"])
def test_two_ranks_add_up_to_one(index: int) -> None:
    (first, first_update), (second, second_update), (alone, _) = (updates(seed)[index] for seed in (0, 3, 0))
    first.update(*first_update)
    second.update(*second_update)
    alone.update(*first_update)
    alone.update(*second_update)
    first.merge_state(second)  # what a reduction over ranks does, state by state
    assert math.isfinite(first.compute().item())
    assert torch.equal(first.compute(), alone.compute())


@pytest.mark.parametrize("index", range(6), ids=["pass", "k1", "k3", "ess", "mean", "fraction"])
def test_reset_forgets(index: int) -> None:
    (metric, update), (fresh, fresh_update) = updates(1)[index], updates(2)[index]
    metric.update(*update)
    metric.reset()
    metric.update(*fresh_update)
    fresh.update(*fresh_update)
    assert torch.equal(metric.compute(), fresh.compute())
