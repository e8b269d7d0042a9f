"""KL estimators: values, the gradients they average to, and fp32 at small log-ratios."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lqrl.algorithms import KLPenalty, Reduction, k1, k2, k3

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


def test_values_at_one_half() -> None:
    x = torch.tensor(0.5)
    assert k1(x).item() == 0.5
    assert k2(x).item() == 0.125
    assert k3(x).item() == pytest.approx(0.106531, abs=1e-6)  # e^-0.5 - 1 + 0.5


@pytest.mark.parametrize(("estimator", "expected"), [(k1, 0.025267), (k2, 0.024862), (k3, 0.025267)])
def test_expectation_under_p(estimator: Callable[[Tensor], Tensor], expected: float) -> None:
    # KL(p || q) = .5 log(5/4) + .3 log(3/4) + 0 = 0.111572 - 0.086305 = 0.025267; k2 is biased.
    assert (P * estimator(P.log() - Q.log())).sum().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (k1, [0.0, 0.0, 0.0]),
        (k2, [0.098938, -0.093885, -0.005053]),  # the gradient of KL(p || q)
        (k3, [0.1, -0.1, 0.0]),  # that of KL(q || p): p - q
    ],
)
def test_gradient_averages_to(estimator: Callable[[Tensor], Tensor], expected: list[float]) -> None:
    logits = P.log().requires_grad_()
    (P * estimator(logits.log_softmax(0) - Q.log())).sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(expected, abs=1e-6)


@given(exponent=st.floats(-7, 1), sign=st.sampled_from([-1, 1]))
@example(exponent=math.log10(0.2499), sign=1)
@example(exponent=math.log10(0.2499), sign=-1)
@example(exponent=math.log10(0.2501), sign=1)
def test_k3_is_accurate_in_fp32_down_to_tiny_ratios(exponent: float, sign: int) -> None:
    x = torch.tensor(sign * 10**exponent, dtype=torch.float32)
    # Twenty terms of the series in fp64, or the formula where it does not cancel.
    exact_x = x.double().item()
    series = sum((-exact_x) ** n / math.factorial(n) for n in range(2, 20))
    exact = series if abs(exact_x) < 0.5 else math.expm1(-exact_x) + exact_x
    assert k3(x).item() == pytest.approx(exact, rel=2e-6)


def test_k3_survives_where_the_plain_formula_cancels() -> None:
    x = torch.tensor(1e-4)
    exact = 4.999833e-9  # x^2/2 - x^3/6
    assert k3(x).item() == pytest.approx(exact, rel=1e-6)
    assert abs((torch.exp(-x) - 1 + x).item() - exact) > exact / 2


@given(x=st.floats(-15, 15, width=32))
def test_k3_gradient_is_that_of_the_formula(x: float) -> None:
    point = torch.tensor(x, requires_grad=True)
    k3(point).backward()
    assert point.grad is not None
    assert point.grad.item() == pytest.approx(-math.expm1(-x), rel=1e-5, abs=1e-9)


def test_k3_is_finite_for_absurd_ratios() -> None:
    values = k3(torch.tensor([-1e4, 1e4, -math.inf]))
    assert values.isfinite().all()
    assert (values > 0).all()


def penalty(estimator: str, logprobs: Tensor, mask: Tensor, reduction: Reduction) -> Tensor:
    fn = KLPenalty(0.5, estimator)  # type: ignore[arg-type]
    return fn(logprobs, torch.zeros_like(logprobs), mask, denom=reduction.count(mask), reduction=reduction).loss


def test_penalty_is_reduced_by_the_losses_rule() -> None:
    # k2 of rows [1, 1], [2]: tokens .5, .5, 2. Token mean 1, mean of row means (.5 + 2) / 2 = 1.25; times 0.5.
    logprobs = torch.tensor([[1.0, 1.0], [2.0, torch.nan]])
    mask = torch.tensor([[True, True], [True, False]])
    assert penalty("k2", logprobs, mask, Reduction("token_mean")).item() == 0.5
    assert penalty("k2", logprobs, mask, Reduction("seq_mean_token_mean")).item() == 0.625


def test_penalty_logs_both_directions_a_token() -> None:
    logprobs = torch.tensor([[0.5, -0.5]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    metrics = KLPenalty(1.0)(logprobs, torch.zeros(1, 2), mask, denom=torch.tensor(2.0), reduction=Reduction()).metrics
    assert metrics["kl/ref_k1"].value.item() == 0
    # (e^-0.5 - 0.5 + e^0.5 - 1.5) / 2 = (0.106531 + 0.148721) / 2
    assert metrics["kl/ref_k3"].value.item() == pytest.approx(0.127626, abs=1e-6)


def test_penalty_pulls_towards_the_reference_and_leaves_masked_tokens() -> None:
    logprobs = torch.tensor([[0.5, -0.5, torch.nan]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    penalty("k3", logprobs, mask, Reduction()).backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0, 0] > 0 > logprobs.grad[0, 1]
    assert logprobs.grad[0, 2] == 0


def test_k1_as_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="use k2 or k3"):
        KLPenalty(0.1, "k1")  # type: ignore[arg-type]


@pytest.mark.parametrize(("coefficient", "estimator"), [(-1.0, "k3"), (1.0, "k4")])
def test_bad_options_are_refused(coefficient: float, estimator: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        KLPenalty(coefficient, estimator)  # type: ignore[arg-type]
