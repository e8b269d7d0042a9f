from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from quant_families import FAMILIES, LAYERS, tokens
from torch import nn
from transform_models import exact_model, logits, packed_model, state
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lqrl.modeling.backbone import load_model
from lqrl.quant import QuantScheme, export_weights
from lqrl.quant.transforms import (
    HadamardRotation,
    InvariantTransform,
    SmoothQuant,
    UpdateAwareScaling,
    activation_amax,
    fold_all_,
)
from lqrl.quant.transforms.rotation import Rotation

LINEARS = LAYERS * 7 + 1  # and the output head


def dense(rotation: Rotation, size: int) -> torch.Tensor:
    return rotation.apply(torch.eye(size, dtype=torch.float64))


@given(size=st.integers(1, 200), seed=st.integers(0, 10))
@settings(max_examples=30, deadline=None)
def test_the_rotation_is_orthogonal_and_its_inverse_undoes_it(size, seed):
    rotation = Rotation.random(size, seed)
    q = dense(rotation, size)
    torch.testing.assert_close(q @ q.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(rotation.apply_inverse(q), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("power", range(1, 9))
def test_a_power_of_two_gives_a_hadamard_matrix_with_random_signs(power):
    size = 2**power
    rotation = Rotation.random(size, 0)
    q = dense(rotation, size)
    torch.testing.assert_close(q.abs(), torch.full_like(q, size**-0.5), rtol=1e-12, atol=0)
    # Sylvester: entry (i, j) has the sign (-1)^popcount(i & j), here times the random sign of row i.
    expected = [[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    assert torch.equal((q * rotation.signs[:, None]).sign(), torch.tensor(expected, dtype=torch.float64))


def test_an_odd_factor_is_a_random_orthogonal_matrix():
    rotation = Rotation.random(24, 0)  # 8 * 3
    kron = torch.kron(torch.kron(rotation.factors[0], rotation.factors[1]), rotation.factors[2])
    assert [tuple(f.shape) for f in rotation.factors] == [(2, 2), (4, 4), (3, 3)]
    torch.testing.assert_close(dense(rotation, 24), rotation.signs[:, None] * kron, rtol=0, atol=1e-14)


def test_seeds_differ_and_repeat_whatever_the_global_generator_does():
    torch.manual_seed(1)
    a, b, c = (dense(Rotation.random(48, seed), 48) for seed in (3, 3, 4))
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_change(family, tied):
    model = exact_model(family, tied=tied)
    before = logits(model)
    assert HadamardRotation().fold_(model) == LINEARS
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_change_beyond_fp32_rounding(family):
    model = packed_model(family)
    before = logits(model)
    HadamardRotation().fold_(model)
    torch.testing.assert_close(logits(model), before, rtol=5e-5, atol=5e-5 * before.abs().max().item())


def test_a_hidden_size_that_is_no_power_of_two():
    config = LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    model = load_model(config, dtype=torch.float32, seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)  # o_proj and down_proj have biases here
    before = logits(model)
    HadamardRotation(3).fold_(model)
    torch.testing.assert_close(logits(model), before, rtol=5e-5, atol=5e-5 * before.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_gains_become_one_and_the_rest_is_rotated(family):
    model = exact_model(family, tied=False)
    before = state(model)
    HadamardRotation(5).fold_(model)
    after, q = state(model), dense(Rotation.random(32, 5), 32)
    offset = 1.0 if family == "gemma" else 0.0
    assert after.keys() == before.keys()
    norms = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
    for name, tensor in after.items():
        layer, _, kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        old = before[name]
        if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") and name.endswith(".weight"):
            parent, _, block = layer.rpartition(".")
            expected = (old * (before[f"{parent}.{norms[block]}.weight"] + offset)) @ q
        elif kind == "lm_head":
            expected = (old * (before["model.norm.weight"] + offset)) @ q
        elif kind in ("o_proj", "down_proj"):
            expected = q.T @ old
        elif kind == "embed_tokens":
            expected = old @ q
        elif kind in ("q_norm", "k_norm") or name.endswith(".bias"):
            expected = old
        else:
            expected = torch.full_like(old, 1.0 - offset)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_unfold_restores_within_rounding_and_leaves_no_trace(family):
    model = packed_model(family, tied=False)
    before, buffers = state(model), dict(model.named_buffers()).keys()
    HadamardRotation().fold_(model)
    assert HadamardRotation().unfold_(model) == LINEARS
    assert dict(model.named_buffers()).keys() == buffers
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=2**-20, atol=2**-20)


def test_unfold_after_training_keeps_the_trained_function_and_gives_the_old_gains_back():
    model = exact_model("gemma")
    before = state(model)
    HadamardRotation().fold_(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    trained = logits(model)
    HadamardRotation().unfold_(model)
    torch.testing.assert_close(logits(model), trained, rtol=0, atol=1e-12)
    assert all(torch.allclose(t, before[n]) for n, t in model.state_dict().items() if "norm" in n)


def test_a_gain_of_zero_is_undone_to_the_same_function():
    model = exact_model("llama")
    with torch.no_grad():
        model.model.norm.weight[2] = 0.0
    before = logits(model)
    HadamardRotation().fold_(model)
    HadamardRotation().unfold_(model)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-12)
    assert model.model.norm.weight[2] == 1.0
    assert model.lm_head.weight[:, 2].abs().max() < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_rotated_model_is_an_ordinary_checkpoint(family, tmp_path):
    model = packed_model(family, tied=True)
    before = logits(model)
    HadamardRotation().fold_(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = loaded(input_ids=tokens()).logits.flatten(0, 1)
    torch.testing.assert_close(theirs, before, rtol=5e-5, atol=5e-5 * before.abs().max().item())
    assert loaded.config.tie_word_embeddings is False
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in loaded.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_built_from_the_config_takes_the_exported_weights(family):
    model = packed_model(family, tied=True)
    HadamardRotation().fold_(model)
    engine = load_model(model.config, dtype=torch.float32).eval()
    weights = dict(export_weights(model, QuantScheme.preset("none"), export_dtype=torch.float32))
    engine.load_state_dict(weights, strict=True)
    assert torch.equal(logits(engine), logits(model))


def with_outliers(channel: int = 5, factor: float = 1000.0) -> PreTrainedModel:
    """A model whose residual stream has one large channel, as trained models do."""
    model = packed_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, channel] *= factor
    return model


def test_the_rotation_spreads_an_outlier_over_all_channels():
    plain, rotated = with_outliers(), with_outliers()
    HadamardRotation().fold_(rotated)
    name = "model.layers.1.self_attn.q_proj"
    before, after = (activation_amax(m, [tokens()])[name] for m in (plain, rotated))
    assert before.max() / before.median() > 15
    assert after.max() / after.median() < 2


def test_transforms_compose_and_are_undone_in_reverse():
    model = exact_model("qwen3", tied=False)
    before, expected = state(model), logits(model)
    transforms = (HadamardRotation(), SmoothQuant(), UpdateAwareScaling())
    assert fold_all_(model, transforms) == [LINEARS, LAYERS * 7, LAYERS * 5]
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-12)
    for transform in reversed(transforms):
        transform.unfold_(model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-12)


def test_a_config_names_them_by_class_path():
    parser = ArgumentParser()
    parser.add_argument("--transforms", type=Sequence[InvariantTransform])
    values = [
        {"class_path": "lqrl.quant.HadamardRotation", "init_args": {"seed": 3}},
        {"class_path": "lqrl.quant.SmoothQuant", "init_args": {"alpha": 0.6, "tokens": [[1, 2], [3]]}},
        {"class_path": "lqrl.quant.UpdateAwareScaling"},
    ]
    built = parser.instantiate(parser.parse_args(["--transforms", json.dumps(values)])).transforms
    assert built == [HadamardRotation(3), SmoothQuant(0.6, ((1, 2), (3,))), UpdateAwareScaling(1.5)]


def test_a_rotation_that_would_undo_another_transform_is_refused():
    with pytest.raises(ValueError, match="put it first"):
        fold_all_(packed_model("llama"), (UpdateAwareScaling(), HadamardRotation()))
    model = packed_model("llama")
    SmoothQuant().fold_(model)
    with pytest.raises(ValueError, match="rotate first"):
        HadamardRotation().fold_(model)


def test_rotating_twice_and_unfolding_what_is_not_rotated_raise():
    model = packed_model("llama")
    with pytest.raises(ValueError, match="only a folded one"):
        HadamardRotation().unfold_(model)
    HadamardRotation().fold_(model)
    with pytest.raises(ValueError, match="rotated already"):
        HadamardRotation().fold_(model)


def small(**more: int) -> dict[str, int]:
    return {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**small())), NotImplementedError, "post_attention_layernorm"),
        (
            lambda: Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**small(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2))
            ),
            ValueError,
            "may read the norm before it",
        ),
    ],
)
def test_what_cannot_be_rotated_is_refused_and_nothing_is_written(build, error, message):
    model = build()
    before = state(model)
    with pytest.raises(error, match=message):
        HadamardRotation().fold_(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_parameter_that_is_not_known_is_refused():
    model = packed_model("llama")
    model.model.embed_positions = nn.Embedding(8, 32)
    with pytest.raises(NotImplementedError, match="embed_positions"):
        HadamardRotation().fold_(model)
