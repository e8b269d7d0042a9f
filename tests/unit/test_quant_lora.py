"""LoRA on a low-bit base: learner and engine compute the same, gradients are those of the plain adapter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lora_models import PREFIX, built, exported, perturb_, policy
from torch import nn

from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.quant import (
    AlignedLinear,
    Lora,
    QuantScheme,
    add_adapters_,
    export_weights,
    load_adapters_,
    prepare_,
    target_modules,
)
from lqrl.quant.adapters import adapter_layers, adapter_weights
from lqrl.quant.lora import AdaptedLinear, LoraLinear, MergedLinear
from lqrl.quant.methods import linear_method
from lqrl.quant.scheme import PRESETS
from lqrl.testing.models import tiny_config
from lqrl.types import Prompt, SamplingParams

pytest.importorskip("peft")
SCHEMES = ["none", "int8_w8a8", "nvfp4_w4a16"]
REFRESHES = ["adapter", "merge"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("refresh", REFRESHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_learner_and_engine_layers_are_equal_bit_for_bit(scheme, refresh, dtype, device):
    """Qwen2 has biases; o_proj gets no adapter."""
    lora = Lora(r=4, refresh=refresh, target_modules=("q_proj", "k_proj", "mlp.down_proj"))
    model, rollout = built(scheme, lora, dtype, device, "qwen2")
    assert len(adapter_layers(model)) == 6
    for name in (*adapter_layers(model), "model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj"):
        ours, theirs = model.get_submodule(name), rollout.decoder.model.get_submodule(name)
        x = torch.randn(5, ours.in_features, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        y = ours(x) if isinstance(ours, AlignedLinear) else F.linear(x, *(p.to(dtype) for p in ours.parameters()))
        assert y.dtype == dtype
        assert torch.equal(y, theirs(x)), name


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("refresh", REFRESHES)
def test_the_engine_samples_what_the_learner_scores(scheme, refresh, device):
    model, rollout = built(scheme, Lora(r=4, refresh=refresh), torch.float32, device)
    completions = rollout.generate([Prompt(0, (5, 6, 7))], SamplingParams(n=8, max_tokens=8), seed=0)[0]
    ids = torch.tensor([[5, 6, 7, *c.token_ids.tolist()] for c in completions], device=device)
    sampled = torch.stack([c.logprobs for c in completions]).cpu()
    whole = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        aligned = Scorer(model, 1.0, torch.float32).score(ids, whole)[:, 3:].cpu()
        base = policy(scheme, Lora(r=4, refresh=refresh), torch.float32, device)  # adapters of zero
        without = Scorer(base, 1.0, torch.float32).score(ids, whole)[:, 3:].cpu()
    gap, other = (aligned - sampled).abs().mean(), (without - sampled).abs().mean()
    assert gap < (1e-4 if PRESETS[scheme].activation is None else 0.1 * other)
    assert other > 1e-2  # the adapter reaches the engine's output


@pytest.mark.parametrize("refresh", REFRESHES)
def test_an_adapter_of_zero_changes_nothing(refresh):
    lora = Lora(r=4, refresh=refresh)
    model = policy("nvfp4_w4a16", lora, torch.float32)
    plain = load_model(tiny_config("qwen3"), dtype=torch.float32, seed=0)
    prepare_(plain, QuantScheme.preset("nvfp4_w4a16"), export_dtype=torch.float32)
    ids = torch.arange(24).view(2, 12) % 60
    whole = torch.ones_like(ids, dtype=torch.bool)
    a, b = (Scorer(m, 1.0, torch.float32).score(ids, whole) for m in (model, plain))
    assert torch.equal(a, b)


def test_the_adapted_layer_is_that_of_peft():
    """In full precision, where peft has a forward of its own: the same bits."""
    from peft import LoraConfig, inject_adapter_in_model

    plain = load_model(tiny_config("llama"), dtype=torch.float32, seed=0)
    names = Lora(r=4).targets(plain)
    theirs = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=names), copy.deepcopy(plain))
    ours = copy.deepcopy(plain)
    add_adapters_(ours, Lora(r=4, alpha=8), export_dtype=torch.float32, seed=0)
    perturb_(ours)
    for name, layer in adapter_layers(ours).items():
        wrapped = theirs.get_submodule(name)
        with torch.no_grad():
            wrapped.lora_A["default"].weight.copy_(layer.lora_A.weight)
            wrapped.lora_B["default"].weight.copy_(layer.lora_B.weight)
        x = torch.randn(3, layer.in_features)
        assert torch.equal(layer(x), wrapped(x))


def layers(kind: type[LoraLinear], scheme: str, dtype: torch.dtype, backward: str = "high_precision"):
    """A layer with an adapter (r = 3, scaling 2), and the plain layer of the merged weight."""
    torch.manual_seed(0)
    base = nn.Linear(64, 48)
    a, b = nn.Linear(64, 3, bias=False), nn.Linear(3, 48, bias=False)
    method = linear_method(PRESETS[scheme])
    layer = kind(AlignedLinear(copy.deepcopy(base), method, dtype, backward), a, b, 2.0)
    merged = nn.Linear(64, 48)
    with torch.no_grad():
        merged.weight.copy_(base.weight + 2.0 * (b.weight @ a.weight))
        merged.bias.copy_(base.bias)
    return layer, AlignedLinear(merged, method, dtype, backward)


@pytest.mark.parametrize("scheme", ["int8_w8a8", "int4_w4a16_g32", "nvfp4_w4a4"])
@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_the_merged_layer_is_the_layer_of_the_merged_weight(scheme, backward):
    """dA = s B^T dW and dB = s dW A^T, with dW the gradient of the plain layer."""
    layer, plain = layers(MergedLinear, scheme, torch.float32, backward)
    x = torch.randn(7, 64).requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    grad = torch.randn(7, 48)
    y, expected = layer(x), plain(x2)
    assert torch.equal(y, expected)
    y.backward(grad)
    expected.backward(grad)
    assert plain.weight.grad is not None
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(layer.lora_A.weight.grad, 2.0 * layer.lora_B.weight.detach().T @ plain.weight.grad)
    torch.testing.assert_close(layer.lora_B.weight.grad, 2.0 * plain.weight.grad @ layer.lora_A.weight.detach().T)
    assert layer.weight.grad is None
    assert layer.bias.grad is None


def test_the_adapted_layer_has_the_gradient_of_plain_lora():
    layer, _ = layers(AdaptedLinear, "int4_w4a16_g32", torch.float32)
    x, grad = torch.randn(7, 64), torch.randn(7, 48)
    layer(x).backward(grad)
    # y = Q(W) x + 2 B (A x): dA = 2 B^T dy^T x, dB = 2 dy^T (x A^T)
    torch.testing.assert_close(layer.lora_A.weight.grad, 2.0 * layer.lora_B.weight.detach().T @ grad.T @ x)
    torch.testing.assert_close(layer.lora_B.weight.grad, 2.0 * grad.T @ (x @ layer.lora_A.weight.detach().T))


def test_int4_swallows_a_small_adapter_that_a_merge_ships():
    """Why `refresh: adapter` is the default: what arrives of a merged adapter of 5e-4 points elsewhere."""
    for size, least, most in ((5e-4, -0.1, 0.3), (2e-2, 0.9, 1.0)):
        layer, _ = layers(MergedLinear, "int4_w4a16_g32", torch.float32)
        with torch.no_grad():
            delta = layer.lora_B.weight @ layer.lora_A.weight
            layer.lora_B.weight.mul_(size / (2.0 * delta.square().mean().sqrt()))
        before = layer.method.dequantize(layer.method.quantize(layer.weight.detach()), torch.float32)
        after = layer.method.dequantize(layer.quantized_weight(), torch.float32)
        wanted = layer.merged_weight() - layer.weight.detach()
        cosine = float(F.cosine_similarity((after - before).flatten(), wanted.flatten(), dim=0))
        assert least < cosine <= most


def test_codes_of_a_frozen_base_are_made_once_and_those_of_a_merge_after_each_step():
    model = policy("nvfp4_w4a16", Lora(r=4), torch.float32)
    merged = policy("nvfp4_w4a16", Lora(r=4, refresh="merge"), torch.float32)
    for m, fresh in ((model, False), (merged, True)):
        layer = m.get_submodule(PREFIX)
        codes = layer.quantized_weight()["weight_packed"]
        optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1.0)
        layer.lora_B.weight.grad = torch.ones_like(layer.lora_B.weight)
        optimizer.step()
        assert (layer.quantized_weight()["weight_packed"] is not codes) == fresh


def test_siblings_of_a_merge_share_the_scale_of_what_is_shipped():
    model = policy("nvfp4_w4a16", Lora(r=4, refresh="merge", target_modules=("q_proj",)), torch.float32)
    attention = model.get_submodule("model.layers.0.self_attn")
    before = attention.k_proj.quantized_weight()["weight_global_scale"].clone()
    with torch.no_grad():
        attention.q_proj.lora_B.weight.fill_(10.0)
    amax = attention.q_proj.merged_weight().abs().amax()
    after = attention.k_proj.quantized_weight()["weight_global_scale"]
    assert after < before
    torch.testing.assert_close(after, torch.tensor([448.0 * 6.0]) / amax)
    assert torch.equal(after, attention.q_proj.quantized_weight()["weight_global_scale"])


@pytest.mark.parametrize("scheme", ["none", "nvfp4_w4a16"])
def test_a_merge_is_shipped_under_the_names_of_the_plain_model(scheme):
    plain = load_model(tiny_config("qwen3"), dtype=torch.float32, seed=0)
    names = [n for n, _ in export_weights(plain, QuantScheme.preset(scheme), export_dtype=torch.float32)]
    model = policy(scheme, Lora(r=4, refresh="merge"), torch.float32)
    assert [n for n, _ in exported(model, scheme, Lora(refresh="merge"), torch.float32)] == names
    assert target_modules(model, QuantScheme.preset(scheme)) == target_modules(plain, QuantScheme.preset(scheme))


@pytest.mark.parametrize("refresh", REFRESHES)
def test_the_full_precision_export_is_merged(refresh):
    model = policy("nvfp4_w4a16", Lora(r=4, refresh=refresh), torch.float32)
    perturb_(model)
    weights = dict(export_weights(model, QuantScheme.preset("none"), export_dtype=torch.float32))
    layer = adapter_layers(model)[PREFIX]
    expected = layer.weight + 8.0 * layer.lora_B.weight @ layer.lora_A.weight  # alpha / r = 32 / 4
    torch.testing.assert_close(weights[f"{PREFIX}.weight"], expected.detach())
    assert not torch.equal(weights[f"{PREFIX}.weight"], layer.weight.detach())
    load_model(tiny_config("qwen3"), dtype=torch.float32).load_state_dict(weights, strict=False)


def test_codes_of_an_adapter_kept_apart_are_not_exported_alone():
    model = policy("nvfp4_w4a16", Lora(r=4), torch.float32)
    with pytest.raises(ValueError, match="export with adapters=True, or in full precision"):
        list(export_weights(model, QuantScheme.preset("nvfp4_w4a16"), export_dtype=torch.float32))


@pytest.mark.parametrize("scheme", ["int8_w8a8", "fp8_per_channel", "nvfp4_w4a16"])
def test_adapters_are_sent_although_the_codes_beside_them_are_up_to_date(scheme):
    model = policy(scheme, Lora(r=4), torch.float32)
    for name in adapter_layers(model):
        model.get_submodule(name).quantized_weight()
    names = [name for name, _ in exported(model, scheme, Lora(r=4), torch.float32)]
    assert sum(".lora_" in name for name in names) == 2 * len(adapter_layers(model))
    with pytest.raises(ValueError, match="export with adapters=True"):
        list(export_weights(model, QuantScheme.preset(scheme), export_dtype=torch.float32))


def test_an_unaligned_learner_exports_what_a_plain_model_of_the_merged_weights_would():
    scheme = QuantScheme.preset("nvfp4_w4a16")
    model = policy("none", Lora(r=4, refresh="merge"), torch.float32)
    perturb_(model)
    merged = load_model(tiny_config("qwen3"), dtype=torch.float32, seed=0)
    full = export_weights(model, QuantScheme.preset("none"), export_dtype=torch.float32)
    merged.load_state_dict(dict(full), strict=False)
    a, b = (dict(export_weights(m, scheme, export_dtype=torch.float32)) for m in (model, merged))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


# ------------------------------------------------------------------------------------- what is trained, and names


def test_only_adapters_are_trained_in_fp32_and_norms_if_asked():
    for norms in (False, True):
        model = load_model(tiny_config("qwen3"), dtype=torch.bfloat16, seed=0)
        add_adapters_(model, Lora(r=4, train_norms=norms), export_dtype=torch.bfloat16, seed=0)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert all(p.dtype == torch.float32 for p in trained.values())
        adapters = {n for n in trained if ".lora_" in n}
        assert len(adapters) == 2 * 7 * 2
        # of each layer: two norms, and those of query and key heads; and the last
        assert len(trained) - len(adapters) == (2 * 4 + 1 if norms else 0)
        assert model.get_parameter(f"{PREFIX}.weight").dtype == torch.bfloat16


def test_the_adapter_depends_on_the_seed_alone():
    before = torch.random.get_rng_state()
    a, b, c = (policy("none", Lora(r=4), torch.float32, seed=seed) for seed in (1, 1, 2))
    first, same, other = (adapter_layers(m)[PREFIX].lora_A.weight for m in (a, b, c))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.all(layer.lora_B.weight == 0) for layer in adapter_layers(a).values())


def test_a_target_that_matches_nothing_lists_the_names():
    model = load_model(tiny_config("llama"), dtype=torch.float32, seed=0)
    message = r"named 'query'; there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj \(the out"
    with pytest.raises(ValueError, match=message):
        add_adapters_(model, Lora(target_modules=("q_proj", "query")), export_dtype=torch.float32, seed=0)
    with pytest.raises(ValueError, match="named 'lm_head'"):
        Lora(target_modules=("lm_head",)).targets(model)
    with pytest.raises(ValueError, match="named 'proj'"):
        Lora(target_modules=("proj",)).targets(model)  # the end of a name is not a name


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dropout": 0.1}, "leave it at 0"),
        ({"r": 0}, "must be positive"),
        ({"target_modules": ()}, "empty"),
        ({"target_modules": "q_proj"}, "give a list"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        Lora(**option)


def test_targets_are_found_behind_peft_and_adapters_are_never_quantized():
    from peft import LoraConfig, inject_adapter_in_model

    scheme = QuantScheme.preset("nvfp4_w4a16")
    model = load_model(tiny_config("qwen3"), dtype=torch.float32, seed=0)
    names = target_modules(model, scheme)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "down_proj"]), model)
    assert target_modules(model, scheme) == names
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj is wrapped by peft.*add_adapters_"):
        list(export_weights(model, scheme, export_dtype=torch.float32))


@pytest.mark.parametrize("form", ["base_model.model.{}.{}.weight", "{}.{}.default.weight", "{}.{}.weight"])
def test_adapters_load_under_every_name_that_peft_gives_them(form):
    source, target = (policy("none", Lora(r=4), torch.float32, seed=seed) for seed in (1, 2))
    perturb_(source)
    assert not torch.equal(adapter_layers(source)[PREFIX].lora_A.weight, adapter_layers(target)[PREFIX].lora_A.weight)
    tensors = [(n.removeprefix("base_model.model."), t) for n, t in adapter_weights(source)]
    named = [(form.format(n.split(".lora_")[0], "lora_" + n.split(".lora_")[1].split(".")[0]), t) for n, t in tensors]
    assert load_adapters_(target, named) == len(tensors) == 28
    loaded = dict(adapter_weights(target))
    assert all(torch.equal(loaded[n], t) for n, t in adapter_weights(source))


def test_adapters_of_another_model_are_refused():
    model = policy("none", Lora(r=4), torch.float32)
    tensors = list(adapter_weights(model))
    with pytest.raises(ValueError, match=r"layers\.7\.x\.lora_A\.weight belongs to no adapter of the model; it has"):
        load_adapters_(model, [("base_model.model.layers.7.x.lora_A.weight", tensors[0][1])])
    with pytest.raises(ValueError, match="27 of 28 adapter tensors are missing"):
        load_adapters_(model, tensors[:1])
    with pytest.raises(ValueError, match=r"set Lora\.r"):
        load_adapters_(model, [(tensors[0][0], torch.zeros(8, 64))])
    with pytest.raises(ValueError, match="0 of 0"):
        load_adapters_(load_model(tiny_config("llama"), dtype=torch.float32, seed=0), [])
