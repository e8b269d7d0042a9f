"""Policy losses: worked numbers, gradients, and what ACR, TBPO and GSPO change."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lqrl.algorithms import (
    GRPO,
    ClippedLoss,
    GSPOLoss,
    PolicyLoss,
    Reduction,
    ReinforceLoss,
    TBPOLoss,
    TokenTIS,
)
from lqrl.types import ClipRange, LossOutput, RolloutBatch, TrainBatch

ALL: list[PolicyLoss] = [ClippedLoss(), GSPOLoss(), TBPOLoss(), ReinforceLoss()]
RATIO_LOSSES: list[PolicyLoss] = [ClippedLoss(), GSPOLoss(), TBPOLoss()]
TOKEN_MEAN = Reduction("token_mean")


def train_batch(advantages: Tensor, *, old: Tensor | None = None, mask: Tensor | None = None) -> TrainBatch:
    """A batch whose engine, old and present policies agree at log-prob -2 unless told otherwise."""
    shape = advantages.shape
    filled = torch.full(shape, -2.0)
    return TrainBatch(
        input_ids=torch.ones(shape, dtype=torch.int64),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        loss_mask=torch.ones(shape, dtype=torch.bool) if mask is None else mask,
        advantages=advantages,
        rollout_logprobs=filled,
        rollout_log_mass=torch.zeros(shape),
        group_ids=torch.zeros(shape[0], dtype=torch.int64),
        old_logprobs=filled if old is None else old,
    )


def run(loss: PolicyLoss, logprobs: Tensor, batch: TrainBatch, clip_range: ClipRange | None = None) -> LossOutput:
    return loss(logprobs, batch, denom=loss.reduction.count(batch.loss_mask), clip_range=clip_range or ClipRange())


def gradient(loss: PolicyLoss, logprobs: Tensor, batch: TrainBatch, clip_range: ClipRange | None = None) -> Tensor:
    point = logprobs.clone().requires_grad_()
    return torch.autograd.grad(run(loss, point, batch, clip_range).loss, point)[0]


def random_case(seed: int, spread: float = 0.3) -> tuple[Tensor, TrainBatch]:
    """Six ragged rows with advantages of both signs, ratios around 1 and a mismatch that crosses the usual caps."""
    generator = torch.Generator().manual_seed(seed)
    shape = (6, 5)
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 4, 2, 5])[:, None]
    old = -2 + torch.randn(shape, generator=generator)
    batch = train_batch(torch.randn(6, 1, generator=generator).expand(shape).clone(), old=old, mask=mask)
    return old + spread * torch.randn(shape, generator=generator), batch


@pytest.mark.parametrize(
    ("advantage", "ratio", "dual", "expected"),
    [
        (1, 1.5, None, -1.28),  # -min(1.5, 1.28)
        (1, 0.5, None, -0.5),  # -min(0.5, 0.8)
        (-1, 1.5, None, 1.5),  # -min(-1.5, -1.28)
        (-1, 0.5, None, 0.8),  # -min(-0.5, -0.8)
        (-1, 5, None, 5.0),
        (-1, 5, 3.0, 3.0),
        (-1, 5, 10.0, 5.0),
        (-1, 12, None, 12.0),
        (-1, 12, 3.0, 3.0),
        (-1, 12, 10.0, 10.0),
        (1, 12, 3.0, -1.28),  # the dual clip leaves positive advantages alone
    ],
)
def test_clip_and_dual_clip_numbers(advantage: float, ratio: float, dual: float | None, expected: float) -> None:
    batch = train_batch(torch.tensor([[float(advantage)]]))
    logprobs = torch.tensor([[-2 + math.log(ratio)]])
    loss = run(ClippedLoss(), logprobs, batch, ClipRange(0.2, 0.28, dual)).loss
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_clip_fractions_count_the_side_that_binds() -> None:
    # Ratios 1.5, 1.5, .5, .5, 1 with advantages +, -, +, -, +: the first is clipped above, the fourth below.
    batch = train_batch(torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]]))
    logprobs = -2 + torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0]]).log()
    metrics = run(ClippedLoss(), logprobs, batch).metrics
    assert metrics["policy/clip_high_fraction"].value.item() == pytest.approx(0.2)
    assert metrics["policy/clip_low_fraction"].value.item() == pytest.approx(0.2)
    assert metrics["policy/ratio_mean"].value.item() == pytest.approx(1.0)
    assert metrics["policy/ratio_max"].value.item() == pytest.approx(1.5)
    # k3 = r - 1 - log r: (2 * (.5 - .405465) + 2 * (-.5 + .693147)) / 5
    assert metrics["policy/approx_kl"].value.item() == pytest.approx(0.115073, abs=1e-6)
    binding = gradient(ClippedLoss(), logprobs, batch)[0] == 0
    assert binding.tolist() == [True, False, False, True, False]


def test_dual_clip_fraction_and_gradient() -> None:
    batch = train_batch(torch.tensor([[-1.0, -1.0]]))
    logprobs = -2 + torch.tensor([[5.0, 2.0]]).log()
    clip_range = ClipRange(dual=3.0)
    metrics = run(ClippedLoss(), logprobs, batch, clip_range).metrics
    assert metrics["policy/dual_clip_fraction"].value.item() == 0.5
    assert gradient(ClippedLoss(), logprobs, batch, clip_range)[0].tolist() == pytest.approx([0.0, 1.0])  # 2 / 2 tokens


@pytest.mark.parametrize("loss", [ClippedLoss(), GSPOLoss(reduction=TOKEN_MEAN), TBPOLoss(reduction=TOKEN_MEAN)])
@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_is_reinforce_at_ratio_one(loss: PolicyLoss, seed: int) -> None:
    logprobs, batch = random_case(seed, spread=0.0)
    batch = dataclasses.replace(batch, rollout_logprobs=logprobs)
    torch.testing.assert_close(gradient(loss, logprobs, batch), gradient(ReinforceLoss(), logprobs, batch))


@pytest.mark.parametrize("loss", ALL, ids=lambda x: type(x).__name__)
def test_zero_advantages_give_zero_gradient(loss: PolicyLoss) -> None:
    logprobs, batch = random_case(0)
    batch = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    assert not gradient(loss, logprobs, batch).any()


def test_equal_rewards_give_zero_gradient() -> None:
    logprobs, batch = random_case(0)
    rewards, ids = torch.full((6,), 0.1), torch.zeros(6, dtype=torch.int64)
    rollouts = RolloutBatch(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        completion_mask=batch.loss_mask,
        rollout_logprobs=batch.rollout_logprobs,
        rollout_log_mass=batch.rollout_log_mass,
        rewards=rewards,
        reward_terms=rewards[:, None],
        accuracy=rewards,
        prompt_ids=ids,
        group_ids=ids,
        sample_index=torch.arange(6),
        truncated=ids.bool(),
        policy_versions=ids,
    )
    advantages = GRPO()(rollouts).values[:, None].expand(6, 5)
    assert not gradient(ClippedLoss(), logprobs, dataclasses.replace(batch, advantages=advantages)).any()


@pytest.mark.parametrize("loss", ALL, ids=lambda x: type(x).__name__)
def test_tokens_outside_the_mask_do_nothing(loss: PolicyLoss) -> None:
    logprobs, batch = random_case(0)
    poisoned = logprobs.masked_fill(~batch.loss_mask, torch.nan)
    assert torch.equal(run(loss, poisoned, batch).loss, run(loss, logprobs, batch).loss)
    grad = gradient(loss, poisoned, batch)
    assert torch.equal(grad[~batch.loss_mask], torch.zeros(int((~batch.loss_mask).sum())))


@pytest.mark.parametrize("loss", ALL, ids=lambda x: type(x).__name__)
def test_rows_may_be_permuted(loss: PolicyLoss) -> None:
    logprobs, batch = random_case(3)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(
        gradient(loss, logprobs[order], batch.rows(order)), gradient(loss, logprobs, batch)[order]
    )


REDUCTIONS = [
    TOKEN_MEAN,
    Reduction("seq_mean_token_mean"),
    Reduction("seq_mean_token_sum"),
    Reduction("seq_mean_token_sum_norm", max_length=5),
]


@settings(max_examples=40, deadline=None)
@given(loss=st.sampled_from(ALL), reduction=st.sampled_from(REDUCTIONS), cut=st.integers(1, 5), seed=st.integers(0, 20))
def test_micro_batches_add_up_to_the_batch(loss: PolicyLoss, reduction: Reduction, cut: int, seed: int) -> None:
    loss = dataclasses.replace(loss, reduction=reduction)  # type: ignore[type-var]
    logprobs, batch = random_case(seed)
    denom = reduction.count(batch.loss_mask)
    whole = loss(logprobs.requires_grad_(), batch, denom=denom, clip_range=ClipRange())
    (expected,) = torch.autograd.grad(whole.loss, logprobs)
    parts = [
        loss(logprobs[rows], batch.rows(rows), denom=denom, clip_range=ClipRange())
        for rows in (torch.arange(cut), torch.arange(cut, 6))
    ]
    (summed,) = torch.autograd.grad(parts[0].loss + parts[1].loss, logprobs)
    assert torch.equal(summed, expected)
    for name in whole.metrics:
        added = (parts[0].metrics[name] + parts[1].metrics[name]).value.item()
        assert added == pytest.approx(whole.metrics[name].value.item(), rel=1e-5, abs=1e-6), name


def corrected(batch: TrainBatch, correction: TokenTIS) -> TrainBatch:
    assert batch.old_logprobs is not None
    output = correction(batch.old_logprobs, batch.behavior_logprobs, batch.loss_mask)
    return dataclasses.replace(batch, correction_weights=output.weights, clip_scale=output.clip_scale)


def test_correction_weights_multiply_the_objective() -> None:
    batch = dataclasses.replace(train_batch(torch.tensor([[1.0, -1.0]])), correction_weights=torch.tensor([[0.5, 2.0]]))
    # Ratio 1: (-0.5 * 1 + 2 * 1) / 2
    assert run(ClippedLoss(), torch.full((1, 2), -2.0), batch).loss.item() == pytest.approx(0.75)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cap=st.sampled_from([8.0, 100.0]))
def test_acr_is_tis_bit_for_bit_at_or_below_the_cap(seed: int, cap: float) -> None:
    logprobs, batch = random_case(seed)
    assert batch.old_logprobs is not None
    # Mismatch log-ratios of at most log 8.
    behavior = batch.old_logprobs - (batch.old_logprobs + 2).clamp(-2, math.log(8.0) - 1e-3)
    batch = dataclasses.replace(batch, rollout_logprobs=behavior)
    with_acr, without = corrected(batch, TokenTIS(cap)), corrected(batch, TokenTIS(cap, acr=False))
    assert with_acr.clip_scale is not None
    assert without.clip_scale is None
    clip_range = ClipRange(dual=3.0)
    assert torch.equal(
        run(ClippedLoss(), logprobs, with_acr, clip_range).loss, run(ClippedLoss(), logprobs, without, clip_range).loss
    )
    assert torch.equal(
        gradient(ClippedLoss(), logprobs, with_acr, clip_range), gradient(ClippedLoss(), logprobs, without, clip_range)
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "tis", "acr"),
    [
        # rho = 5, cap 2: weight 2, scale 2.5, upper bound 1.28 * 2.5 = 3.2.
        (1.2, 1.0, -2.4, -2.4),  # inside both: 2 * 1.2
        (2.0, 1.0, -2.56, -4.0),  # TIS clips at 1.28; ACR does not: 2 * 2
        (4.0, 1.0, -2.56, -6.4),  # ACR clips at 3.2: 2 * 3.2
        (0.5, 1.0, -1.0, -1.0),
        (0.5, -1.0, 1.6, 1.6),  # the lower bound is unchanged: 2 * 0.8
        (4.0, -1.0, 8.0, 8.0),  # negatives never meet the upper bound: 2 * 4
    ],
)
def test_acr_moves_the_upper_bound_only(ratio: float, advantage: float, tis: float, acr: float) -> None:
    batch = train_batch(torch.tensor([[advantage]]))
    batch = dataclasses.replace(batch, rollout_logprobs=torch.tensor([[-2 - math.log(5.0)]]))
    logprobs = torch.tensor([[-2 + math.log(ratio)]])
    clip_range = ClipRange(0.2, 0.28)
    losses = [
        run(ClippedLoss(), logprobs, corrected(batch, TokenTIS(2.0, acr=on)), clip_range).loss.item()
        for on in (False, True)
    ]
    assert losses == pytest.approx([tis, acr], rel=1e-5)


def test_gspo_ratio_is_the_geometric_mean() -> None:
    # Token ratios 1.25, 0.8, 1.0: product 1, so s = 1 and nothing is clipped although every token strays from 1 by 0.2.
    batch = train_batch(torch.ones(1, 3))
    logprobs = -2 + torch.tensor([[1.25, 0.8, 1.0]]).log()
    output = run(GSPOLoss(), logprobs, batch)
    assert output.loss.item() == pytest.approx(-1.0, abs=1e-6)
    assert gradient(GSPOLoss(), logprobs, batch)[0].tolist() == pytest.approx([-1 / 3] * 3, abs=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [
        (3.5e-4, 1.0, False),
        (4.5e-4, 1.0, True),
        (-3.5e-4, 1.0, False),
        (-2.5e-4, -1.0, False),
        (-3.5e-4, -1.0, True),
        (4.5e-4, -1.0, False),
    ],
)
def test_gspo_clips_the_whole_sequence(log_ratio: float, advantage: float, clipped: bool) -> None:
    batch = train_batch(torch.full((1, 2), advantage))
    grad = gradient(GSPOLoss(), torch.full((1, 2), -2 + log_ratio), batch)[0]
    # Unclipped: -A * s / 2 tokens.
    expected = 0.0 if clipped else -advantage * math.exp(log_ratio) / 2
    assert grad.tolist() == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (2e-3, 1.0, 1.0004),  # positives: clipped at 1 + 4e-4
        (3e-4, 1.0, math.exp(3e-4)),
        (-0.1, 1.0, math.exp(-0.1)),  # one-sided
        (6e-4, -1.0, -math.exp(6e-4)),  # negatives: inside the band [1 - 3e-4, 1 + 7e-4]
        (8e-4, -1.0, 0.0),  # outside: dropped
        (-2e-4, -1.0, -math.exp(-2e-4)),
        (-4e-4, -1.0, 0.0),
    ],
)
def test_tbpo_clips_positives_and_drops_negatives_outside_the_band(
    log_ratio: float, advantage: float, expected: float
) -> None:
    batch = train_batch(torch.full((1, 2), advantage))
    logprobs = torch.full((1, 2), -2 + log_ratio)
    output = run(TBPOLoss(), logprobs, batch)
    assert output.loss.item() == pytest.approx(-expected, abs=1e-6)
    dropped = expected == 0
    assert output.metrics["tbpo/dropped_fraction"].value.item() == float(dropped)
    assert gradient(TBPOLoss(), logprobs, batch).any().item() is not (dropped or log_ratio == 2e-3)


def test_tbpo_dropped_sequences_stay_in_the_denominator() -> None:
    batch = train_batch(torch.tensor([[-1.0], [-1.0]]))
    output = run(TBPOLoss(), torch.tensor([[-2.0], [0.0]]), batch)
    assert output.loss.item() == pytest.approx(0.5)  # (1 + 0) / 2
    assert output.metrics["tbpo/dropped_fraction"].value.item() == 0.5


@pytest.mark.parametrize(("mismatch", "weight"), [(1.5, 1.5), (3.0, 2.0), (0.25, 0.25)])
def test_tbpo_weighs_a_sequence_by_its_capped_mismatch(mismatch: float, weight: float) -> None:
    # Token mismatches m^2 and 1: geometric mean m.
    batch = train_batch(torch.ones(1, 2))
    behavior = torch.tensor([[-2 - 2 * math.log(mismatch), -2.0]])
    batch = dataclasses.replace(batch, rollout_logprobs=behavior)
    output = run(TBPOLoss(), torch.full((1, 2), -2.0), batch)
    assert output.loss.item() == pytest.approx(-weight, rel=1e-6)
    assert output.metrics["tbpo/mismatch_weight"].value.item() == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("loss", RATIO_LOSSES, ids=lambda x: type(x).__name__)
def test_a_missing_proximal_pass_is_named(loss: PolicyLoss) -> None:
    logprobs, batch = random_case(0)
    with pytest.raises(ValueError, match=r"old_logprobs.*run the proximal pass"):
        run(loss, logprobs, dataclasses.replace(batch, old_logprobs=None))


def test_reinforce_needs_no_proximal_pass() -> None:
    logprobs, batch = random_case(0)
    output = run(ReinforceLoss(), logprobs, dataclasses.replace(batch, old_logprobs=None))
    expected = -(logprobs * batch.advantages)[batch.loss_mask].mean()
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("loss", [GSPOLoss(), TBPOLoss()], ids=lambda x: type(x).__name__)
def test_sequence_losses_refuse_acr(loss: PolicyLoss) -> None:
    logprobs, batch = random_case(0)
    with pytest.raises(ValueError, match="clip_scale"):
        run(loss, logprobs, corrected(batch, TokenTIS()))


def test_only_the_clipped_loss_reads_the_clip_range() -> None:
    logprobs, batch = random_case(0)
    for loss in ALL:
        narrow, wide = (run(loss, logprobs, batch, ClipRange(w, w)).loss for w in (0.0, 10.0))
        assert loss.uses_clip_range is not torch.equal(narrow, wide)


def test_negative_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"TBPOLoss.band_low is a distance from 1"):
        TBPOLoss(band_low=-1e-4)
