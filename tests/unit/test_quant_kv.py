from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.quant.numerics import (
    KV_SCALE_FLOOR,
    dequantize,
    kv_scale_from_amax,
    quantize_kv_fp8_static,
    quantize_kv_fp8_token_head,
    quantize_kv_int8_token_head,
    round_trip_kv_fp8_static,
    round_trip_kv_fp8_token_head,
    round_trip_kv_int8_token_head,
)

PER_HEAD = [quantize_kv_int8_token_head, quantize_kv_fp8_token_head]
per_head = pytest.mark.parametrize("quantize", PER_HEAD)
BAD = [float("nan"), float("inf"), float("-inf")]


@st.composite
def caches(draw):
    """Keys or values [tokens, heads, width]."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 24))
    magnitude = draw(st.sampled_from([1e-2, 1.0, 1e4, 1e30]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16] if magnitude <= 1 else [torch.float32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.randn(*shape, generator=generator) * magnitude).to(dtype)


def test_int8_worked_row():
    # amax 127, scale 1; halves go to even
    codes, scale = quantize_kv_int8_token_head(torch.tensor([[[127.0, 0.5, 1.5, -2.5]]]))
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert codes.tolist() == [[[127, 0, 2, -2]]]
    assert scale.tolist() == [[[1.0]]]


def test_fp8_worked_row():
    # amax 448, scale 1; 17 is half between 16 and 18 and goes to the even mantissa, 16
    codes, scale = quantize_kv_fp8_token_head(torch.tensor([[[448.0, 17.0, -19.0]]]))
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.float().tolist() == [[[448.0, 16.0, -20.0]]]
    assert scale.tolist() == [[[1.0]]]


def test_codes_come_from_the_reciprocal():
    # 0.80859375 * 448 / 4.3125 = 84, half between 80 and 88; the product with the rounded reciprocal is just above.
    codes, _ = quantize_kv_fp8_token_head(torch.tensor([4.3125, 0.80859375]))
    assert codes.float().tolist() == [448.0, 88.0]


@settings(max_examples=60, deadline=None)
@given(x=caches())
def test_int8_error_is_at_most_half_a_step(x):
    codes, scale = quantize_kv_int8_token_head(x)
    assert bool(((dequantize(codes, scale) - x.float()).abs() <= scale * 0.5 * (1 + 1e-4)).all())
    assert codes.abs().max().item() <= 127


@settings(max_examples=60, deadline=None)
@given(x=caches())
def test_fp8_error_is_at_most_half_a_step(x):
    codes, scale = quantize_kv_fp8_token_head(x)
    limit = torch.maximum(x.float().abs() * 2**-4, scale * 2**-10) * (1 + 1e-5)
    assert bool(((dequantize(codes, scale) - x.float()).abs() <= limit).all())


@per_head
@settings(max_examples=40, deadline=None)
@given(x=caches())
def test_a_head_of_a_token_does_not_depend_on_its_company(quantize, x):
    codes, scale = quantize(x)
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            alone, alone_scale = quantize(x[t, h])
            assert torch.equal(alone.view(torch.uint8), codes[t, h].view(torch.uint8))
            assert torch.equal(alone_scale, scale[t, h])


@settings(max_examples=40, deadline=None)
@given(x=caches())
def test_what_is_read_back_has_the_dtype_and_the_rounding_of_the_cache(x):
    static = torch.tensor([0.02])
    for read, codes, scale in (
        (round_trip_kv_int8_token_head(x), *quantize_kv_int8_token_head(x)),
        (round_trip_kv_fp8_token_head(x), *quantize_kv_fp8_token_head(x)),
        (round_trip_kv_fp8_static(x, static), quantize_kv_fp8_static(x, static), static),
    ):
        assert read.dtype == x.dtype
        assert torch.equal(read, (codes.float() * scale).to(x.dtype))


def test_a_static_scale_saturates():
    # 1000 is beyond 448 * 2; 34 / 2 = 17 goes to 16
    x = torch.tensor([1000.0, -1000.0, 34.0])
    assert quantize_kv_fp8_static(x, torch.tensor([2.0])).float().tolist() == [448.0, -448.0, 16.0]
    assert round_trip_kv_fp8_static(x.bfloat16(), torch.tensor([2.0])).tolist() == [896.0, -896.0, 32.0]


def test_static_codes_come_from_the_division():
    # 0.80859375 / (4.3125 / 448) = 84 goes to the even mantissa, 80; see the reciprocal above.
    scale = torch.tensor([4.3125]) / torch.tensor([448.0])
    assert quantize_kv_fp8_static(torch.tensor([0.80859375]), scale).float().tolist() == [80.0]


def test_static_codes_depend_on_their_own_element_alone():
    x = torch.randn(3, 2, 8)
    scale = torch.tensor([0.01])
    codes = quantize_kv_fp8_static(x, scale).view(torch.uint8)
    assert torch.equal(codes[1, 1], quantize_kv_fp8_static(x[1, 1], scale).view(torch.uint8))


def test_zero_heads_have_zero_codes_and_a_positive_scale():
    for quantize in PER_HEAD:
        codes, scale = quantize(torch.zeros(2, 3, 4))
        assert codes.float().count_nonzero() == 0
        assert scale.unique().tolist() == pytest.approx([KV_SCALE_FLOOR])
    assert quantize_kv_fp8_static(torch.zeros(4), torch.tensor([1.0])).float().tolist() == [0.0] * 4


@per_head
def test_subnormal_heads_become_zero(quantize):
    assert dequantize(*quantize(torch.tensor([1e-42, -1e-44]))).tolist() == [0.0, 0.0]


@per_head
def test_one_huge_value_is_kept_and_empties_its_own_head_only(quantize):
    values = dequantize(*quantize(torch.tensor([[3e38, 1.0], [2.0, 2.0]])))
    assert values[0].tolist() == pytest.approx([3e38, 0.0], rel=1e-6)
    torch.testing.assert_close(values[1], torch.tensor([2.0, 2.0]))


@per_head
@pytest.mark.parametrize("bad", BAD)
def test_a_head_with_nan_or_inf_is_read_back_as_nan_and_spares_the_others(quantize, bad):
    values = dequantize(*quantize(torch.tensor([[1.0, bad], [1.0, 0.5]])))
    assert values.isnan().tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("bad", BAD)
def test_under_a_static_scale_nan_and_inf_are_read_back_as_nan(bad):
    read = round_trip_kv_fp8_static(torch.tensor([1.0, bad, -0.0]), torch.tensor([1.0]))
    assert read.isnan().tolist() == [False, True, False]
    assert torch.signbit(read[2])


def test_the_calibrated_scale_by_hand():
    # 1001 magnitudes 0 .. 1000: P99.9 is the value at 0.999 * 1000 = 999; 1.05 * 999 / 448 = 2.34140625
    amaxes = torch.arange(1001.0)[torch.randperm(1001)]
    torch.testing.assert_close(kv_scale_from_amax(amaxes), torch.tensor([1.05 * 999 / 448]))


def test_one_magnitude_is_its_own_quantile():
    torch.testing.assert_close(kv_scale_from_amax(torch.tensor(448.0)), torch.tensor([1.05]))


def test_the_scale_of_zeros_is_1():
    assert kv_scale_from_amax(torch.zeros(3, 2)).tolist() == [1.0]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_magnitude_is_not_lost_below_the_quantile(bad):
    amaxes = torch.ones(100_000)
    amaxes[7] = bad
    assert bool(kv_scale_from_amax(amaxes).isnan())


def test_no_magnitudes_are_refused():
    with pytest.raises(ValueError, match="run a calibration batch"):
        kv_scale_from_amax(torch.empty(0))
