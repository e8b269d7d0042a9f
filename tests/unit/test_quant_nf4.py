"""nf4 is bitsandbytes' format: its codes, its table, its bits."""

from __future__ import annotations

import pytest
import torch

from lqrl.quant.methods.nf4 import NF4_LEVELS, Nf4

functional = pytest.importorskip("bitsandbytes.functional")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def weight(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(48, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    values[3, 64:128] = 0.0
    values[5, 7] = 100.0
    return values.to(device, dtype)


def test_the_table_is_that_of_bitsandbytes():
    assert torch.equal(torch.tensor(NF4_LEVELS), functional.get_4bit_type("nf4", device="cpu"))


@DTYPES
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_dequantized_weights_have_the_bits_of_bitsandbytes(dtype, out, device):
    w = weight(device, dtype)
    packed, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
    state.dtype = out
    ours = Nf4().quantize(w)
    assert torch.equal(ours["weight_packed"].flatten(), packed.flatten())
    assert torch.equal(Nf4().dequantize(ours, out), functional.dequantize_4bit(packed, state))


def test_a_block_by_hand(device):
    # 64 weights, the largest 2: levels 1 and -1 are +-2, level 7 is 0. 0.33 / 2 = 0.165 is nearest to level 9 (0.1609).
    w = torch.zeros(1, 64, device=device)
    w[0, :4] = torch.tensor([2.0, -2.0, 0.0, 0.33])
    tensors = Nf4().quantize(w)
    assert tensors["weight_scale"].tolist() == [[2.0]]
    assert tensors["weight_packed"][0, :3].tolist() == [15 * 16 + 0, 7 * 16 + 9, 7 * 16 + 7]
    assert Nf4().dequantize(tensors, torch.float32)[0, :4].tolist() == [2.0, -2.0, 0.0, 2 * torch.tensor(NF4_LEVELS)[9]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_has_no_scale(bad, device):
    w = weight(device, torch.float32)
    w[1, 70] = bad
    scale = Nf4().quantize(w)["weight_scale"]
    assert scale.isnan().nonzero().tolist() == [[1, 1]]


def test_a_zero_block_is_zero(device):
    tensors = Nf4().quantize(weight(device, torch.float32))
    assert tensors["weight_scale"][3, 1] == 0
    assert torch.all(Nf4().dequantize(tensors, torch.float32)[3, 64:128] == 0)


def test_a_block_of_two_rows_is_refused():
    with pytest.raises(ValueError, match="multiple of 64 inputs, got 96"):
        Nf4().quantize(torch.zeros(2, 96))
