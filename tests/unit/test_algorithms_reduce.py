"""Reductions: worked numbers, and the same scalar however the rows are split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lqrl.algorithms import Reduction
from lqrl.algorithms.reduce import masked_max, masked_ratio, sequence_mean

ALL = [
    Reduction("token_mean"),
    Reduction("seq_mean_token_mean"),
    Reduction("seq_mean_token_sum"),
    Reduction("seq_mean_token_sum_norm", max_length=8),
]


def prefix_mask(lengths: list[int], columns: int) -> Tensor:
    return torch.arange(columns) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        # Rows of losses [1, 1], [2]*4, [4]*6: sums 2, 8, 24; 12 tokens; token means 1, 2, 4.
        (ALL[0], 2.833333),  # 34 / 12
        (ALL[1], 2.333333),  # (1 + 2 + 4) / 3
        (ALL[2], 11.333333),  # 34 / 3
        (ALL[3], 1.416667),  # 34 / (3 * 8)
    ],
)
def test_worked_numbers(reduction: Reduction, expected: float) -> None:
    mask = prefix_mask([2, 4, 6], 6)
    token_loss = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(3, 6)
    assert reduction(token_loss, mask, denom=reduction.count(mask)).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("reduction", ALL, ids=lambda r: r.name)
@pytest.mark.parametrize("split", [[1] * 8, [3, 5], [2, 2, 4], [7, 1]])
def test_any_split_into_micro_batches_gives_the_same_bits(reduction: Reduction, split: list[int]) -> None:
    # Lengths are powers of two, as are 8 rows and 32 tokens, and losses are integers: every operation is exact in fp32.
    mask = prefix_mask([1, 1, 2, 8, 4, 8, 4, 4], 8)
    token_loss = torch.arange(64.0).reshape(8, 8)
    parts = list(zip(token_loss.split(split), mask.split(split), strict=True))
    denom = torch.stack([reduction.count(m) for _, m in parts]).sum()
    total = torch.stack([reduction(x, m, denom=denom) for x, m in parts]).sum()
    assert torch.equal(denom, reduction.count(mask))
    assert torch.equal(total, reduction(token_loss, mask, denom=denom))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=6),
    cut=st.integers(1, 5),
    reduction=st.sampled_from(ALL),
    seed=st.integers(0, 99),
)
def test_gradients_add_up_over_micro_batches(lengths: list[int], cut: int, reduction: Reduction, seed: int) -> None:
    mask = prefix_mask(lengths, 9)
    token_loss = torch.randn(len(lengths), 9, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    denom = reduction.count(mask)
    (whole,) = torch.autograd.grad(reduction(token_loss, mask, denom=denom), token_loss)
    parts = [reduction(token_loss[rows], mask[rows], denom=denom) for rows in (slice(0, cut), slice(cut, None))]
    (summed,) = torch.autograd.grad(parts[0] + parts[1], token_loss)
    assert torch.equal(whole, summed)


@pytest.mark.parametrize("reduction", ALL, ids=lambda r: r.name)
def test_rows_without_trained_tokens_change_nothing(reduction: Reduction) -> None:
    mask = prefix_mask([4, 0, 2, 0], 4)
    token_loss = torch.arange(16.0).reshape(4, 4)
    alone = mask.any(1)
    padded = reduction(token_loss, mask, denom=reduction.count(mask))
    assert torch.equal(padded, reduction(token_loss[alone], mask[alone], denom=reduction.count(mask[alone])))


@pytest.mark.parametrize("reduction", ALL, ids=lambda r: r.name)
def test_an_empty_step_is_zero_and_masked_nans_are_ignored(reduction: Reduction) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    token_loss = torch.full((2, 3), torch.nan, requires_grad=True)
    loss = reduction(token_loss, mask, denom=reduction.count(mask))
    loss.backward()
    assert loss.item() == 0
    assert token_loss.grad is not None
    assert not token_loss.grad.any()


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"unknown reduction 'mean'.*token_mean, seq_mean_token_mean"):
        Reduction("mean")  # type: ignore[arg-type]


def test_constant_length_is_required_where_it_divides() -> None:
    with pytest.raises(ValueError, match="set it to the run's max_tokens"):
        Reduction("seq_mean_token_sum_norm")


def test_constant_length_is_refused_where_it_would_be_ignored() -> None:
    with pytest.raises(ValueError, match="has no meaning for token_mean"):
        Reduction("token_mean", max_length=8)


def test_masked_ratio_counts_the_mask() -> None:
    values = torch.tensor([[1.0, 2.0, torch.nan], [3.0, 100.0, 100.0]])
    mask = prefix_mask([2, 1], 3)
    total, count = masked_ratio(values, mask)
    assert (total.item(), count.item()) == (6.0, 3.0)  # 1 + 2 + 3


def test_masked_max_sees_the_mask_only_and_negative_maxima() -> None:
    values = torch.tensor([[-3.0, -1.0, 5.0]])
    assert masked_max(values, torch.tensor([[True, True, False]])).value.item() == -1.0
    assert masked_max(values, torch.zeros(1, 3, dtype=torch.bool)).value.item() == 0.0


def test_sequence_mean_of_unequal_rows() -> None:
    values = torch.tensor([[2.0, 4.0, 9.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    assert sequence_mean(values, prefix_mask([2, 1, 0], 3)).flatten().tolist() == [3.0, 5.0, 0.0]
