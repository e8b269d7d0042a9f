"""Qwen3-MoE end to end: one list of targets, engine and learner agree, and a router is never quantized or left old."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lqrl.engines.base import EngineSpec, RefreshError
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.engines.transaction import model_digest
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.modeling.precision import cast_parameters
from lqrl.quant import QuantScheme, convert_, export_weights, prepare_, target_modules
from lqrl.quant.experts import AlignedExperts
from lqrl.quant.scheme import PRESETS
from lqrl.quant.stacks import unstacked
from lqrl.testing.models import tiny_moe_config
from lqrl.types import Prompt, SamplingParams

EXPERTS = "model.layers.0.mlp.experts"


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def moe(seed: int = 0, device: torch.device | str | None = None):
    return load_model(tiny_moe_config(), dtype=torch.float32, seed=seed, device=device)


def built(name: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
    scheme, policy = QuantScheme.preset(name), moe(device=device)
    prepare_(policy, scheme, export_dtype=dtype)
    engine: TorchEngine = TorchEngineFactory()(EngineSpec(policy.config, scheme, dtype, torch.device(device), 64, ()))
    engine.update_weights(export_weights(policy, scheme, export_dtype=dtype), policy_version=0)
    return policy, engine


def test_one_list_of_targets_for_both_sides():
    scheme = QuantScheme.preset("int8_w8a8")
    plain, learner, engine = moe(), moe(), moe()
    projections = [f"self_attn.{n}_proj" for n in "qkvo"]
    expected = {f"model.layers.{i}.{n}" for i in range(2) for n in (*projections, "mlp.experts")}
    assert set(target_modules(plain, scheme)) == expected
    assert prepare_(learner, scheme, export_dtype=torch.float32) == convert_(engine, scheme)
    assert target_modules(learner, scheme) == target_modules(engine, scheme) == target_modules(plain, scheme)
    assert [n for n, _ in learner.named_parameters()] == [n for n, _ in plain.named_parameters()]
    routers = [type(m.get_submodule("model.layers.0.mlp.gate")) for m in (learner, engine, plain)]
    assert routers == [routers[2]] * 3
    for model in (learner, engine):
        with pytest.raises(ValueError, match="is already a"):
            convert_(model, scheme)
    skipped = target_modules(plain, QuantScheme("x", scheme.weight, scheme.activation, skip=("*.experts",)))
    assert set(skipped) == {n for n in expected if not n.endswith("experts")}


@pytest.mark.parametrize("stacked", [True, False])
def test_a_router_by_another_name_is_refused_until_it_is_skipped(stacked):
    """Nothing about ``route_proj`` says router but its width: as many outputs as there are experts."""
    model = nn.ModuleDict({"q_proj": nn.Linear(8, 4), "mlp": nn.Module()})
    mlp = model["mlp"]
    mlp.route_proj = nn.Linear(8, 4)
    mlp.experts = moe().get_submodule(EXPERTS) if stacked else nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    scheme = PRESETS["int8_w8a8"]
    with pytest.raises(
        ValueError, match=r"mlp\.route_proj has 4 outputs, .* looks like a router.*skip=\['\*\.route_proj'\]"
    ):
        target_modules(model, scheme)
    found = target_modules(model, QuantScheme("x", scheme.weight, scheme.activation, skip=("*.route_proj",)))
    assert "mlp.route_proj" not in found
    assert "q_proj" in found  # a projection of attention may be as wide as there are experts
    assert ("mlp.experts" in found) == stacked


def test_stacked_weights_that_are_not_known_are_refused_until_they_are_skipped():
    model = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "moe": nn.ParameterDict({"w1": torch.randn(2, 4, 4)})})
    scheme = PRESETS["int8_w8a8"]
    with pytest.raises(ValueError, match=r"moe \(ParameterDict\) has stacked weights that cannot be quantized"):
        target_modules(model, scheme)
    assert target_modules(model, QuantScheme("x", scheme.weight, scheme.activation, skip=("moe",))) == ["q_proj"]


def test_a_lost_or_old_router_is_seen_after_a_refresh():
    policy, engine = built("int8_w8a8")
    scheme, router = QuantScheme.preset("int8_w8a8"), "model.layers.1.mlp.gate.weight"
    good = engine.update_weights(export_weights(policy, scheme, export_dtype=torch.float32), policy_version=1)
    weights = {n: t.clone() for n, t in export_weights(policy, scheme, export_dtype=torch.float32)}
    assert weights[router].dtype == torch.float32
    with pytest.raises(RefreshError, match=f"missing: {router}"):
        engine.update_weights([(n, t) for n, t in weights.items() if n != router], policy_version=2)
    zero = engine.update_weights((weights | {router: torch.zeros_like(weights[router])}).items(), policy_version=3)
    assert zero.digest != good.digest
    with torch.no_grad():
        policy.get_parameter(router).mul_(1.01)
    moved = engine.update_weights(export_weights(policy, scheme, export_dtype=torch.float32), policy_version=4)
    assert moved.digest not in (good.digest, zero.digest)
    engine.decoder.model.get_parameter(router).copy_(weights[router])  # what a refresh that forgot it leaves
    assert model_digest(engine.decoder.model) == good.digest


@pytest.mark.parametrize("name", ["int8_w8a8", "int4_w4a16_g32", "fp8_per_tensor", "fp8_per_block", "nvfp4_w4a16"])
def test_the_engine_samples_what_the_aligned_learner_scores(name, device):
    policy, engine = built(name, device=device)
    assert engine.decoder.lean is None  # the short cut knows dense layers only
    completions = engine.generate([Prompt(0, (5, 6, 7))], SamplingParams(n=8, max_tokens=8), seed=0)[0]
    ids = torch.tensor([[5, 6, 7, *c.token_ids.tolist()] for c in completions], device=device)
    rollout = torch.stack([c.logprobs for c in completions]).cpu()
    with torch.no_grad():
        aligned, unaligned = (
            Scorer(p, 1.0, torch.float32).score(ids, torch.ones_like(ids, dtype=torch.bool))[:, 3:].cpu()
            for p in (policy, moe(device=device))
        )
    gap, other = (aligned - rollout).abs().mean(), (unaligned - rollout).abs().mean()
    assert gap < (1e-4 if PRESETS[name].activation is None else 0.1 * other)
    assert other > 1e-2


def test_gradients_reach_the_router_and_every_expert_that_was_used():
    policy, _ = built("int8_w8a8")
    seen: dict[str, set[int]] = {}
    for name, module in policy.named_modules():
        if isinstance(module, AlignedExperts):
            module.register_forward_pre_hook(lambda _, args, n=name: seen.update({n: set(args[1].flatten().tolist())}))
    ids = torch.randint(3, 64, (2, 9))
    Scorer(policy, 1.0, torch.float32)(ids, torch.ones_like(ids, dtype=torch.bool)).sum().backward()
    assert len(seen) == 2
    for name, used in seen.items():
        for projection in ("gate_up_proj", "down_proj"):
            grad = policy.get_parameter(f"{name}.{projection}").grad
            assert {e for e in range(4) if grad[e].any()} == used
        assert policy.get_parameter(name.replace("experts", "gate.weight")).grad.any()


@pytest.mark.parametrize("name", ["fp8_per_tensor", "mxfp8"])
def test_a_plain_and_a_prepared_model_export_the_same(name):
    scheme, plain, prepared = QuantScheme.preset(name), moe(), moe()
    prepare_(prepared, scheme, export_dtype=torch.bfloat16)
    a, b = (dict(export_weights(m, scheme, export_dtype=torch.bfloat16)) for m in (plain, prepared))
    assert list(a) == list(b)
    assert all(torch.equal(bits(a[n]), bits(b[n])) for n in a)
    kept = {n: t.dtype for n, t in a.items() if n.endswith("gate.weight")}
    assert list(kept.values()) == [torch.bfloat16] * 2  # routers, in the export dtype
    with pytest.raises(ValueError, match=rf"{EXPERTS} was prepared for another format or export dtype|q_proj was"):
        list(export_weights(prepared, scheme, export_dtype=torch.float32))
    with torch.no_grad():
        plain.get_parameter(f"{EXPERTS}.down_proj")[2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match=rf"{EXPERTS}\.down_proj_weight_?s?c?a?l?e? holds NaN or inf"):
        list(export_weights(plain, scheme, export_dtype=torch.bfloat16))


def test_experts_that_a_known_module_comes_to_hold_are_quantized():
    policy, scheme = moe(), QuantScheme.preset("int8_w8a8")
    experts = policy.get_submodule(EXPERTS)
    wanted = dict(export_weights(policy, scheme, export_dtype=torch.float32))
    weights = dict(experts.named_parameters(recurse=False))
    for name in weights:
        delattr(experts, name)
    assert not [n for n, _ in export_weights(policy, scheme, export_dtype=torch.float32) if n.startswith(EXPERTS)]
    for name, weight in weights.items():
        experts.register_parameter(name, weight)
    found = dict(export_weights(policy, scheme, export_dtype=torch.float32))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(bits(found[n]), bits(t)) for n, t in wanted.items())


def test_aligned_experts_round_their_own_masters():
    policy, _ = built("int8_w8a8", torch.bfloat16)
    cast = cast_parameters(policy, torch.bfloat16)
    assert f"{EXPERTS}.gate_up_proj" not in cast
    assert cast["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16


def test_full_precision_experts_unstack_to_the_names_of_a_checkpoint(tmp_path):
    from safetensors.torch import load_file

    model = moe()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = dict(unstacked(export_weights(model, QuantScheme.preset("none"), export_dtype=torch.float32)))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[n], t) for n, t in saved.items())
