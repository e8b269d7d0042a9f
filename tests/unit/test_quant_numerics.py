from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.quant.numerics import dequantize, fake_quantize_int8, quantize_int8_channel, quantize_int8_token

QUANTIZERS = [quantize_int8_channel, quantize_int8_token]
both = pytest.mark.parametrize("quantize", QUANTIZERS)


@st.composite
def matrices(draw):
    rows, cols = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    magnitude = draw(st.sampled_from([1e-6, 1e-2, 1.0, 1e4, 1e30]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.randn(rows, cols, generator=generator) * magnitude).to(dtype)


@both
def test_worked_row(quantize):
    # amax 12.7, so scale 0.1 and 127 / amax = 10: codes are 10 x rounded: 127, -63.5 -> -64 (half to even), 0.4 -> 0
    codes, scale = quantize(torch.tensor([[12.7, -6.35, 0.04, 5.0]], dtype=torch.float64))
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert codes.tolist() == [[127, -64, 0, 50]]
    torch.testing.assert_close(scale, torch.tensor([[0.1]]))


@both
def test_halves_round_to_even(quantize):
    # amax 127 gives 127 / amax = 1 exactly
    codes, _ = quantize(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2]]


@both
@settings(max_examples=60, deadline=None)
@given(x=matrices())
def test_error_is_at_most_half_a_step_and_the_largest_value_is_127(quantize, x):
    codes, scale = quantize(x)
    error = (dequantize(codes, scale) - x.float()).abs()
    assert bool((error <= scale * 0.5 * (1 + 1e-4)).all())
    assert codes.abs().amax(-1).tolist() == [127] * x.shape[0]


@both
@settings(max_examples=60, deadline=None)
@given(x=matrices())
def test_quantizing_what_was_dequantized_gives_the_same_codes(quantize, x):
    codes, scale = quantize(x)
    assert torch.equal(quantize(dequantize(codes, scale))[0], codes)


@both
@settings(max_examples=30, deadline=None)
@given(x=matrices())
def test_negation_negates_codes_and_a_power_of_two_scales_only_the_scale(quantize, x):
    codes, scale = quantize(x)
    assert torch.equal(quantize(-x)[0], -codes)
    doubled, doubled_scale = quantize(x * 2)
    assert torch.equal(doubled, codes)
    assert torch.equal(doubled_scale, scale * 2)


@both
def test_a_row_does_not_depend_on_its_company(quantize):
    x = torch.randn(17, 65)
    codes, scale = quantize(x)
    for i in range(17):
        alone, alone_scale = quantize(x[i : i + 1])
        assert torch.equal(alone[0], codes[i])
        assert torch.equal(alone_scale[0], scale[i])


def test_codes_follow_the_reciprocal_rule_and_not_the_division():
    # Some value's x * (127 / amax) and x / (amax / 127) lie on two sides of a half; this seed holds such values.
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    codes, scale = quantize_int8_token(x)
    amax = x.abs().amax(-1, keepdim=True)
    assert torch.equal(codes.float(), torch.round(x * (torch.full_like(amax, 127.0) / amax)))
    by_division = torch.round(x / scale)
    assert 0 < (codes.float() != by_division).float().mean().item() < 1e-3


@both
def test_zero_row_has_zero_codes_and_a_scale_without_nan(quantize):
    codes, scale = quantize(torch.tensor([[0.0, -0.0], [1.0, 0.0]]))
    assert codes.tolist() == [[0, 0], [127, 0]]
    assert dequantize(codes, scale)[0].tolist() == [0.0, 0.0]


def test_zero_row_of_a_weight_has_a_positive_scale():
    assert quantize_int8_channel(torch.zeros(2, 4))[1].min().item() > 0


@both
def test_subnormal_row_stays_finite(quantize):
    codes, scale = quantize(torch.tensor([[1e-42, -1e-44]]))  # 127 / amax is beyond fp32
    assert bool(dequantize(codes, scale).isfinite().all())
    assert codes.abs().max().item() <= 127


@both
def test_one_huge_value_keeps_127_and_empties_its_own_row_only(quantize):
    codes, scale = quantize(torch.tensor([[3e38, 1.0, -1.0], [2.0, 1.0, -1.0]]))
    assert codes[0].tolist() == [127, 0, 0]
    assert codes[1].tolist() == [127, 64, -64]  # 63.5 rounds to even
    assert bool(scale.isfinite().all())


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_nan_or_inf_dequantizes_to_nan_and_spares_the_others(quantize, bad):
    codes, scale = quantize(torch.tensor([[1.0, bad], [1.0, 0.5]]))
    values = dequantize(codes, scale)
    assert bool(values[0].isnan().all())
    assert codes.tolist() == [[0, 0], [127, 64]]
    assert bool(values[1].isfinite().all())


def test_tokens_may_have_any_leading_shape():
    codes, scale = quantize_int8_token(torch.randn(2, 3, 8))
    assert codes.shape == (2, 3, 8)
    assert scale.shape == (2, 3, 1)


def test_a_weight_must_be_a_matrix():
    with pytest.raises(ValueError, match=r"\[out, in\]"):
        quantize_int8_channel(torch.zeros(4))


def test_fake_quantize_is_dequantized_codes_in_the_input_dtype():
    x = torch.randn(3, 8).bfloat16()
    out = fake_quantize_int8(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, dequantize(*quantize_int8_token(x), dtype=torch.bfloat16))
