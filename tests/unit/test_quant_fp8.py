from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.quant.numerics import (
    FP8_SCALE_FLOOR,
    dequantize,
    dequantize_fp8_block,
    dequantize_fp8_group,
    quantize_fp8_block,
    quantize_fp8_channel,
    quantize_fp8_group,
    quantize_fp8_per_tensor_dynamic,
    quantize_fp8_tensor,
    quantize_fp8_token,
    shared_amax,
)

# Quantizer and dequantizer, with small blocks and groups where there are any.
LAYOUTS = {
    "tensor": (quantize_fp8_tensor, dequantize),
    "per_tensor_dynamic": (quantize_fp8_per_tensor_dynamic, dequantize),
    "channel": (quantize_fp8_channel, dequantize),
    "token": (quantize_fp8_token, dequantize),
    "block": (lambda x: quantize_fp8_block(x, (2, 4)), lambda c, s: dequantize_fp8_block(c, s, (2, 4))),
    "group": (lambda x: quantize_fp8_group(x, 4), lambda c, s: dequantize_fp8_group(c, s, 4)),
}
every = pytest.mark.parametrize("layout", list(LAYOUTS))
row_wise = pytest.mark.parametrize("layout", ["channel", "token", "group"])


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def bf16_matrix(seed: int, rows: int = 256, columns: int = 512) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    magnitude = draw(st.sampled_from([1e-2, 1.0, 1e4, 1e30]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.randn(rows, columns, generator=generator) * magnitude).to(dtype)


@every
def test_worked_row(layout):
    # amax 448, so scale 1 and the codes are the values rounded to e4m3. Steps: 2 in [16, 32), so 17 and 19 are halves
    # and go to even mantissas, 16 and 20; 2**-9 below 2**-6, so 2**-10 is a half and goes to 0.
    quantize, _ = LAYOUTS[layout]
    codes, scale = quantize(torch.tensor([[448.0, 17.0, 19.0, 2**-10]], dtype=torch.float64))
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert codes.float().tolist() == [[448.0, 16.0, 20.0, 0.0]]
    assert scale.flatten().tolist() == [1.0]


@every
@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_error_is_at_most_half_a_step(layout, x):
    # Three mantissa bits: 2**-4 of the value; below 2**-6 of a scale the step is 2**-9 of it.
    quantize, restore = LAYOUTS[layout]
    codes, scale = quantize(x)
    error = (restore(codes, scale) - x.float()).abs()
    assert bool((error <= torch.maximum(x.float().abs() * 2**-4, scale.max() * 2**-10) * (1 + 1e-5)).all())


@every
@settings(max_examples=25, deadline=None)
@given(x=matrices())
def test_negation_negates_the_values(layout, x):
    quantize, restore = LAYOUTS[layout]
    codes, scale = quantize(x)
    negative, same = quantize(-x)
    assert torch.equal(restore(negative, same), -restore(codes, scale))


@row_wise
@settings(max_examples=25, deadline=None)
@given(x=matrices())
def test_a_row_does_not_depend_on_its_company(layout, x):
    quantize, _ = LAYOUTS[layout]
    codes, scale = quantize(x)
    for i in range(x.shape[0]):
        alone, alone_scale = quantize(x[i : i + 1])
        assert torch.equal(bits(alone)[0], bits(codes)[i])
        assert torch.equal(alone_scale[0], scale[i])


def test_a_block_does_not_depend_on_other_blocks():
    x = torch.randn(256, 300)
    codes, scale = quantize_fp8_block(x)
    alone, alone_scale = quantize_fp8_block(x[128:, 128:256])
    assert torch.equal(bits(alone), bits(codes)[128:, 128:256])
    assert torch.equal(alone_scale, scale[1:, 1:2])


@pytest.mark.parametrize(
    ("layout", "code"),
    [
        ("tensor", 88.0),
        ("per_tensor_dynamic", 88.0),
        ("block", 88.0),
        ("channel", 80.0),
        ("token", 80.0),
        ("group", 80.0),
    ],
)
def test_codes_come_from_the_reciprocal_or_the_division_as_in_each_kernel(layout, code):
    # 0.80859375 * 448 / 4.3125 = 84, half between 80 and 88: fp32 division by the rounded scale gives 84, which goes
    # to the even mantissa, 80; the product with the rounded reciprocal is just above 84.
    codes, _ = LAYOUTS[layout][0](torch.tensor([[4.3125, 0.80859375]]))
    assert codes.float().tolist() == [[448.0, code]]


def test_scales_are_true_quotients():
    # Times a rounded 1/448, about half of the scales would differ in the last bit.
    x = bf16_matrix(1)
    _, scale = quantize_fp8_channel(x)
    exact = (x.abs().amax(-1, keepdim=True).double() / 448).float()
    assert torch.equal(scale, exact)


def test_siblings_share_a_scale():
    q, k = torch.tensor([[2.0, 1.0]]), torch.tensor([[448.0, -3.5]])
    amax = shared_amax([q, k])
    codes, scale = quantize_fp8_tensor(q, amax)
    assert amax.tolist() == [448.0]
    assert scale.tolist() == [1.0]
    assert codes.float().tolist() == [[2.0, 1.0]]
    assert torch.equal(torch.cat([bits(codes), bits(quantize_fp8_tensor(k, amax)[0])]), bits(fused_codes(q, k)))


def fused_codes(*weights: torch.Tensor) -> torch.Tensor:
    return quantize_fp8_tensor(torch.cat(weights))[0]


def test_values_beyond_a_given_amax_saturate():
    codes, _ = quantize_fp8_tensor(torch.tensor([[5.0, -1000.0]]), torch.tensor(448.0))
    assert codes.float().tolist() == [[5.0, -448.0]]


def test_shared_amax_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no tensors"):
        shared_amax([])


def test_ragged_blocks_have_their_own_scales():
    # 3x5 in 2x4 blocks: the last row and the last column make blocks of their own.
    x = torch.ones(3, 5)
    x[2, 4] = 4.48
    codes, scale = quantize_fp8_block(x, (2, 4))
    torch.testing.assert_close(scale * 448, torch.tensor([[1.0, 1.0], [1.0, 4.48]]))
    assert codes.float().tolist() == [[448.0] * 5] * 3
    assert dequantize_fp8_block(codes, scale, (2, 4), torch.bfloat16).dtype == torch.bfloat16


def test_a_ragged_group_has_its_own_scale():
    x = torch.tensor([[[1.0, 1.0, 1.0, 1.0, 4.48, 2.24]]])
    codes, scale = quantize_fp8_group(x, 4)
    torch.testing.assert_close(scale * 448, torch.tensor([[[1.0, 4.48]]]))
    assert codes.float().tolist() == [[[448.0, 448.0, 448.0, 448.0, 448.0, 224.0]]]
    assert dequantize_fp8_group(codes, scale, 4).shape == x.shape


@every
def test_zeros_have_zero_codes_and_a_positive_finite_scale(layout):
    quantize, restore = LAYOUTS[layout]
    codes, scale = quantize(torch.zeros(3, 6))
    assert bool(((scale > 0) & scale.isfinite()).all())
    assert codes.float().count_nonzero() == 0
    assert restore(codes, scale).count_nonzero() == 0


def test_small_rows_have_the_floor_of_the_scale():
    # amax 448 * floor = 1/512; below, the scale no longer shrinks.
    _, scale = quantize_fp8_channel(torch.tensor([[1 / 512], [1e-5], [1 / 256]]))
    assert scale.flatten().tolist() == pytest.approx([FP8_SCALE_FLOOR, FP8_SCALE_FLOOR, 2 * FP8_SCALE_FLOOR])


@every
def test_subnormal_values_give_finite_codes(layout):
    quantize, restore = LAYOUTS[layout]
    codes, scale = quantize(torch.tensor([[1e-42, -1e-44]]))
    assert bool(restore(codes, scale).isfinite().all())
    assert bool((scale > 0).all())


@every
def test_one_huge_value_is_kept_and_empties_what_shares_its_scale(layout):
    quantize, restore = LAYOUTS[layout]
    codes, scale = quantize(torch.tensor([[3e38, 1.0, -1.0]]))
    assert codes.float().tolist() == [[448.0, 0.0, 0.0]]
    assert restore(codes, scale)[0, 0].item() == pytest.approx(3e38, rel=1e-6)


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_or_inf_makes_all_that_shares_its_scale_nan(layout, bad):
    quantize, restore = LAYOUTS[layout]
    codes, scale = quantize(torch.tensor([[1.0, bad]]))
    assert bool(scale.isnan().all())
    assert bool(restore(codes, scale).isnan().all())


@row_wise
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_or_inf_spares_other_rows(layout, bad):
    quantize, restore = LAYOUTS[layout]
    x = torch.tensor([[1.0, bad], [1.0, 0.5]])
    assert bool(restore(*quantize(x))[1].isfinite().all())


@pytest.mark.parametrize("quantize", [quantize_fp8_tensor, quantize_fp8_channel, quantize_fp8_block])
def test_a_weight_must_be_a_matrix(quantize):
    with pytest.raises(ValueError, match=r"\[out, in\]"):
        quantize(torch.zeros(4))


def test_activations_may_have_any_leading_shape():
    x = torch.randn(2, 3, 256)
    assert [t.shape for t in quantize_fp8_token(x)] == [(2, 3, 256), (2, 3, 1)]
    assert [t.shape for t in quantize_fp8_group(x)] == [(2, 3, 256), (2, 3, 2)]
    assert [t.shape for t in quantize_fp8_per_tensor_dynamic(x)] == [(2, 3, 256), (1,)]
