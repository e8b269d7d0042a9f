"""Codes and refreshes follow the tensors that are there, whatever lay at their addresses before."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lqrl.quant.linear import AlignedLinear
from lqrl.quant.methods import IntegerGemm
from lqrl.quant.weight_key import identity, weight_key, weights_stamp

FORMAT = IntegerGemm()


def replaced(layer: nn.Linear, shape: tuple[int, ...]) -> None:
    del layer.weight
    layer.weight = nn.Parameter(torch.randn(shape))


def replaced_twice(layer: nn.Linear, shape: tuple[int, ...]) -> None:
    for _ in range(2):
        layer.weight = nn.Parameter(torch.randn(shape))


def assigned_twice(layer: nn.Linear, shape: tuple[int, ...]) -> None:
    for _ in range(2):
        layer.load_state_dict({"weight": torch.randn(shape)}, assign=True)


def written(layer: nn.Linear, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        layer.weight.normal_()


def swapped(layer: nn.Linear, shape: tuple[int, ...]) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.randn(shape)))


@pytest.mark.parametrize("change", [replaced, replaced_twice, assigned_twice, written, swapped])
def test_another_weight_has_other_codes(change):
    torch.manual_seed(0)
    layer = AlignedLinear(nn.Linear(64, 48, bias=False), FORMAT, torch.float32)
    x, stamps = torch.randn(4, 64), []
    for _ in range(40):  # addresses and ids come back within a few
        change(layer, (48, 64))
        assert torch.equal(layer.quantized_weight()["weight"], FORMAT.quantize(layer.weight.detach())["weight"])
        fresh = AlignedLinear(copy.deepcopy(nn.Linear(64, 48, bias=False)), FORMAT, torch.float32)
        fresh.weight = nn.Parameter(layer.weight.detach().clone())
        assert torch.equal(layer(x), fresh(x))
        stamp = weights_stamp(layer.parameters())
        assert stamp not in stamps
        assert stamp == weights_stamp(layer.parameters())
        stamps.append(stamp)


def test_weights_that_stand_in_for_the_layers_own():
    torch.manual_seed(0)
    layer = AlignedLinear(nn.Linear(64, 48, bias=False), FORMAT, torch.float32)
    x, own = torch.randn(4, 64), layer.weight.detach().clone()

    def product(weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    for _ in range(40):
        weight = own + torch.randn_like(own)
        fresh = AlignedLinear(nn.Linear(64, 48, bias=False), FORMAT, torch.float32)
        fresh.weight = nn.Parameter(weight.clone())
        assert torch.equal(product(weight), fresh(x))
        del weight
    assert torch.equal(product(own), layer(x))


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_a_key_is_of_one_tensor(kind, tmp_path):
    a, b = kind(torch.zeros(3)), kind(torch.zeros(3))
    assert identity(a) == identity(a) != identity(b)
    assert weight_key([a]) == weight_key([a]) != weight_key([b])
    torch.save({"a": a}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)["a"]
    assert b"lqrl.quant" not in (tmp_path / "a.pt").read_bytes()
    for other in (copy.deepcopy(a), copy.copy(a), pickle.loads(pickle.dumps(a)), loaded):
        assert torch.equal(other, a)
        assert identity(other) != identity(a)


def test_copies_that_stand_in_for_the_layers_own():
    torch.manual_seed(0)
    layer = AlignedLinear(nn.Linear(64, 48, bias=False), FORMAT, torch.float32)
    base, x = torch.randn(48, 64), torch.randn(4, 64)
    for _ in range(40):
        for weight in (copy.deepcopy(base), pickle.loads(pickle.dumps(nn.Parameter(base)))):
            fresh = AlignedLinear(nn.Linear(64, 48, bias=False), FORMAT, torch.float32)
            fresh.weight = nn.Parameter(weight.detach().clone())
            assert torch.equal(torch.func.functional_call(layer, {"weight": weight}, (x,)), fresh(x))
            weight_key([base])  # what is copied next has been seen
        base.normal_()


def test_copies_and_pickles_of_a_layer_that_has_run():
    layer = AlignedLinear(nn.Linear(64, 48), FORMAT, torch.float32)
    x = torch.randn(4, 64)
    for other in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))


def test_a_weight_made_in_inference_mode():
    with torch.inference_mode():
        linear = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match=r"outside torch.inference_mode\(\)"):
        AlignedLinear(linear, FORMAT, torch.float32)
