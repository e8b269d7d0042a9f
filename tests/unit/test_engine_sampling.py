"""Draws: the distribution, the edges, and the counter-based uniforms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.engines.sampling import draw, mix64, sample, sample_keys, uniforms
from lqrl.types import Prompt, SamplingParams


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def splitmix64_finalizer(x: int) -> int:
    """The published algorithm on Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@given(st.integers(0, 2**64 - 1))
def test_mix64_is_the_splitmix64_finalizer(x: int) -> None:
    assert mix64(torch.tensor(signed(x))).item() == signed(splitmix64_finalizer(x))


def test_mix64_known_value() -> None:
    # The first output of splitmix64 seeded with 0 is the finalizer of 0x9E3779B97F4A7C15: 0xE220A8397B1DCDAF.
    assert mix64(torch.tensor(signed(0x9E3779B97F4A7C15))).item() == signed(0xE220A8397B1DCDAF)


def test_keys_differ_in_each_of_their_three_parts() -> None:
    ids, index = torch.tensor([3, 3, 4, 0]), torch.tensor([0, 1, 0, 3])
    keys = torch.cat([sample_keys(seed, ids, index) for seed in (0, 1, -1, 2**63)])
    assert keys.unique().numel() == 16


def test_uniforms_are_uniform_and_uncorrelated_along_both_axes() -> None:
    u = uniforms(sample_keys(7, torch.arange(400), torch.zeros(400, dtype=torch.int64)), torch.arange(250))
    assert u.dtype == torch.float64
    assert u.min() >= 0
    assert u.max() < 1
    # 100000 draws in 20 bins of 5000: chi-square with 19 degrees of freedom exceeds 43.8 with probability .001
    counts = torch.histc(u.float(), 20, 0, 1).double()
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8
    # Correlations of 99600 or more pairs have standard deviation .0032; the bound is 4 of them
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.0128


@pytest.mark.parametrize("width", [7, 1024, 1025, 3000])
def test_draw_follows_the_weights(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(width, generator=generator) ** 4
    weights[::3] = 0
    n = 20000
    u = uniforms(sample_keys(1, torch.arange(n), torch.zeros(n, dtype=torch.int64)), torch.arange(1)).flatten()
    drawn = torch.cat([draw(weights.expand(part.numel(), width), part)[0] for part in u.split(2000)])
    assert (weights[drawn] > 0).all()
    # Compare in 6 bins of columns: chi-square with 5 degrees of freedom exceeds 20.5 with probability .001
    edges = torch.tensor_split(torch.arange(width), 6)
    expected = torch.stack([weights[e].double().sum() for e in edges]) / weights.double().sum() * n
    got = torch.stack([((drawn >= e[0]) & (drawn <= e[-1])).sum() for e in edges])
    assert ((got - expected) ** 2 / expected.clamp_min(1e-9)).sum() < 20.5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 1.0, 3.0]), min_size=1, max_size=9).filter(any),
    st.integers(0, 1500),
    st.sampled_from([0.0, 0.3, 1 - 2.0**-53]),
)
def test_zero_weights_are_never_drawn(some: list[float], before: int, uniform: float) -> None:
    weights = torch.cat([torch.zeros(before), torch.tensor(some), torch.zeros(700)])[None]
    column, total = draw(weights, torch.tensor([uniform], dtype=torch.float64))
    assert weights[0, column] > 0
    assert total.item() == pytest.approx(sum(torch.tensor(some).double().tolist()), rel=1e-6)


def test_draw_is_the_inverse_of_the_cumulative_sum() -> None:
    # cumulative .125 .5 .5 1: u=.1 -> 0, .125 -> 1 (strictly above), .49 -> 1, .5 -> 3 (2 has no mass), .99 -> 3
    weights = torch.tensor([0.125, 0.375, 0.0, 0.5]).expand(5, 4)
    column, _ = draw(weights, torch.tensor([0.1, 0.125, 0.49, 0.5, 0.99], dtype=torch.float64))
    assert column.tolist() == [0, 1, 1, 3, 3]


@pytest.mark.parametrize("width", [40, 2000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_tempered_softmax(width: int, temperature: float) -> None:
    logits = torch.randn(6, width, generator=torch.Generator().manual_seed(0)) * 3
    out = sample(logits, torch.linspace(0, 0.99, 6, dtype=torch.float64), SamplingParams(temperature=temperature))
    expected = (logits / temperature).double().log_softmax(1).gather(1, out.tokens[:, None]).squeeze(1).float()
    torch.testing.assert_close(out.logprobs, expected, rtol=1e-6, atol=1e-6)
    assert out.log_mass is None


def test_greedy_has_the_logprobs_of_temperature_one() -> None:
    # logits ln 1, ln 4, ln 3: the best has probability 4/8
    out = sample(torch.tensor([[1.0, 4.0, 3.0]]).log(), None, SamplingParams(temperature=0, top_k=1))
    assert out.tokens.tolist() == [1]
    assert out.logprobs.item() == pytest.approx(math.log(0.5))
    assert out.log_mass is None


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0: 0.4, 1: 0.3}),
        ({"top_p": 0.4}, {0: 0.4}),  # the first token alone reaches .4
        ({"top_p": 0.41}, {0: 0.4, 1: 0.3}),
        ({"top_k": 3, "top_p": 0.75}, {0: 0.4, 1: 0.3}),  # of .9: .7 / .9 = .78 >= .75, .4 / .9 is not
        ({"top_k": 9, "top_p": 0.95}, {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}),  # .9 < .95
    ],
)
def test_truncation_by_hand(params: dict, kept: dict[int, float]) -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    n = 64
    out = sample(probabilities.log().expand(n, 4), (torch.arange(n) / n).double(), SamplingParams(**params))
    mass = sum(kept.values())
    assert set(out.tokens.tolist()) == set(kept)
    assert out.log_mass is not None
    torch.testing.assert_close(out.log_mass, torch.full((n,), math.log(mass)), atol=1e-6, rtol=1e-5)
    expected = torch.tensor([math.log(kept[t] / mass) for t in out.tokens.tolist()])
    torch.testing.assert_close(out.logprobs, expected, atol=1e-6, rtol=1e-5)
    # what the learner compares with: the log-prob before truncation
    torch.testing.assert_close(out.logprobs + out.log_mass, probabilities[out.tokens].log(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.5, 6.0], ids=["wide", "narrow"])
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(scale: float) -> None:
    # flat rows need more than the first 1024 tokens, peaked rows do not; the batch holds both kinds
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    logits[::2] *= scale
    logits[1::2] *= 3
    uniform = torch.linspace(0.01, 0.99, 8, dtype=torch.float64)
    out = sample(logits, uniform, SamplingParams(top_p=0.9))
    values, ids = logits.double().sort(1, descending=True)
    probabilities = values.softmax(1)
    kept = probabilities.cumsum(1) - probabilities < 0.9
    assert (kept.sum(1) > 1024).any() == (scale == 0.5)
    mass = (probabilities * kept).sum(1)
    placed = torch.zeros_like(probabilities).scatter(1, ids, probabilities * kept)
    assert out.log_mass is not None
    assert torch.equal(out.tokens, (placed.cumsum(1) <= (uniform * mass)[:, None]).sum(1))
    torch.testing.assert_close(out.log_mass, mass.log().float(), rtol=1e-5, atol=1e-5)
    expected = (placed.gather(1, out.tokens[:, None]).squeeze(1) / mass).log().float()
    torch.testing.assert_close(out.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_a_missing_uniform_is_an_error() -> None:
    with pytest.raises(ValueError, match="one uniform a row"):
        sample(torch.zeros(1, 4), None, SamplingParams())


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf, 1e-45, 1e39])
def test_a_temperature_that_is_no_number_to_divide_by_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature must be 0 or between .*, got .*; use 0 for greedy"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize(("first", "n"), [(-1, 1), (2**63, 1), (2**63 - 4, (2, 5))])
def test_samples_beyond_64_bits_are_refused(first: int, n: int) -> None:
    with pytest.raises(ValueError, match=rf"first_sample must be at least 0 .*, got {first}; 0 is the first"):
        SamplingParams(n=n, first_sample=first)
    assert SamplingParams(n=4, first_sample=2**63 - 4).first_sample == 2**63 - 4


def test_a_seed_that_is_no_integer_is_refused() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"seed must be an integer, got 1.5"):
        sample_keys(1.5, one, one)  # type: ignore[arg-type]
    assert torch.equal(sample_keys(np.int64(1), one, one), sample_keys(1, one, one))  # type: ignore[arg-type]


def test_an_id_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Prompt.id must fit 64 bits, got 9223372036854775808"):
        Prompt(id=2**63, input_ids=(1,))
