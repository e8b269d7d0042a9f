"""Layers of one input as one product: the bits of each, and of what a refresh writes into them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lqrl.engines.base import EngineSpec, RefreshError
from lqrl.engines.torch import TorchEngineFactory
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.fused import QuantizedProduct, fuse_, scales_agree
from lqrl.quant.linear import QuantizedLinear
from lqrl.quant.methods import linear_method
from lqrl.quant.methods.exact import exact_method
from lqrl.quant.scheme import PRESETS, QuantScheme
from lqrl.testing import tiny_config

WIDTHS = (256, 128, 128)
K = 256
CUDA = torch.device("cuda")
# Those whose kernels read the shipped tensors on a GPU of compute capability 8.9; fp8 per tensor spreads its scale.
FUSED = ["int8_w8a8", "fp8_per_channel", "fp8_per_block", "int8_w8a16", "int4_w4a16", "nvfp4_w4a16", "mxfp4_w4a16"]


def linears(bias: Sequence[bool], device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = [nn.Linear(K, n, bias=b, device=device, dtype=dtype) for n, b in zip(WIDTHS, bias, strict=True)]
    return [layer.requires_grad_(False) for layer in made]


def quantized(name: str, device: torch.device, exact: bool, bias: bool = False) -> list[QuantizedLinear]:
    scheme_method = linear_method(QuantScheme.preset(name))
    method = exact_method(scheme_method) if exact else scheme_method
    layers = linears([bias] * 3, device, torch.bfloat16)
    amax = torch.stack([layer.weight.abs().amax().float() for layer in layers]).amax(0, keepdim=True)
    return [QuantizedLinear(layer, method, amax if method.shares_amax else None) for layer in layers]


def side_by_side(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    return torch.cat([layer(x) for layer in layers], -1)


@pytest.mark.parametrize("bias", [False, True])
def test_plain_layers_become_views_of_one_weight(bias):
    layers, x = linears([bias] * 3, torch.device("cpu")), torch.randn(5, K)
    state = {name: t.clone() for layer in layers for name, t in layer.state_dict(prefix=str(id(layer))).items()}
    product = fuse_(layers)
    assert product is not None
    torch.testing.assert_close(product(x), side_by_side(layers, x), rtol=0, atol=1e-5)
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1
    for layer in layers:
        assert layer.weight.is_contiguous()
        assert all(torch.equal(t, state[name]) for name, t in layer.state_dict(prefix=str(id(layer))).items())
    with torch.no_grad():
        layers[1].weight.copy_(torch.ones_like(layers[1].weight))
    torch.testing.assert_close(product(x), side_by_side(layers, x), rtol=0, atol=1e-4)


def test_what_has_no_common_product_is_left_alone():
    cpu = torch.device("cpu")
    int8, fp8, plain = (
        quantized("int8_w8a8", cpu, False),
        quantized("fp8_per_channel", cpu, False),
        linears([True] * 3, cpu),
    )
    before = [t.data_ptr() for layer in (*int8, *plain) for t in (*layer.parameters(), *layer.buffers())]
    assert fuse_(linears([True, False, True], cpu)) is None
    assert fuse_([plain[0], int8[1], int8[2]]) is None
    assert fuse_([int8[0], fp8[1], fp8[2]]) is None
    assert fuse_(int8) is None  # the C kernel reads a layout of its own
    adapted = quantized("int4_w4a16", cpu, False)
    adapted[1].add_low_rank(4, 1.0)
    assert fuse_(adapted) is None
    assert before == [t.data_ptr() for layer in (*int8, *plain) for t in (*layer.parameters(), *layer.buffers())]


@pytest.mark.parametrize("name", [n for n, s in PRESETS.items() if s.quantizes and n != "nf4"])
def test_rows_of_a_block_have_codes_of_their_own_and_exact_methods_say_the_same(name):
    method, weight = linear_method(PRESETS[name]), torch.randn(256, K)
    block = method.row_block
    for exact in [exact_method(method)] if name != "fp8_per_tensor" else []:
        assert (exact.row_block, exact.shares_amax) == (block, method.shares_amax)
    amax = weight.abs().amax().view(1) if method.shares_amax else None
    whole, part = method.quantize(weight, amax), method.quantize(weight[block : 2 * block], amax)
    for key, tensor in whole.items():
        own = tensor if tensor.numel() == 1 else tensor.view(256 // block, -1)[1]
        assert torch.equal(own.flatten().view(torch.uint8), part[key].flatten().view(torch.uint8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_of_rows_that_would_span_two_layers_are_not_fused(device, monkeypatch):
    monkeypatch.setattr("test_quant_fused.WIDTHS", (160, 160, 160))
    assert fuse_(quantized("fp8_per_block", torch.device(device), exact=device == "cuda")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_a_low_bit_product_has_the_bits_of_its_layers_and_follows_a_refresh(name, bias):
    layers, others = (quantized(name, CUDA, exact=True, bias=bias) for _ in range(2))
    product = fuse_(layers)
    assert product is not None
    for rows in (1, 3, 64, 300):
        x = torch.randn(rows, K, device=CUDA, dtype=torch.bfloat16)
        assert torch.equal(product(x), side_by_side(others, x))
        assert torch.equal(side_by_side(layers, x), side_by_side(others, x))
    with torch.no_grad():
        for layer, other in zip(layers, others, strict=True):
            codes = other.shipped_names[0]
            for own in (layer, other):
                bits = own.shipped()[codes].view(torch.uint8)
                bits.copy_(bits.flip(0))
                own.pack()
    assert torch.equal(product(x), side_by_side(others, x))
    assert torch.equal(side_by_side(layers, x), side_by_side(others, x))


@pytest.mark.gpu
def test_scales_that_do_not_lie_by_rows_are_not_fused():
    assert fuse_(quantized("fp8_per_tensor", CUDA, exact=True)) is None


def test_scales_of_whole_tensors_must_agree():
    def product(*scales: float) -> QuantizedProduct:
        method = linear_method(QuantScheme.preset("nvfp4_w4a16"))
        return QuantizedProduct(method, (), None, (tuple(torch.tensor([s]) for s in scales),))

    assert scales_agree([])
    assert scales_agree([product(2.0, 2.0, 2.0), product(3.0, 3.0), torch.nn.functional.silu])
    assert not scales_agree([product(2.0, 2.0, 2.0), product(3.0, 4.0)])


@pytest.mark.gpu
def test_a_refresh_with_other_scales_for_siblings_is_refused():
    scheme, config = QuantScheme.preset("nvfp4_w4a16"), tiny_config("qwen3")
    policy = load_model(config, dtype=torch.float32, device=CUDA, seed=0)
    engine = TorchEngineFactory()(EngineSpec(policy.config, scheme, torch.bfloat16, CUDA, 64, ()))
    weights = dict(export_weights(policy, scheme, export_dtype=torch.bfloat16))
    engine.update_weights(weights.items(), policy_version=0)
    name = next(name for name in weights if name.endswith("k_proj.weight_global_scale"))
    with pytest.raises(RefreshError, match="came with different scales for whole tensors"):
        engine.update_weights((weights | {name: weights[name] * 2}).items(), policy_version=1)
