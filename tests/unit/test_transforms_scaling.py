from __future__ import annotations

import pytest
import torch
from quant_families import FAMILIES, LAYERS, tiny_model, tokens
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lqrl.quant.export import export_weights
from lqrl.quant.numerics import quantize_int8_channel
from lqrl.quant.prepare import prepare_
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.transforms import UpdateAwareScaling, uaq_equivalent_param_groups

FOLDED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=tokens()).logits


def tiny_gemma2() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("s", [1.5, 0.7])
def test_logits_do_not_change_beyond_fp32_rounding(family, s):
    model = tiny_model(family)
    before = logits(model)
    assert UpdateAwareScaling(s).fold_(model) == LAYERS * 5
    torch.testing.assert_close(logits(model), before, rtol=2e-5, atol=2e-5 * before.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_scaled_and_what_is_not(family):
    model = tiny_model(family)
    before = state(model)
    UpdateAwareScaling(1.5).fold_(model)
    for name, tensor in model.state_dict().items():
        if name.endswith(FOLDED):
            expected = before[name] / 1.5
        elif name.endswith(NORMS):
            expected = 1.5 * (1 + before[name]) - 1 if family == "gemma" else 1.5 * before[name]
        else:  # biases, o_proj, down_proj, q/k norms, the last norm, the embedding
            expected = before[name]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("family", FAMILIES)
def test_unfold_restores_exactly_for_a_power_of_two(family):
    model = tiny_model(family)
    before = state(model)
    UpdateAwareScaling(2.0).fold_(model)
    assert UpdateAwareScaling(2.0).unfold_(model) == LAYERS * 5
    for name, tensor in model.state_dict().items():
        if family == "gemma" and name.endswith(NORMS):  # 2 (1 + w) - 1 itself rounds
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=2**-22)
        else:
            assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_unfold_restores_within_rounding_for_any_factor(family):
    model = tiny_model(family)
    before = state(model)
    UpdateAwareScaling(1.5).fold_(model)
    UpdateAwareScaling(1.5).unfold_(model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=2**-22, atol=2**-21)


def test_the_norm_before_the_mlp_is_pre_feedforward_where_there_is_one():
    model = tiny_gemma2()
    before, expected = state(model), logits(model)
    UpdateAwareScaling(1.5).fold_(model)
    torch.testing.assert_close(logits(model), expected, rtol=2e-5, atol=2e-5 * expected.abs().max().item())
    changed = {n.split(".")[3] for n, t in model.state_dict().items() if "layernorm" in n and not t.equal(before[n])}
    assert changed == {"input_layernorm", "pre_feedforward_layernorm"}


def test_bf16_parameters_are_rounded_once_from_fp32():
    model = tiny_model("llama").bfloat16()
    before = state(model)
    UpdateAwareScaling(1.5).fold_(model)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], (before[name].float() / 1.5).bfloat16())


def test_codes_do_not_change_for_a_power_of_two_and_scales_shrink():
    weight = tiny_model("llama").get_parameter("model.layers.0.mlp.up_proj.weight").detach()
    model = tiny_model("llama")
    UpdateAwareScaling(2.0).fold_(model)
    codes, scale = quantize_int8_channel(weight)
    folded_codes, folded_scale = quantize_int8_channel(
        model.get_parameter("model.layers.0.mlp.up_proj.weight").detach()
    )
    assert torch.equal(folded_codes, codes)
    assert torch.equal(folded_scale, scale / 2)


def test_a_prepared_model_exports_the_folded_weights():
    scheme = QuantScheme.preset("int8_w8a8")
    folded_first, prepared_first = tiny_model("qwen2"), tiny_model("qwen2")
    UpdateAwareScaling(1.5).fold_(folded_first)
    prepare_(folded_first, scheme, export_dtype=torch.float32)
    prepare_(prepared_first, scheme, export_dtype=torch.float32)
    logits(prepared_first)
    UpdateAwareScaling(1.5).fold_(prepared_first)
    a = dict(export_weights(folded_first, scheme, export_dtype=torch.float32))
    b = dict(export_weights(prepared_first, scheme, export_dtype=torch.float32))
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("s", [0.0, -1.5, float("nan"), float("inf")])
def test_a_factor_that_is_not_positive_and_finite_raises(s):
    with pytest.raises(ValueError, match="positive and finite"):
        UpdateAwareScaling(s)


def test_nothing_to_fold_raises():
    with pytest.raises(ValueError, match="nothing to fold"):
        UpdateAwareScaling(1.5).fold_(nn.Sequential(nn.Linear(4, 4)))


def test_experts_that_read_the_norm_are_refused_and_nothing_is_written():
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    before = state(model)
    with pytest.raises(ValueError, match="may read the norm before it"):
        UpdateAwareScaling(1.5).fold_(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_norm_that_is_no_rms_norm_is_refused():
    model = tiny_model("llama")
    model.model.layers[0].input_layernorm = nn.LayerNorm(32)
    with pytest.raises(ValueError, match="is no RMSNorm"):
        UpdateAwareScaling(1.5).fold_(model)


def test_a_layer_without_a_norm_before_the_mlp_is_refused():
    model = tiny_model("llama")
    del model.model.layers[0].post_attention_layernorm
    with pytest.raises(ValueError, match="post_attention_layernorm"):
        UpdateAwareScaling(1.5).fold_(model)


def train(model: nn.Module, groups: list[dict] | None, *, weight_decay: float, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(
        groups or list(model.parameters()), lr=1e-3, eps=1e-6, weight_decay=weight_decay, foreach=False
    )
    for step in range(steps):
        ids = tokens(step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("family", "weight_decay"), [("llama", 0.1), ("qwen2", 0.1), ("qwen3", 0.1), ("gemma", 0.0)])
def test_groups_of_learning_rates_train_as_the_folded_model_does(family, weight_decay):
    folded, plain = tiny_model(family), tiny_model(family)
    uaq = UpdateAwareScaling(2.0)
    uaq.fold_(folded)
    train(folded, None, weight_decay=weight_decay)
    uaq.unfold_(folded)
    before = state(plain)
    train(plain, uaq_equivalent_param_groups(plain, 1e-3, 2.0, weight_decay=weight_decay, eps=1e-6), weight_decay=0.0)
    for name, tensor in plain.state_dict().items():
        change, expected = tensor - before[name], folded.state_dict()[name] - before[name]
        assert expected.abs().max() > 1e-4, name
        torch.testing.assert_close(change, expected, rtol=0, atol=2e-6)  # the step is 1e-3; fp32 rounding of weights


def test_one_step_moves_a_folded_layer_s_times_as_far_as_the_plain_optimizer():
    plain, grouped = tiny_model("llama"), tiny_model("llama")
    before = state(plain)
    train(plain, None, weight_decay=0.0, steps=1)
    train(grouped, uaq_equivalent_param_groups(grouped, 1e-3, 1.5, eps=1e-6), weight_decay=0.0, steps=1)
    sizes = {"mlp.up_proj.weight": 1.5, "input_layernorm.weight": 1 / 1.5, "mlp.down_proj.weight": 1.0}
    for name, factor in sizes.items():
        full = f"model.layers.0.{name}"
        moved = grouped.state_dict()[full] - before[full]
        assert moved.norm() / (plain.state_dict()[full] - before[full]).norm() == pytest.approx(factor, rel=0.02)


def test_every_parameter_is_in_one_group():
    model = tiny_model("qwen3", tied=True)
    groups = uaq_equivalent_param_groups(model, 1e-3, 1.5, weight_decay=0.3, eps=1e-8)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    assert [group["lr"] for group in groups] == pytest.approx([1.5e-3, 1e-3 / 1.5, 1e-3])
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.2, 0.45, 0.3])
    assert [len(group["params"]) for group in groups[:2]] == [LAYERS * 5, LAYERS * 2]


def test_decay_of_gains_stored_as_one_plus_w_has_no_equivalent():
    with pytest.raises(ValueError, match="decay towards 1"):
        uaq_equivalent_param_groups(tiny_model("gemma"), 1e-3, 1.5, weight_decay=0.1)
