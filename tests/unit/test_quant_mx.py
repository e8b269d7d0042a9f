from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.quant.numerics import (
    E2M1,
    E4M3,
    decode_e8m0,
    dequantize_mxfp8,
    e8m0_from_amax,
    encode_e8m0,
    quantize_mxfp8,
)


@st.composite
def matrices(draw):
    rows, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    magnitude = draw(st.sampled_from([1e-30, 1e-2, 1.0, 1e30]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.randn(rows, blocks * 32, generator=generator) * magnitude).to(dtype)


def row(*values: float, width: int = 32) -> torch.Tensor:
    return torch.tensor([[*values, *[0.0] * (width - len(values))]])


def test_bytes_are_biased_exponents():
    values = decode_e8m0(torch.tensor([0, 1, 127, 128, 254, 255], dtype=torch.uint8))
    assert values[:-1].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0, 2.0**127]
    assert bool(values[-1].isnan())


def test_encoding_inverts_decoding_for_every_byte():
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(encode_e8m0(decode_e8m0(every)), every)
    assert encode_e8m0(torch.tensor([float("inf"), 1.99])).tolist() == [255, 127]


# Bytes for amax = m * 2**E with E = 20: 127 + 20 - emax, one more where the rule rounds up.
@pytest.mark.parametrize(
    ("element", "mantissa", "floor", "even", "ceil"),
    [
        (E2M1, 1.5, 145, 145, 145),
        (E2M1, 1.5 + 2**-23, 145, 145, 146),
        (E2M1, 1.75 - 2**-23, 145, 145, 146),
        (E2M1, 1.75, 145, 146, 146),
        (E4M3, 1.75, 139, 139, 139),
        (E4M3, 1.75 + 2**-23, 139, 139, 140),
        (E4M3, 1.9375 - 2**-23, 139, 139, 140),
        (E4M3, 1.9375, 139, 140, 140),
    ],
)
def test_thresholds_of_the_rules(element, mantissa, floor, even, ceil):
    amax = torch.tensor([mantissa * 2.0**20])
    assert e8m0_from_amax(amax, element, "floor").tolist() == [floor]
    assert e8m0_from_amax(amax, element, "even").tolist() == [even]
    assert e8m0_from_amax(amax, element, "ceil").tolist() == [ceil]


def test_ceil_is_the_smallest_power_of_two_that_does_not_saturate():
    amax = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).abs()
    scale = decode_e8m0(e8m0_from_amax(amax, E4M3, "ceil"))
    assert bool((amax <= 448 * scale).all())
    assert bool((amax > 448 * scale / 2).all())


def test_mxfp8_worked_block():
    # amax 500 = 1.95 * 2**8 is above 448, so the scale is 2**1, byte 128: 250 is a step of 16 apart in [128, 256),
    # 250 / 16 = 15.6 -> 256; 17 / 2 = 8.5, step 1, a half, goes to 8.
    codes, scale = quantize_mxfp8(row(500.0, 17.0, -1.0))
    assert scale.tolist() == [[128]]
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.float()[0, :3].tolist() == [256.0, 8.0, -0.5]
    assert dequantize_mxfp8(codes, scale, torch.bfloat16)[0, :3].tolist() == [512.0, 16.0, -1.0]


def test_floor_saturates_where_ceil_does_not():
    codes, scale = quantize_mxfp8(row(500.0), "floor")
    assert dequantize_mxfp8(codes, scale)[0, 0].item() == 448.0


@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_error_is_at_most_half_a_step(x):
    codes, scale = quantize_mxfp8(x)
    error = (dequantize_mxfp8(codes, scale) - x.float()).abs().unflatten(-1, (-1, 32))
    smallest = decode_e8m0(scale).unsqueeze(-1) * 2**-10
    assert bool((error <= torch.maximum(x.float().abs().unflatten(-1, (-1, 32)) * 2**-4, smallest)).all())


@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_quantizing_the_values_again_changes_none(x):
    values = dequantize_mxfp8(*quantize_mxfp8(x))
    assert torch.equal(dequantize_mxfp8(*quantize_mxfp8(values)), values)


@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_a_row_does_not_depend_on_its_company(x):
    codes, scale = quantize_mxfp8(x)
    for i in range(x.shape[0]):
        alone, alone_scale = quantize_mxfp8(x[i : i + 1])
        assert torch.equal(alone.view(torch.uint8)[0], codes.view(torch.uint8)[i])
        assert torch.equal(alone_scale[0], scale[i])


def test_a_zero_block_has_a_positive_scale():
    codes, scale = quantize_mxfp8(torch.zeros(2, 32))
    assert decode_e8m0(scale).tolist() == [[2.0**-127]] * 2
    assert dequantize_mxfp8(codes, scale).count_nonzero() == 0


def test_subnormals_keep_their_value_within_half_a_step():
    # Over 2**-127, 2**-130 is 1/8 and exact; 2**-140 is 2**-13, below half of e4m3's smallest value.
    values = dequantize_mxfp8(*quantize_mxfp8(row(2.0**-130, 2.0**-140)))
    assert values[0, :2].tolist() == [2.0**-130, 0.0]


def test_one_huge_value_is_kept_and_empties_its_own_block_only():
    values = dequantize_mxfp8(*quantize_mxfp8(torch.cat([row(3e38, 1.0), row(1.0)], dim=1)))
    assert values[0, 0].item() == pytest.approx(3e38, rel=2**-4)
    assert values[0, [1, 32]].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_the_largest_numbers_stay_finite(rule):
    x = row(torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max)
    values = dequantize_mxfp8(*quantize_mxfp8(x, rule))
    assert values[0, :2].tolist() == [448 * 2.0**119, -448 * 2.0**119]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_or_inf_makes_its_block_nan_and_spares_the_others(bad):
    codes, scale = quantize_mxfp8(row(1.0, bad, width=64))
    assert scale.tolist() == [[255, 0]]
    assert dequantize_mxfp8(codes, scale).isnan().tolist() == [[True] * 32 + [False] * 32]


def test_a_width_that_32_does_not_divide_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="32 does not divide the input width 48: take a format whose group"):
        quantize_mxfp8(torch.zeros(2, 48))
