from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lqrl.data import VADE, SamplerFactory, Uniform, UniformSampler, VADESampler
from lqrl.data.vade import expected_information, information, sample_beta

IDS = [1000 + 7 * i for i in range(20)]  # ids are not indices
FACTORIES = [Uniform(), VADE()]


def vade(size: int = 5, *, batch_size: int = 2, seed: int = 0) -> VADESampler:
    return VADE()(IDS[:size], batch_size=batch_size, iterations=3, seed=seed)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_information_has_the_worked_values() -> None:
    # I(.13) = .13 * .87^2, I(.32) = .32 * .68^2, I(.9) = .9 * .1^2, I(.5) = .125, I(1/3) = 4/27
    torch.testing.assert_close(
        information(f64(0.13, 0.32, 0.9, 0.5, 1 / 3)), f64(0.098397, 0.147968, 0.009, 0.125, 4 / 27), rtol=0, atol=1e-9
    )


def test_information_is_largest_at_one_third() -> None:
    grid = torch.linspace(0, 1, 3001, dtype=torch.float64)
    assert grid[information(grid).argmax()].item() == pytest.approx(1 / 3, abs=1e-9)


@pytest.mark.parametrize(
    ("before", "successes", "after", "mean", "expected"),
    [
        # alpha = .2 * .1 + 1, beta = .2 * 8.4 + 7; mean = 2.02 / 11.7
        ((0.1, 8.4), 1, (1.02, 8.68), 0.172650, 0.102586),
        ((2.7, 5.3), 4, (4.54, 5.06), 0.477586, 0.119239),
        ((0.0, 0.0), 0, (0.0, 8.0), 0.1, 0.068182),
        ((0.0, 0.0), 8, (8.0, 0.0), 0.9, 0.013636),
    ],
)
def test_tried_prompts_forget_and_learn(before, successes: int, after, mean: float, expected: float) -> None:
    sampler = vade()
    sampler.alpha[3], sampler.beta[3] = before
    sampler.observe([IDS[3]], [successes], [8])
    torch.testing.assert_close(torch.stack([sampler.alpha[3], sampler.beta[3]]), f64(*after))
    assert sampler.beliefs([IDS[3]]).item() == pytest.approx(mean, abs=5e-7)
    assert expected_information(sampler.alpha, sampler.beta)[3].item() == pytest.approx(expected, abs=5e-7)


def test_other_prompts_drift_towards_the_uniform_prior() -> None:
    sampler = vade()
    sampler.alpha[1], sampler.beta[1] = 9.0, 0.2
    sampler.observe([IDS[0]], [1], [8])
    # 9 * .999 and .2 * .999
    torch.testing.assert_close(torch.stack([sampler.alpha[1], sampler.beta[1]]), f64(8.991, 0.1998))
    assert expected_information(sampler.alpha, sampler.beta)[1].item() == pytest.approx(0.014653, abs=5e-7)
    half_life = 693  # ln .5 / ln .999 = 692.8 iterations
    for _ in range(half_life - 1):
        sampler.observe([IDS[0]], [1], [8])
    assert sampler.alpha[1].item() == pytest.approx(4.5, rel=1e-3)


def test_a_sequence_of_outcomes_has_the_worked_posteriors() -> None:
    sampler = vade()
    seen = []
    for successes in (2, 3, 4, 8):
        sampler.observe([IDS[0]], [successes], [8])
        seen += [sampler.alpha[0].item(), sampler.beta[0].item()]
    # .2 * 2 + 3 = 3.4 and .2 * 6 + 5 = 6.2, and so on
    torch.testing.assert_close(f64(*seen), f64(2, 6, 3.4, 6.2, 4.68, 5.24, 8.936, 1.048))


def test_evidence_settles_at_ten_pseudo_counts() -> None:
    sampler = vade()
    for _ in range(50):
        sampler.observe([IDS[0]], [4], [8])
    assert (sampler.alpha + sampler.beta)[0].item() == pytest.approx(10)  # G / (1 - .2)


def test_beta_draws_have_the_right_moments() -> None:
    a, b = f64(1.0, 2.02, 9.0, 1.0), f64(1.0, 9.68, 1.1998, 9.0)
    n = 20_000
    draws = sample_beta(a.repeat(n), b.repeat(n), torch.Generator().manual_seed(0)).view(n, 4)
    # standard error of the mean is below .3 / sqrt(20000) = .002
    torch.testing.assert_close(draws.mean(0), a / (a + b), rtol=0, atol=0.008)
    torch.testing.assert_close(draws.var(0), a * b / ((a + b).square() * (a + b + 1)), rtol=0.06, atol=0)


def test_selection_rates_match_the_worked_simulation() -> None:
    sampler = vade()
    sampler.alpha[:] = f64(0, 1.02, 4.54, 8.991, 0)
    sampler.beta[:] = f64(0, 8.68, 5.06, 0.1998, 8)
    counts = torch.zeros(5)
    for _ in range(1500):
        counts[sampler.draw(2)] += 1
    # from 200k draws of the five posteriors above, best two of I; the standard error here is .013 at most
    torch.testing.assert_close(counts / 1500, torch.tensor([0.418, 0.572, 0.762, 0.009, 0.239]), rtol=0, atol=0.05)


def test_vade_finds_more_mixed_groups_than_uniform_on_a_bandit() -> None:
    def share(factory: SamplerFactory) -> float:
        generator = torch.Generator().manual_seed(1)
        rates = torch.rand(300, generator=generator) ** 3  # mostly hopeless prompts
        sampler = factory(range(300), batch_size=30, iterations=60, seed=0)
        mixed = 0
        for step, batch in enumerate(sampler):
            won = torch.binomial(torch.full((30,), 8.0), rates[batch], generator=generator)
            sampler.observe(batch, won.tolist(), [8] * 30)
            mixed += int(((won > 0) & (won < 8)).sum()) if step >= 20 else 0
        return mixed / (40 * 30)

    assert share(VADE()) > share(Uniform()) + 0.1


def test_fractional_successes_are_pseudo_counts() -> None:
    sampler = vade()
    sampler.observe([IDS[0]], [2.5], [4])
    assert (sampler.alpha[0].item(), sampler.beta[0].item()) == (2.5, 1.5)


def test_order_of_outcomes_does_not_matter() -> None:
    one, other = vade(), vade()
    one.observe(IDS[:3], [1, 2, 3], [8, 8, 8])
    other.observe(IDS[2::-1], [3, 2, 1], [8, 8, 8])
    assert torch.equal(one.alpha, other.alpha)
    assert torch.equal(one.beta, other.beta)


def test_no_trials_is_no_evidence() -> None:
    sampler = vade()
    sampler.alpha[0] = 1.0
    sampler.observe([IDS[0]], [0], [0])
    assert sampler.alpha[0].item() == 0.999
    assert sampler.metrics()["sampler/coverage"] == 0


@pytest.mark.parametrize("factory", FACTORIES)
def test_batches_are_distinct_indices(factory: SamplerFactory) -> None:
    sampler = factory(IDS, batch_size=7, iterations=30, seed=3)
    for batch in sampler:
        assert len(set(batch)) == 7
        assert all(0 <= i < len(IDS) for i in batch)


def test_uniform_sees_everything_once_an_epoch() -> None:
    sampler = Uniform()(IDS, batch_size=5, iterations=8, seed=0)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 8
    order = [index for batch in batches for index in batch]
    first, second = order[:20], order[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(0, 5))
def test_uniform_counts_stay_within_two_of_each_other(counts: list[int], seed: int) -> None:
    sampler = UniformSampler(IDS[:6], batch_size=1, iterations=1, seed=seed)
    drawn = [index for count in counts for index in sampler.draw(count)]
    times = [drawn.count(i) for i in range(6)]
    assert max(times) - min(times) <= 2


@pytest.mark.parametrize("factory", FACTORIES)
def test_further_draws_leave_out_the_excluded(factory: SamplerFactory) -> None:
    sampler = factory(IDS, batch_size=12, iterations=1, seed=0)
    (batch,) = list(sampler)
    assert sorted(batch + sampler.draw(8, exclude=batch)) == list(range(20))
    with pytest.raises(ValueError, match="cannot draw 9 of 20 prompts with 12 excluded"):
        sampler.draw(9, exclude=batch)


def test_a_batch_is_drawn_when_asked_for() -> None:
    sampler = vade(20, batch_size=4)
    epoch = iter(sampler)
    next(epoch)
    assert sampler.iteration == 1
    for i in range(20):  # what is observed now decides the next batch
        if i not in (2, 5, 11, 17):
            sampler.beta[i], sampler.alpha[i] = 0.0, 1e6
    assert sorted(next(epoch)) == [2, 5, 11, 17]


def play(sampler, iterations: int) -> list[list[int]]:
    batches = []
    while len(batches) < iterations:
        for batch in sampler:
            sampler.observe([sampler.ids[i] for i in batch], [i % 4 for i in batch], [4] * len(batch))
            batches.append(batch + sampler.draw(2, exclude=batch))
            if len(batches) == iterations:
                break
    return batches


def saved(sampler) -> dict:
    """The state as a weights-only checkpoint returns it."""
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_resume_continues_bit_for_bit(factory: SamplerFactory, stop: int) -> None:
    def build(seed: int):
        return factory(IDS, batch_size=6, iterations=3, seed=seed)

    whole = build(0)
    expected = play(whole, 8)
    first = build(0)
    head = play(first, stop)
    second = build(99)
    second.load_state_dict(saved(first))
    assert head + play(second, 8 - stop) == expected
    assert torch.equal(second.generator.get_state(), whole.generator.get_state())
    assert all(torch.equal(a, b) for a, b in zip(second.tensors().values(), whole.tensors().values(), strict=True))
    assert second.iteration == whole.iteration == 8


def test_a_saved_state_does_not_change_with_the_sampler() -> None:
    sampler = vade()
    state = sampler.state_dict()
    play(sampler, 2)
    assert state["tensors"]["beta"].sum() == 0
    assert not state["seen"].any()


@pytest.mark.parametrize("factory", FACTORIES)
def test_seed_decides_the_draws(factory: SamplerFactory) -> None:
    def batches(seed: int) -> list[list[int]]:
        return play(factory(IDS, batch_size=6, iterations=3, seed=seed), 3)

    assert batches(1) == batches(1) != batches(2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Uniform()(IDS[:5], batch_size=2, iterations=3, seed=0), "state of a VADESampler"),
        (lambda: vade(6), "knows 5 prompts, this run has 6"),
        (lambda: VADE()(IDS[1:6], batch_size=2, iterations=3, seed=0), "or other ones"),
    ],
)
def test_a_state_of_something_else_is_refused(other: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        other().load_state_dict(vade(5).state_dict())


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(
    ("ids", "successes", "trials", "message"),
    [
        ([IDS[0]], [9], [8], r"9.0 successes in 8.0 trials"),
        ([IDS[0]], [-1], [8], r"-1.0 successes"),
        ([IDS[0]], [float("nan")], [8], r"nan successes"),
        ([IDS[0]], [1], [float("inf")], r"inf trials"),
        ([0], [1], [8], "not in the training data"),
        ([IDS[0], IDS[0]], [1, 1], [8, 8], "name a prompt twice"),
        ([IDS[0]], [1, 1], [8], "give one each"),
    ],
)
def test_impossible_outcomes_are_refused(factory, ids: list, successes: list, trials: list, message: str) -> None:
    sampler = factory(IDS, batch_size=2, iterations=1, seed=0)
    with pytest.raises(ValueError, match=message):
        sampler.observe(ids, successes, trials)


@pytest.mark.parametrize(
    ("ids", "batch_size", "message"),
    [(IDS[:3], 4, "4 prompts an iteration, but the data set has 3"), ([1, 1, 2], 2, "repeat"), (IDS, 0, ">= 1")],
)
def test_impossible_sizes_are_refused(ids: list[int], batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Uniform()(ids, batch_size=batch_size, iterations=1, seed=0)


def test_decays_outside_the_unit_interval_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decays must be in \[0, 1\]"):
        VADE(decay_selected=1.1)


def test_metrics_before_and_after_an_outcome() -> None:
    sampler = vade()
    # all posteriors are uniform: E[I] = 1 * 1 * 2 / (2 * 3 * 4)
    assert sampler.metrics() == pytest.approx(
        {
            "sampler/coverage": 0.0,
            "sampler/belief_mean": 0.5,
            "sampler/belief_std": 0.0,
            "sampler/expected_information": 1 / 12,
        }
    )
    sampler.observe([IDS[0]], [8], [8])
    # one mean of five is .9 now: (4 * .5 + .9) / 5
    assert sampler.metrics()["sampler/belief_mean"] == pytest.approx(0.58)
    assert sampler.metrics()["sampler/coverage"] == pytest.approx(0.2)
