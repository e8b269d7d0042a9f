from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.quant.numerics import INT4_SCALE_FLOOR, dequantize_int4_group, pack_int4, quantize_int4_group, unpack_int4


@st.composite
def matrices(draw):
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    magnitude = draw(st.sampled_from([1e-2, 1.0, 1e4, 1e30]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.randn(rows, groups * 8, generator=generator) * magnitude).to(dtype)


def test_worked_groups():
    # First group: amax 7, scale 1; halves go to even: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2. Second: amax 3.5, scale 0.5.
    weight = torch.tensor([[7.0, 0.5, 1.5, 2.5, -3.5, 1.0, 0.2, 0.3]], dtype=torch.float64)
    codes, scale = quantize_int4_group(weight, 4)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert codes.tolist() == [[7, 0, 2, 2, -7, 2, 0, 1]]
    assert scale.tolist() == [[1.0, 0.5]]
    assert dequantize_int4_group(codes, scale).tolist() == [[7.0, 0.0, 2.0, 2.0, -3.5, 1.0, 0.0, 0.5]]


@settings(max_examples=60, deadline=None)
@given(x=matrices())
def test_error_is_at_most_half_a_step_and_the_largest_value_is_7(x):
    codes, scale = quantize_int4_group(x, 8)
    error = (dequantize_int4_group(codes, scale) - x.float()).abs().unflatten(-1, (-1, 8))
    assert bool((error <= scale.unsqueeze(-1) * 0.5 * (1 + 1e-5)).all())
    assert codes.unflatten(-1, (-1, 8)).abs().amax(-1).unique().tolist() == [7]


@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_quantizing_what_was_dequantized_gives_the_same_codes(x):
    codes, scale = quantize_int4_group(x, 8)
    assert torch.equal(quantize_int4_group(dequantize_int4_group(codes, scale), 8)[0], codes)


@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_a_row_does_not_depend_on_its_company(x):
    codes, scale = quantize_int4_group(x, 8)
    for i in range(x.shape[0]):
        alone, alone_scale = quantize_int4_group(x[i : i + 1], 8)
        assert torch.equal(alone[0], codes[i])
        assert torch.equal(alone_scale[0], scale[i])


@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_a_scale_in_bf16_survives_a_cast_to_bf16_and_the_codes_know_it(x):
    codes, scale = quantize_int4_group(x, 8, torch.bfloat16)
    assert torch.equal(scale, scale.bfloat16().float())
    error = (dequantize_int4_group(codes, scale) - x.float()).abs().unflatten(-1, (-1, 8))
    # amax / scale is within 2**-8 of 7 and clamped there: half a step and 7 * 2**-8 of one at most
    assert bool((error <= scale.unsqueeze(-1) * 0.528).all())


def test_codes_of_a_bf16_scale_differ_from_those_of_the_exact_one():
    # amax 1 + 2**-7: scale 0.14397321... rounds to 0.1435546875 in bf16; 0.648 / scale is 4.5008 and 4.514 -> 5, 5;
    # 0.6475 / scale is 4.4974 -> 4 by the exact scale, 4.5105 -> 5 by the rounded one.
    weight = torch.tensor([[1 + 2**-7, 0.6475]])
    assert quantize_int4_group(weight, 2)[0].tolist() == [[7, 4]]
    assert quantize_int4_group(weight, 2, torch.bfloat16)[0].tolist() == [[7, 5]]


def test_worked_packing():
    # Nibbles code + 8 are 8, 9, 7, 15, 1, 8, 8, 0; the first is the lowest, so the last is written first.
    codes = torch.tensor([[0, 1, -1, 7, -7, 0, 0, -8]], dtype=torch.int8)
    assert pack_int4(codes).tolist() == [[0x0881F798]]
    assert unpack_int4(pack_int4(codes)).tolist() == codes.tolist()


def test_packing_keeps_every_code_and_leading_shapes():
    codes = torch.randint(-8, 8, (3, 2, 64), dtype=torch.int8)
    packed = pack_int4(codes)
    assert packed.dtype == torch.int32
    assert packed.shape == (3, 2, 8)
    assert torch.equal(unpack_int4(packed), codes)


def test_packing_takes_views():
    codes = torch.randint(-8, 8, (64, 16), dtype=torch.int8)
    assert torch.equal(unpack_int4(pack_int4(codes.t())), codes.t())
    assert torch.equal(unpack_int4(pack_int4(codes)[:, :1]), codes[:, :8])


def test_a_zero_group_has_zero_codes_and_the_floor_as_its_scale():
    codes, scale = quantize_int4_group(torch.tensor([[0.0, -0.0, 7.0, 1.0]]), 2)
    assert codes.tolist() == [[0, 0, 7, 1]]
    assert scale[0, 0].item() == pytest.approx(INT4_SCALE_FLOOR)


def test_subnormal_groups_become_zero():
    codes, scale = quantize_int4_group(torch.tensor([[1e-42, -1e-44]]), 2)
    assert dequantize_int4_group(codes, scale).tolist() == [[0.0, 0.0]]


def test_one_huge_value_keeps_7_and_empties_its_own_group_only():
    codes, scale = quantize_int4_group(torch.tensor([[3e38, 1.0, 7.0, -3.0]]), 2)
    assert codes.tolist() == [[7, 0, 7, -3]]
    assert bool(scale.isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_group_with_nan_or_inf_dequantizes_to_nan_and_spares_the_others(bad):
    codes, scale = quantize_int4_group(torch.tensor([[1.0, bad, 7.0, -3.0]]), 2)
    assert codes.tolist() == [[0, 0, 7, -3]]
    assert dequantize_int4_group(codes, scale).isnan().tolist() == [[True, True, False, False]]


def test_a_group_that_does_not_divide_the_input_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="128 does not divide the input width 192: take a format whose group"):
        quantize_int4_group(torch.zeros(2, 192), 128)


def test_a_width_that_does_not_fill_words_cannot_be_packed():
    with pytest.raises(ValueError, match="8 does not divide 12"):
        pack_int4(torch.zeros(2, 12, dtype=torch.int8))


def test_a_weight_must_be_a_matrix():
    with pytest.raises(ValueError, match=r"\[out, in\]"):
        quantize_int4_group(torch.zeros(32), 32)
