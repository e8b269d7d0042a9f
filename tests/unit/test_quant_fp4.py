from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.quant.numerics import (
    cast_e2m1,
    decode_e2m1,
    dequantize_mxfp4,
    dequantize_nvfp4,
    nvfp4_global_scale,
    pack_fp4,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_nvfp4_dynamic,
    shared_amax,
    unpack_fp4,
)

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BAD = [float("nan"), float("inf"), float("-inf")]


@st.composite
def matrices(draw):
    rows, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    magnitude = draw(st.sampled_from([1e-6, 1e-2, 1.0, 1e4, 1e30]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.randn(rows, blocks * 32, generator=generator) * magnitude).to(dtype)


def row(*values: float, width: int) -> torch.Tensor:
    """One row of ``width`` that starts with ``values`` and goes on with zeros."""
    return torch.tensor([[*values, *[0.0] * (width - len(values))]])


# e2m1


def test_every_code_has_its_value():
    assert decode_e2m1(torch.arange(8, dtype=torch.uint8)).tolist() == VALUES
    negative = decode_e2m1(torch.arange(8, 16, dtype=torch.uint8))
    assert negative.tolist() == [-v for v in VALUES]
    assert torch.signbit(negative).all()


def test_every_value_has_its_code():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(cast_e2m1(decode_e2m1(codes)), codes)


def test_halves_go_to_the_even_index():
    # Midpoints of 0 0.5 1 1.5 2 3 4 6, whose indices are 0 to 7.
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert cast_e2m1(halves).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert cast_e2m1(halves.nextafter(halves + 1)).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert cast_e2m1(halves.nextafter(halves - 1)).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_large_values_saturate_and_nan_is_zero():
    x = torch.tensor([6.5, -1e30, float("inf"), float("-inf"), float("nan"), -float("nan")])
    assert cast_e2m1(x).tolist() == [7, 15, 7, 15, 0, 0]


def test_the_sign_of_what_becomes_zero_is_kept():
    assert cast_e2m1(torch.tensor([0.1, -0.1, 0.0, -0.0, 1e-42, -1e-42])).tolist() == [0, 8, 0, 8, 0, 8]


@settings(max_examples=60, deadline=None)
@given(x=matrices())
def test_cast_finds_the_nearest_value(x):
    x = x.float() * 6 / x.float().abs().amax()
    grid = torch.tensor(VALUES)
    distance = (x.abs().unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.equal((decode_e2m1(cast_e2m1(x)) - x).abs(), distance)


def test_the_first_code_is_the_low_half_of_a_byte():
    codes = torch.tensor([[[1, 15, 8, 0]]], dtype=torch.uint8)
    assert pack_fp4(codes).tolist() == [[[0xF1, 0x08]]]
    assert torch.equal(unpack_fp4(pack_fp4(codes)), codes)


def test_an_odd_width_cannot_be_packed():
    with pytest.raises(ValueError, match="3 is odd"):
        pack_fp4(torch.zeros(2, 3, dtype=torch.uint8))


# nvfp4


def test_nvfp4_worked_row():
    # amax 2688 gives the global scale 448 * 6 / 2688 = 1. Block 1: 1 * 2688 / 6 = 448, e4m3 exact; 1344 / 448 = 3.
    # Block 2: 12 / 6 = 2; 5 / 2 = 2.5, a half, goes to 2; -0.7 / 2 = -0.35 to -0.5.
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([2688.0, 1344.0])
    x[0, 16:19] = torch.tensor([12.0, 5.0, -0.7])
    codes, scale, global_scale = quantize_nvfp4(x)
    assert (codes.dtype, scale.dtype, global_scale.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    assert global_scale.tolist() == [1.0]
    assert scale.float().tolist() == [[448.0, 2.0]]
    assert codes[0, [0, 1, 16, 17, 18]].tolist() == [7, 5, 7, 4, 9]
    values = dequantize_nvfp4(codes, scale, global_scale)
    assert values[0, [0, 1, 16, 17, 18]].tolist() == [2688.0, 1344.0, 12.0, 4.0, -1.0]


@settings(max_examples=60, deadline=None)
@given(x=matrices())
def test_nvfp4_error_is_at_most_half_a_step(x):
    # Half of the widest step, 2, in units of the block's scale; the scale is rounded by up to 2**-4 (or the subnormal
    # step 2**-10 of e4m3), so 6 of them reach the amax up to 6 * 2**-4 = 0.375, which is within the half step.
    codes, scale, global_scale = quantize_nvfp4(x)
    step = (scale.float() / global_scale).unsqueeze(-1)
    error = (dequantize_nvfp4(codes, scale, global_scale) - x.float()).abs().unflatten(-1, (-1, 16))
    coarse = scale.float().unsqueeze(-1) < 2**-6
    assert bool((error <= step * (1 + 1e-5))[~coarse.expand_as(error)].all())


@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_an_nvfp4_row_depends_on_others_through_the_global_scale_alone(x):
    codes, scale, global_scale = quantize_nvfp4(x)
    for i in range(x.shape[0]):
        alone, alone_scale, same = quantize_nvfp4(x[i : i + 1], shared_amax([x]))
        again, again_scale = quantize_nvfp4_dynamic(x[i : i + 1], global_scale)
        assert torch.equal(same, global_scale)
        assert torch.equal(alone[0], codes[i])
        assert torch.equal(again[0], codes[i])
        assert torch.equal(alone_scale.float()[0], scale.float()[i])
        assert torch.equal(again_scale.float()[0], scale.float()[i])


def test_nvfp4_activations_beyond_the_calibrated_magnitude_saturate():
    # Global scale of amax 2688; a block with amax 26880 wants the scale 4480 and gets 448: 6 * 448 = 2688.
    codes, scale = quantize_nvfp4_dynamic(row(26880.0, -448.0, width=16), torch.tensor([1.0]))
    assert scale.float().tolist() == [[448.0]]
    assert codes[0, :2].tolist() == [7, 10]


def test_nvfp4_of_a_zero_tensor_has_positive_finite_scales():
    codes, scale, global_scale = quantize_nvfp4(torch.zeros(2, 32))
    assert global_scale.tolist() == [1.0]
    assert scale.float().unique().tolist() == [0.125]
    assert codes.count_nonzero() == 0
    assert dequantize_nvfp4(codes, scale, global_scale).count_nonzero() == 0


def test_an_nvfp4_zero_block_beside_a_full_one_has_a_positive_scale():
    codes, scale, _ = quantize_nvfp4(row(1.0, width=32))
    assert scale.float()[0, 1].item() == 0.125
    assert codes[0, 16:].count_nonzero() == 0


def test_nvfp4_of_subnormals_is_zero_and_finite():
    codes, scale, global_scale = quantize_nvfp4(row(1e-42, -1e-44, width=16))
    assert global_scale.tolist() == [1.0]
    assert dequantize_nvfp4(codes, scale, global_scale).tolist() == [[0.0, -0.0] + [0.0] * 14]


def test_nvfp4_keeps_one_huge_value_and_empties_the_rest():
    codes, scale, global_scale = quantize_nvfp4(row(3e38, 1.0, width=32))
    values = dequantize_nvfp4(codes, scale, global_scale)
    assert codes[0, :2].tolist() == [7, 0]
    assert values[0, 0].item() == pytest.approx(3e38, rel=1e-6)
    assert bool(values.isfinite().all())


@pytest.mark.parametrize("bad", BAD)
def test_nvfp4_with_nan_or_inf_has_a_nan_global_scale_and_nan_values(bad):
    codes, scale, global_scale = quantize_nvfp4(row(1.0, bad, width=32))
    assert bool(global_scale.isnan().all())
    assert bool(dequantize_nvfp4(codes, scale, global_scale).isnan().all())
    assert codes.count_nonzero() == 0


@pytest.mark.parametrize("bad", BAD)
def test_nan_or_inf_in_nvfp4_activations_stays_in_its_block(bad):
    global_scale = nvfp4_global_scale(torch.tensor(4.0))
    codes, scale = quantize_nvfp4_dynamic(row(1.0, bad, width=32), global_scale)
    assert scale.float().isnan().tolist() == [[True, False]]
    assert codes.count_nonzero() == 0
    values = dequantize_nvfp4(codes, scale, global_scale)
    assert values.isnan().tolist() == [[True] * 16 + [False] * 16]


def test_nvfp4_wants_blocks_of_16_and_a_matrix():
    with pytest.raises(ValueError, match="16 does not divide the input width 24: take a format whose group"):
        quantize_nvfp4(torch.zeros(2, 24))
    with pytest.raises(ValueError, match=r"\[out, in\]"):
        quantize_nvfp4(torch.zeros(16))


# mxfp4


def test_mxfp4_worked_blocks():
    # emax 2. Block 1: amax 6 = 1.5 * 2**2, scale 2**0, byte 127: codes of 6, -2.5 -> -2, 0.3 -> 0.5.
    # Block 2: amax 7 = 1.75 * 2**2: "even" rounds it to 8, scale 2**1: 7 / 2 = 3.5 -> 4, 5 / 2 = 2.5 -> 2.
    x = torch.zeros(1, 64)
    x[0, :3] = torch.tensor([6.0, -2.5, 0.3])
    x[0, 32:34] = torch.tensor([7.0, 5.0])
    codes, scale = quantize_mxfp4(x)
    assert scale.tolist() == [[127, 128]]
    assert codes[0, [0, 1, 2, 32, 33]].tolist() == [7, 12, 1, 6, 4]
    assert dequantize_mxfp4(codes, scale)[0, [0, 1, 2, 32, 33]].tolist() == [6.0, -2.0, 0.5, 8.0, 4.0]


@pytest.mark.parametrize(("rule", "byte", "value"), [("floor", 127, 6.0), ("even", 127, 6.0), ("ceil", 128, 6.0)])
def test_the_rules_differ_between_6_and_8(rule, byte, value):
    # 6.5 = 1.625 * 2**2: over 2**0 it saturates at 6; over 2**1 it is 3.25 and goes to 3, which is 6 again.
    codes, scale = quantize_mxfp4(row(6.5, width=32), rule)
    assert scale.tolist() == [[byte]]
    assert dequantize_mxfp4(codes, scale)[0, 0].item() == value


@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_quantizing_mxfp4_values_again_changes_none(x):
    values = dequantize_mxfp4(*quantize_mxfp4(x))
    assert torch.equal(dequantize_mxfp4(*quantize_mxfp4(values)), values)


@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_an_mxfp4_row_does_not_depend_on_its_company(x):
    codes, scale = quantize_mxfp4(x)
    for i in range(x.shape[0]):
        alone, alone_scale = quantize_mxfp4(x[i : i + 1])
        assert torch.equal(alone[0], codes[i])
        assert torch.equal(alone_scale[0], scale[i])


def test_mxfp4_edges():
    # A zero block, subnormals, one huge value: scales stay finite, the huge value stays.
    x = torch.cat([row(width=32), row(1e-42, -1e-44, width=32), row(3e38, 1.0, width=32)])
    codes, scale = quantize_mxfp4(x)
    values = dequantize_mxfp4(codes, scale)
    assert scale[:2].tolist() == [[0], [0]]
    assert values[:2].count_nonzero() == 0
    assert values[2, :2].tolist() == [6 * 2.0**125, 0.0]  # 3e38 = 1.76 * 2**127 would round to 2**128, which is inf
    assert bool(values.isfinite().all())


@pytest.mark.parametrize("bad", BAD)
def test_nan_or_inf_makes_an_mxfp4_block_nan_and_spares_the_others(bad):
    codes, scale = quantize_mxfp4(row(1.0, bad, width=64))
    assert scale.tolist() == [[255, 0]]
    assert codes.count_nonzero() == 0
    assert dequantize_mxfp4(codes, scale).isnan().tolist() == [[True] * 32 + [False] * 32]


def test_mxfp4_wants_blocks_of_32():
    with pytest.raises(ValueError, match="32 does not divide the input width 48"):
        quantize_mxfp4(torch.zeros(2, 48))
