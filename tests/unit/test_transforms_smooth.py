from __future__ import annotations

import pytest
import torch
from quant_families import FAMILIES, LAYERS, tiny_model, tokens
from torch import nn
from transform_models import exact_model, logits, packed_model, state
from transformers import Phi3Config

from lqrl.modeling.backbone import load_model
from lqrl.quant import QuantScheme, prepare_
from lqrl.quant.transforms import SmoothQuant, activation_amax

BLOCK = "model.layers.1"


def amax_of(model: nn.Module, name: str) -> torch.Tensor:
    return activation_amax(model, [tokens()])[f"{BLOCK}.{name}"].double()


def column_amax(model: nn.Module, *names: str) -> torch.Tensor:
    weights = [model.get_parameter(f"{BLOCK}.{name}.weight").detach() for name in names]
    return torch.cat(weights).abs().amax(0)


def calibrated(alpha: float) -> SmoothQuant:
    return SmoothQuant(alpha, tokens=tuple(map(tuple, tokens().tolist())))


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_change(family, pairs):
    model = exact_model(family)
    before = logits(model)
    assert SmoothQuant(pairs=pairs).fold_(model) == LAYERS * (7 if pairs else 5)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_change_beyond_fp32_rounding(family):
    model = packed_model(family)
    before = logits(model)
    SmoothQuant().fold_(model)
    torch.testing.assert_close(logits(model), before, rtol=2e-5, atol=2e-5 * before.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_unfold_restores_within_rounding_and_leaves_no_trace(family):
    model = packed_model(family)
    before, buffers = state(model), dict(model.named_buffers()).keys()
    transform = SmoothQuant()
    transform.fold_(model)
    assert model.state_dict().keys() == before.keys()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name.split(".")[-2] for name in changed} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        "input_layernorm", "post_attention_layernorm",
    }  # fmt: skip
    assert transform.unfold_(model) == LAYERS * 7
    assert dict(model.named_buffers()).keys() == buffers
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=2**-22, atol=2**-21)


def test_unfold_after_training_keeps_the_trained_function():
    model = exact_model("qwen2")
    transform = SmoothQuant()
    transform.fold_(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    trained = logits(model)
    transform.unfold_(model)
    torch.testing.assert_close(logits(model), trained, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("readers", "alpha"),
    [
        (readers, alpha)
        for readers in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
        for alpha in (0.0, 0.25, 0.5, 1.0)
    ],
)
def test_alpha_shares_the_range_between_activations_and_weights(readers, alpha):
    # pairs=False: the columns of v and up are then scaled by nothing else
    model = exact_model("llama")
    x, w = amax_of(model, readers[0]), column_amax(model, *readers)
    SmoothQuant(alpha, tokens=calibrated(alpha).tokens, pairs=False).fold_(model)
    s = x**alpha / w ** (1 - alpha)
    s = s / s.log().mean().exp()
    torch.testing.assert_close(amax_of(model, readers[0]), x / s, rtol=1e-6, atol=0)
    torch.testing.assert_close(column_amax(model, *readers), w * s, rtol=1e-6, atol=0)


def test_alpha_one_leaves_every_channel_of_down_proj_equally_large():
    model = exact_model("qwen3")
    before = amax_of(model, "mlp.down_proj")
    calibrated(1.0).fold_(model)
    after = amax_of(model, "mlp.down_proj")
    assert before.max() / before.min() > 2
    torch.testing.assert_close(after, after.mean().expand_as(after), rtol=1e-6, atol=0)


def test_query_heads_that_share_values_share_factors_and_the_larger_one_decides():
    model = exact_model("llama")
    calibrated(1.0).fold_(model)
    # 4 query heads of width 8 over 2 key/value heads: columns 0..7 and 8..15 of o_proj read the first value head.
    after = amax_of(model, "self_attn.o_proj").view(2, 2, 8)
    larger = after.amax(1)
    torch.testing.assert_close(larger, larger.mean().expand_as(larger), rtol=1e-6, atol=0)
    assert after.amin(1).min() < 0.9 * larger.min()


def test_the_factors_have_geometric_mean_one():
    model = exact_model("llama")
    gain = model.get_parameter(f"{BLOCK}.input_layernorm.weight").detach().clone()
    SmoothQuant().fold_(model)
    ratio = model.get_parameter(f"{BLOCK}.input_layernorm.weight").detach() / gain
    assert ratio.log().mean().item() == pytest.approx(0.0, abs=1e-12)
    assert ratio.max() / ratio.min() > 1.2


def test_a_channel_that_is_never_active_keeps_its_scale():
    model = packed_model("llama")
    with torch.no_grad():
        model.get_parameter(f"{BLOCK}.input_layernorm.weight")[3] = 0.0
    before = model.get_parameter(f"{BLOCK}.self_attn.q_proj.weight").detach().clone()
    SmoothQuant().fold_(model)
    after = model.get_parameter(f"{BLOCK}.self_attn.q_proj.weight").detach()
    assert torch.equal(after[:, 3], before[:, 3])
    assert not (after == before).all(0)[torch.arange(32) != 3].any()


def test_activation_amax_is_the_largest_input_over_all_tokens():
    model = packed_model("llama")
    ids = tokens()
    seen = activation_amax(model, [ids])
    first = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)).abs().amax((0, 1)).detach()
    assert torch.equal(seen["model.layers.0.self_attn.k_proj"], first)
    assert len(seen) == LAYERS * 7
    assert seen[f"{BLOCK}.mlp.down_proj"].shape == (48,)


def test_activation_amax_of_batches_is_their_maximum_and_sequences_do_not_see_each_other():
    model = packed_model("qwen3")
    a, b = activation_amax(model, [tokens()[:1]]), activation_amax(model, [tokens()[1:]])
    for both in (activation_amax(model, tokens().split(1)), activation_amax(model, [tokens()])):
        for name, value in both.items():
            torch.testing.assert_close(value, torch.maximum(a[name], b[name]), rtol=1e-5, atol=1e-6)


def test_calibration_leaves_mode_and_hooks_as_they_were_and_runs_prepared_models():
    model = packed_model("llama").train()
    prepare_(model, QuantScheme.preset("int8_w8a8"), export_dtype=torch.float32)
    activation_amax(model, [tokens()])
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_random_calibration_depends_on_the_seed_alone():
    states = []
    for seed in (0, 0, 1):
        model = packed_model("llama")
        torch.manual_seed(len(states))
        SmoothQuant(seed=seed).fold_(model)
        states.append(model.get_parameter(f"{BLOCK}.mlp.up_proj.weight").detach())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_tokens_from_a_config_are_lists():
    transform = SmoothQuant(tokens=[[1, 2], [3]])  # type: ignore[arg-type]
    assert transform.tokens == ((1, 2), (3,))
    assert hash(transform) == hash(SmoothQuant(tokens=((1, 2), (3,))))


def phi3() -> nn.Module:
    config = Phi3Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return load_model(config, dtype=torch.float32, seed=0).eval()


def test_fused_projections_are_smoothed_without_pairs():
    model = phi3()
    before = logits(model)
    with pytest.raises(ValueError, match="set pairs=False"):
        SmoothQuant().fold_(model)
    assert torch.equal(logits(model), before)
    assert SmoothQuant(pairs=False).fold_(model) == 2
    torch.testing.assert_close(logits(model), before, rtol=2e-5, atol=2e-5)


def test_a_norm_between_values_and_output_is_refused():
    model = packed_model("llama")
    model.model.layers[0].self_attn.v_norm = nn.Identity()
    with pytest.raises(ValueError, match="v_norm"):
        SmoothQuant().fold_(model)


def test_folding_twice_and_unfolding_what_is_not_folded_raise():
    model = packed_model("llama")
    with pytest.raises(ValueError, match="only a folded model"):
        SmoothQuant().unfold_(model)
    SmoothQuant(pairs=False).fold_(model)
    with pytest.raises(ValueError, match="smoothed already"):
        SmoothQuant().fold_(model)
    with pytest.raises(ValueError, match="only a folded model"):
        SmoothQuant().unfold_(model)


def test_calibration_that_cannot_be_trusted_raises():
    with pytest.raises(ValueError, match="load_model"):
        activation_amax(tiny_model("llama"), [tokens()])
    model = packed_model("llama")
    with pytest.raises(ValueError, match="at least one batch"):
        activation_amax(model, [])
    before = state(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="reads NaN or inf"):
        SmoothQuant().fold_(model)
    kept = {n: t for n, t in model.state_dict().items() if "up_proj" not in n}
    assert all(torch.equal(t, before[n]) for n, t in kept.items())


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_outside_zero_to_one_raises(alpha):
    with pytest.raises(ValueError, match="alpha must lie"):
        SmoothQuant(alpha)


@pytest.mark.parametrize("bad", [(), ((1, 2), ())])
def test_calibration_without_tokens_raises(bad):
    with pytest.raises(ValueError, match="sequences of token ids"):
        SmoothQuant(tokens=bad)
