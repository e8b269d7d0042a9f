"""Every preset on one footing: learner layer, engine layer, export and refresh agree bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lqrl.engines.base import EngineSpec, RefreshError
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.quant import QuantScheme, export_weights, prepare_
from lqrl.quant.linear import AlignedLinear, QuantizedLinear
from lqrl.quant.methods import linear_method
from lqrl.quant.prepare import sibling_groups
from lqrl.quant.scheme import PRESETS, TensorFormat
from lqrl.testing.models import tiny_config
from lqrl.types import Prompt, SamplingParams

MISSING = set() if find_spec("bitsandbytes") else {"nf4"}
FORMATS = sorted(name for name, scheme in PRESETS.items() if scheme.quantizes and name not in MISSING)
WEIGHT_ONLY = [name for name in FORMATS if PRESETS[name].activation is None]
DTYPES = [torch.float32, torch.bfloat16]
N, K = 48, 256


def linear(device: torch.device | str = "cpu", *, seed: int = 0, bias: bool = True) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(K, N, bias=bias).to(device)


def inputs(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, rows: int = 7) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def wide_config(family: str = "qwen3"):
    config = tiny_config(family)
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32  # groups of 128 must fit
    return config


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_learner_and_engine_layers_are_equal_bit_for_bit(name, dtype, device):
    method, plain, x = linear_method(PRESETS[name]), linear(device), inputs(device, dtype)
    engine = QuantizedLinear(copy.deepcopy(plain).to(dtype), method)
    learner = AlignedLinear(plain, method, dtype)
    for shipped, tensor in learner.quantized_weight().items():
        assert torch.equal(bits(tensor), bits(engine.get_buffer(shipped)))
    y = learner(x)
    assert y.dtype == dtype
    assert torch.equal(y, engine(x))
    assert torch.equal(learner.product()(x), engine.logits(x))
    assert engine.logits(x).dtype == torch.float32


@pytest.mark.parametrize("name", FORMATS)
def test_the_product_is_that_of_the_dequantized_operands(name, device):
    """The kernel computes what the codes mean: only the order of the sums is free."""
    method, x = linear_method(PRESETS[name]), inputs(device)
    tensors = method.quantize(linear(device).weight.detach())
    y = method.linear(x, method.operands(tensors, torch.float32), None)
    expected = method.round_input(x).double() @ method.dequantize(tensors, torch.float32).double().T
    torch.testing.assert_close(y.double(), expected, rtol=2e-3 if x.is_cuda else 1e-5, atol=1e-3 if x.is_cuda else 1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_its_company(name, device):
    """The quantizer of an activation sees its row alone; GEMMs of other heights may sum in another order."""
    method, x = linear_method(PRESETS[name]), inputs(device)
    assert torch.equal(method.round_input(x)[2:3], method.round_input(x[2:3]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_straight_through_gradient_is_that_of_a_plain_layer(name, dtype, device):
    plain = linear(device).to(dtype)
    layer = AlignedLinear(copy.deepcopy(plain), linear_method(PRESETS[name]), dtype)
    x, x2 = (inputs(device, dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(7, N, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    F.linear(x, plain.weight, plain.bias).backward(grad)
    layer(x2).backward(grad)
    torch.testing.assert_close(x2.grad, x.grad)
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("name", FORMATS)
def test_the_dequantized_backward_multiplies_what_the_forward_did(name, device):
    method = linear_method(PRESETS[name])
    layer = AlignedLinear(linear(device), method, torch.float32, backward="dequantized")
    x, grad = inputs(device).requires_grad_(), torch.randn(7, N).to(device)
    layer(x).backward(grad)
    values = method.dequantize(layer.quantized_weight(), torch.float32)
    torch.testing.assert_close(x.grad, grad @ values)
    torch.testing.assert_close(layer.weight.grad, grad.T @ method.round_input(x.detach()))
    assert not torch.allclose(values, layer.weight.detach(), atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_a_refresh_keeps_every_storage_and_leaves_the_new_layer(name, device):
    method, x = linear_method(PRESETS[name]), inputs(device)
    engine, wanted = (QuantizedLinear(linear(device, seed=seed), method) for seed in (0, 1))
    assert not torch.equal(engine(x), wanted(x))
    addresses = {n: t.data_ptr() for n, t in engine.named_buffers()}
    engine.load_state_dict(wanted.state_dict())
    assert {n: t.data_ptr() for n, t in engine.named_buffers()} == addresses
    assert torch.equal(engine(x), wanted(x))


@pytest.mark.parametrize("name", FORMATS)
def test_moving_the_compute_dtype_leaves_codes_and_scales(name):
    method = linear_method(PRESETS[name])
    engine = QuantizedLinear(linear(), method)
    before = {n: t.clone() for n, t in engine.shipped().items()}
    engine.to(torch.bfloat16)
    after = engine.shipped()
    assert all(torch.equal(bits(after[n]), bits(t)) and after[n].dtype == t.dtype for n, t in before.items())
    x = inputs(dtype=torch.bfloat16)
    expected = method.linear(x, method.operands(before, torch.bfloat16), engine.bias)
    assert torch.equal(engine(x), expected)


def built(name: str, dtype: torch.dtype, device: torch.device, family: str = "qwen3"):
    scheme = QuantScheme.preset(name)
    policy = load_model(wide_config(family), dtype=torch.float32, seed=0, device=device)
    prepare_(policy, scheme, export_dtype=dtype)
    engine: TorchEngine = TorchEngineFactory()(EngineSpec(policy.config, scheme, dtype, device, 64, ()))
    engine.update_weights(export_weights(policy, scheme, export_dtype=dtype), policy_version=0)
    return policy, engine


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_engine_samples_what_the_aligned_learner_scores(name, family, device):
    policy, engine = built(name, torch.float32, device, family)
    completions = engine.generate([Prompt(0, (5, 6, 7))], SamplingParams(n=8, max_tokens=8), seed=0)[0]
    ids = torch.tensor([[5, 6, 7, *c.token_ids.tolist()] for c in completions], device=device)
    rollout = torch.stack([c.logprobs for c in completions]).cpu()
    plain = load_model(wide_config(family), dtype=torch.float32, seed=0, device=device)
    with torch.no_grad():
        aligned, unaligned = (
            Scorer(p, 1.0, torch.float32).score(ids, torch.ones_like(ids, dtype=torch.bool))[:, 3:].cpu()
            for p in (policy, plain)
        )
    gap, other = (aligned - rollout).abs().mean(), (unaligned - rollout).abs().mean()
    # A weight-only format has no second rounding that a difference could flip.
    assert gap < (1e-4 if name in WEIGHT_ONLY else 0.1 * other)
    assert other > 1e-3


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_and_a_prepared_model_export_the_same(name, dtype):
    scheme = QuantScheme.preset(name)
    plain, prepared = (load_model(wide_config(), dtype=torch.float32, seed=0) for _ in range(2))
    prepare_(prepared, scheme, export_dtype=dtype)
    a = list(export_weights(plain, scheme, export_dtype=dtype))
    b = list(export_weights(prepared, scheme, export_dtype=dtype))
    assert [n for n, _ in a] == [n for n, _ in b]
    assert all(torch.equal(bits(x), bits(y)) for (_, x), (_, y) in zip(a, b, strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_with_nan_or_inf_is_refused_by_name(name, bad):
    policy = load_model(wide_config(), dtype=torch.float32, seed=0)
    with torch.no_grad():
        policy.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = bad
    # Siblings with one scale are all spoiled; the first of them is named.
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.(gate|up)_proj\.weight holds NaN or inf"):
        list(export_weights(policy, QuantScheme.preset(name), export_dtype=torch.float32))


@pytest.mark.parametrize("name", ["fp8_per_channel", "nvfp4_w4a16", "mxfp8"])
def test_a_nan_scale_on_the_way_is_refused_by_the_engine(name):
    policy, engine = built(name, torch.float32, torch.device("cpu"))
    weights = {n: t.clone() for n, t in export_weights(policy, QuantScheme.preset(name), export_dtype=torch.float32)}
    scale = next(n for n in weights if n.endswith("weight_scale"))
    broken = 255 if weights[scale].dtype == torch.uint8 else float("nan")
    weights[scale].view(-1)[0] = broken
    with pytest.raises(RefreshError, match=f"{scale} holds NaN or inf"):
        engine.update_weights(weights.items(), policy_version=1)


def test_fused_siblings_share_a_scale_where_the_format_has_one():
    names = [f"a.{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")] + ["b.q_proj"]
    assert sibling_groups(names) == [
        ["a.q_proj", "a.k_proj", "a.v_proj"], ["a.o_proj"], ["a.gate_proj", "a.up_proj"], ["a.down_proj"], ["b.q_proj"],
    ]  # fmt: skip
    policy, engine = built("fp8_per_tensor", torch.float32, torch.device("cpu"))
    attention = policy.get_submodule("model.layers.0.self_attn")
    with torch.no_grad():
        attention.get_submodule("v_proj").weight.mul_(3)  # the largest of the three
    scales = [attention.get_submodule(f"{n}_proj").quantized_weight()["weight_scale"] for n in "qkvo"]
    assert torch.equal(scales[0], scales[2])
    assert torch.equal(scales[1], scales[2])
    assert not torch.equal(scales[3], scales[2])
    expected = attention.get_submodule("v_proj").weight.detach().abs().max() / torch.tensor(448.0)
    assert scales[0].item() == expected.item()
    weights = export_weights(policy, QuantScheme.preset("fp8_per_tensor"), export_dtype=torch.float32)
    engine.update_weights(weights, policy_version=1)
    assert torch.equal(engine.decoder.model.get_buffer("model.layers.0.self_attn.q_proj.weight_scale"), scales[0])


def test_a_change_of_one_sibling_is_seen_by_the_others():
    policy, _ = built("fp8_per_tensor", torch.float32, torch.device("cpu"))
    mlp = policy.get_submodule("model.layers.0.mlp")
    before = mlp.get_submodule("gate_proj").quantized_weight()["weight_scale"].clone()
    with torch.no_grad():
        mlp.get_submodule("up_proj").weight[0, 0] = 10.0
    after = mlp.get_submodule("gate_proj").quantized_weight()["weight_scale"]
    assert after.item() == 10.0 / torch.tensor(448.0)
    assert before.item() < after.item()


@pytest.mark.parametrize("name", ["fp8_per_tensor", "nvfp4_w4a16"])
def test_invalidate_forgets_the_common_scale_too(name):
    policy, _ = built(name, torch.float32, torch.device("cpu"))
    mlp = policy.get_submodule("model.layers.0.mlp")
    layers = [mlp.get_submodule(n) for n in ("gate_proj", "up_proj")]
    for layer in layers:
        layer.quantized_weight()
        layer.weight.data.mul_(100)  # hidden from autograd
    layers[0].invalidate()
    for layer in layers:
        values = layer.method.dequantize(layer.quantized_weight(), torch.float32)
        assert (values - layer.weight).norm() < 0.15 * layer.weight.norm()


def test_a_width_that_the_format_cannot_hold_is_named_before_anything_is_swapped():
    policy = load_model(tiny_config("llama"), dtype=torch.float32, seed=0)  # 64 inputs
    with pytest.raises(ValueError, match=r"q_proj has 64 inputs, which scheme 'int4_w4a16' cannot hold: .*skip: \["):
        prepare_(policy, QuantScheme.preset("int4_w4a16"), export_dtype=torch.float32)
    assert not any(isinstance(m, AlignedLinear) for m in policy.modules())


def linears(**widths: int) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(width, 8) for name, width in widths.items()})


def test_all_layers_that_a_format_cannot_hold_are_named_at_once():
    model = nn.ModuleDict({"block": linears(q_proj=128, o_proj=64, down_proj=160)})
    expected = r"block\.o_proj has 64 inputs, block\.down_proj has 160 inputs, which .*; take int4_w4a16_g32, or leave"
    with pytest.raises(ValueError, match=expected) as error:
        prepare_(model, QuantScheme.preset("int4_w4a16"), export_dtype=torch.float32)
    skip = json.loads(re.findall(r"skip: (\[.*?\])\}", str(error.value))[0])
    scheme = QuantScheme("int4_w4a16", skip=tuple(skip))
    assert prepare_(model, scheme, export_dtype=torch.float32) == ["block.q_proj"]


@pytest.mark.parametrize(
    ("width", "fix"), [(160, "take int4_w4a16_g32"), (48, "take a preset without groups, such as int8_w8a8")]
)
def test_skipping_every_layer_is_not_proposed(width, fix):
    model = linears(q_proj=64, down_proj=width)
    with pytest.raises(ValueError, match=rf"input width 64; {fix}") as error:
        prepare_(model, QuantScheme.preset("int4_w4a16"), export_dtype=torch.float32)
    assert "skip" not in str(error.value)


def test_a_pair_of_formats_that_nothing_computes_lists_those_that_are():
    scheme = QuantScheme("odd", weight=TensorFormat("fp8_e4m3", "channel"), activation=PRESETS["int8_w8a8"].activation)
    nearest = r"no kernel computes scheme 'odd' .*this weight goes as fp8_e4m3 per channel with fp8_e4m3 per token"
    with pytest.raises(ValueError, match=nearest):
        linear_method(scheme)
    with pytest.raises(ValueError, match=r"supported: int4 per channel with int8 .*; int4 per group32 with high-prec"):
        linear_method(QuantScheme("odd", weight=TensorFormat("int4", "tensor")))
    with pytest.raises(ValueError, match="group_size belongs to granularity 'group'"):
        TensorFormat("int4", "group")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_can_hold_the_output_head(name, device):
    policy, engine = built(f"{name}+lm_head", torch.bfloat16, device)
    hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    head = policy.get_output_embeddings()
    assert isinstance(head, AlignedLinear)
    assert torch.equal(head.product()(hidden), engine.decoder.logits(hidden))


def test_presets_have_their_own_names_and_methods():
    for name in FORMATS:
        assert PRESETS[name].name == name
        assert dataclasses.is_dataclass(linear_method(PRESETS[name]))
