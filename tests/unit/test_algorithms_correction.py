"""Mismatch metrics from raw ratios, truncation, and the Adaptive Clipping Range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lqrl.algorithms import Correction, NoCorrection, SequenceTIS, TokenMIS, TokenTIS, mismatch_metrics

ALL: list[Correction] = [NoCorrection(), TokenTIS(), TokenTIS(acr=False), SequenceTIS(), TokenMIS()]
NAMES = {
    "mismatch/k1",
    "mismatch/k3",
    "mismatch/ratio_mean",
    "mismatch/ratio_square_mean",
    "mismatch/ess",
    "mismatch/log_ratio_max",
    "correction/truncated_low_fraction",
    "correction/truncated_high_fraction",
    "acr/active_fraction",
}


def logprobs_of(ratios: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
    """Old and behavior log-probs with the given ratios of probabilities; nan marks a token outside the mask."""
    rho = torch.tensor(ratios)
    behavior = torch.full_like(rho, -2.0)
    return behavior + rho.log(), behavior, ~rho.isnan()


def test_metrics_of_worked_ratios() -> None:
    # Ratios 4, 1, 1/2 (and one token outside): log-ratios 1.386294, 0, -0.693147.
    metrics = mismatch_metrics(*logprobs_of([[4.0, 1.0], [0.5, math.nan]]))
    values = {name: ratio.value.item() for name, ratio in metrics.items()}
    assert values["mismatch/k1"] == pytest.approx(-0.231049, abs=1e-6)  # -(1.386294 - 0.693147) / 3
    # (4 - 1 - 1.386294 + 0 + 0.5 - 1 + 0.693147) / 3 = (1.613706 + 0.193147) / 3
    assert values["mismatch/k3"] == pytest.approx(0.602284, abs=1e-6)
    assert values["mismatch/ratio_mean"] == pytest.approx(5.5 / 3, abs=1e-6)
    assert values["mismatch/ratio_square_mean"] == pytest.approx(17.25 / 3, abs=1e-6)  # 16 + 1 + 1/4
    assert values["mismatch/ess"] == pytest.approx(5.5**2 / 17.25 / 3, abs=1e-6)
    assert values["mismatch/log_ratio_max"] == pytest.approx(1.386294, abs=1e-6)
    assert all(ratio.count.item() == 3 for name, ratio in metrics.items() if name != "mismatch/log_ratio_max")


def test_metrics_are_raw_whatever_the_correction_does() -> None:
    arguments = logprobs_of([[1e4, 1.0, 0.01]])
    raw = mismatch_metrics(*arguments)
    for correction in ALL:
        metrics = correction(*arguments).metrics
        assert {name: metrics[name] for name in raw} == raw
        assert metrics.keys() == NAMES


@pytest.mark.parametrize("correction", ALL, ids=repr)
def test_equal_policies_are_left_alone(correction: Correction) -> None:
    logprobs = torch.tensor([[-1.0, -3.0], [-0.1, -9.0]])
    output = correction(logprobs, logprobs.clone(), torch.ones(2, 2, dtype=torch.bool))
    assert torch.equal(output.weights, torch.ones(2, 2))
    assert output.keep.all()
    assert output.clip_scale is None or torch.equal(output.clip_scale, torch.ones(2, 2))
    assert output.metrics["mismatch/k3"].value.item() == 0
    assert output.metrics["mismatch/ess"].value.item() == 1


def test_token_tis_truncates_and_acr_widens_by_what_was_cut() -> None:
    output = TokenTIS(cap=2.0)(*logprobs_of([[0.5, 1.0, 2.0, 5.0]]))
    assert output.weights[0].tolist() == pytest.approx([0.5, 1.0, 2.0, 2.0], rel=1e-6)
    assert output.clip_scale is not None
    assert output.clip_scale[0].tolist() == pytest.approx([1.0, 1.0, 1.0, 2.5], rel=1e-6)  # max(1, rho / 2)
    # The weight and the scale together are the whole ratio where it was cut: 2 * 2.5 = 5.
    assert (output.weights * output.clip_scale)[0, 3].item() == pytest.approx(5.0, rel=1e-6)


def test_acr_active_fraction_counts_the_cut_tokens_and_is_zero_when_off() -> None:
    arguments = logprobs_of([[0.5, 1.0, 1.5, 5.0], [3.0, math.nan, math.nan, math.nan]])
    on, off = TokenTIS(cap=2.0)(*arguments), TokenTIS(cap=2.0, acr=False)(*arguments)
    assert on.metrics["acr/active_fraction"].value.item() == pytest.approx(2 / 5)
    assert off.metrics["acr/active_fraction"].value.item() == 0
    assert off.metrics["correction/truncated_high_fraction"].value.item() == pytest.approx(2 / 5)
    assert off.clip_scale is None
    assert torch.equal(on.weights, off.weights)


@settings(max_examples=30, deadline=None)
@given(
    log_ratios=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=8),
    cap=st.sampled_from([0.5, 1.0, 2.0, 8.0]),
)
def test_acr_scale_is_exactly_one_at_or_below_the_cap(log_ratios: list[float], cap: float) -> None:
    old = torch.tensor([log_ratios])
    output = TokenTIS(cap)(old, torch.zeros_like(old), torch.ones_like(old, dtype=torch.bool))
    assert output.clip_scale is not None
    below = old.exp() <= cap
    assert torch.equal(output.clip_scale[below], torch.ones(int(below.sum())))
    assert (output.clip_scale[~below] > 1).all()
    assert (output.weights <= cap).all()


def test_extreme_ratios_stay_finite() -> None:
    old, behavior = torch.tensor([[-1.0, -200.0]]), torch.tensor([[-200.0, -1.0]])
    output = TokenTIS()(old, behavior, torch.ones(1, 2, dtype=torch.bool))
    assert output.clip_scale is not None
    # log rho = 199 is clamped to 20: scale e^20 / 2.
    assert output.clip_scale[0].tolist() == pytest.approx([math.exp(20) / 2, 1.0], rel=1e-5)
    assert all(ratio.value.isfinite() for ratio in output.metrics.values())
    assert output.metrics["mismatch/log_ratio_max"].value.item() == 199


def test_sequence_tis_uses_the_geometric_mean() -> None:
    # Row 0: sqrt(4 * 1) = 2, row 1: 8 (one token), cut to 3.
    output = SequenceTIS(cap=3.0)(*logprobs_of([[4.0, 1.0], [8.0, math.nan]]))
    assert output.weights[0].tolist() == pytest.approx([2.0, 2.0], rel=1e-6)
    assert output.weights[1, 0].item() == 3.0
    assert output.metrics["correction/truncated_high_fraction"].value.item() == pytest.approx(1 / 3)


def test_sequence_tis_product() -> None:
    # 4 * 1/2 = 2 and, alone, 1/4.
    output = SequenceTIS(cap=3.0, length_normalized=False)(*logprobs_of([[4.0, 0.5], [0.25, math.nan]]))
    assert output.weights[0].tolist() == pytest.approx([2.0, 2.0], rel=1e-6)
    assert output.weights[1, 0].item() == pytest.approx(0.25, rel=1e-6)


def test_token_mis_rejects_outside_its_band() -> None:
    output = TokenMIS(0.5, 2.0)(*logprobs_of([[0.4, 0.6, 1.9, 2.1, math.nan]]))
    assert output.weights[0, :4].tolist() == pytest.approx([0.0, 0.6, 1.9, 0.0], rel=1e-6)
    assert output.keep.tolist() == [[False, True, True, False, False]]
    assert output.metrics["correction/truncated_low_fraction"].value.item() == 0.25
    assert output.metrics["correction/truncated_high_fraction"].value.item() == 0.25


@pytest.mark.parametrize("correction", ALL, ids=repr)
def test_outputs_are_detached_and_blind_outside_the_mask(correction: Correction) -> None:
    old = torch.tensor([[-1.0, -0.5, torch.nan]], requires_grad=True)
    output = correction(old, torch.tensor([[-1.5, -0.5, torch.inf]]), torch.tensor([[True, True, False]]))
    assert not output.weights.requires_grad
    assert output.weights.isfinite().all()
    assert all(ratio.value.isfinite() and not ratio.total.requires_grad for ratio in output.metrics.values())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TokenTIS(cap=0.0), "TokenTIS.cap must be positive"),
        (lambda: SequenceTIS(cap=-1.0), "SequenceTIS.cap must be positive"),
        (lambda: TokenMIS(ratio_low=1.1), "tokens without mismatch would be rejected"),
    ],
)
def test_bad_options_are_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]
