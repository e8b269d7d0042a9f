from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys

import pytest
import torch
from jsonargparse import ArgumentParser, auto_cli
from quant_families import FAMILIES, LAYERS, LINEARS_PER_LAYER, tiny_model
from torch import nn

from lqrl.quant.methods import linear_method
from lqrl.quant.prepare import convert_, prepare_
from lqrl.quant.scheme import PRESETS, QuantScheme, TensorFormat
from lqrl.quant.targets import target_modules

INT8 = QuantScheme.preset("int8_w8a8")


def test_int8_preset_is_per_channel_weights_and_dynamic_per_token_activations():
    assert INT8.weight == TensorFormat("int8", "channel", dynamic=False, symmetric=True)
    assert INT8.activation == TensorFormat("int8", "token", dynamic=True, symmetric=True)
    assert INT8.quantizes


def test_bf16_is_the_identity_scheme():
    assert QuantScheme.preset("bf16") == QuantScheme.preset("none")
    assert not QuantScheme.preset("bf16").quantizes


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match="bf16, fp8_per_block, fp8_per_channel"):
        QuantScheme.preset("int7")


def test_parse_takes_a_name_or_a_scheme():
    assert QuantScheme.parse("int8_w8a8") is INT8
    assert QuantScheme.parse(INT8) is INT8


def _take(scheme: str | QuantScheme) -> QuantScheme:
    return QuantScheme.parse(scheme)


class Taker:
    """As in a recipe: an option of a class."""

    def __init__(self, scheme: str | QuantScheme) -> None:
        self.scheme = QuantScheme.parse(scheme)


def _scheme_from_words(words: list[str]) -> QuantScheme:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Taker, "model")
    config = parser.parse_args([f"--model={__name__}.Taker", *words])
    return parser.instantiate_classes(config).model.scheme  # as LightningCLI does


def _scheme_from_yaml(text: str, tmp_path) -> QuantScheme:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return auto_cli(_take, args=["--config", str(path)])


def test_yaml_can_name_a_preset(tmp_path):
    assert _scheme_from_yaml("scheme: int8_w8a8\n", tmp_path) == INT8


def test_yaml_can_spell_out_a_scheme(tmp_path):
    text = """
scheme:
  name: int8_but_down
  weight: {dtype: int8, granularity: channel}
  activation: {dtype: int8, granularity: token, dynamic: true}
  skip: ["*.down_proj"]
"""
    expected = dataclasses.replace(INT8, name="int8_but_down", skip=("*.down_proj",))
    assert _scheme_from_yaml(text, tmp_path) == expected


def test_yaml_can_leave_layers_out_of_a_preset(tmp_path):
    scheme = _scheme_from_yaml('scheme: {name: nf4+lm_head, skip: ["*.down_proj"]}\n', tmp_path)
    assert scheme == dataclasses.replace(QuantScheme.preset("nf4+lm_head"), skip=("*.down_proj",))


@pytest.mark.parametrize("before", ["int8_w8a8", "{name: int4_w4a16, skip: ['*.o_proj']}"])
def test_the_command_line_can_leave_layers_out_of_a_preset(before):
    words = [f"--model.scheme={before}", "--model.init_args.scheme.name=nf4"]
    scheme = _scheme_from_words([*words, "--model.init_args.scheme.skip", '["*.down_proj"]'])
    assert scheme == dataclasses.replace(QuantScheme.preset("nf4"), skip=("*.down_proj",))


def test_other_formats_under_the_name_of_a_preset_are_refused():
    spelled_out = "{name: mine, weight: {dtype: int8, granularity: channel}}"
    with pytest.raises(ValueError, match="leave both out"):
        _scheme_from_words([f"--model.scheme={spelled_out}", "--model.scheme.name=nf4"])


def test_a_preset_by_name_is_that_preset_and_never_no_quantization():
    for name in PRESETS:
        assert QuantScheme(name) == dataclasses.replace(QuantScheme.preset(name), name=name)
    full = QuantScheme("fp8_per_channel", lm_head=True, kv_cache=TensorFormat("fp8_e4m3", "tensor"))
    assert full == dataclasses.replace(QuantScheme.preset("fp8_per_channel+lm_head+kv_fp8_static"), name=full.name)
    assert QuantScheme("none", kv_cache=full.kv_cache).weight is None


def test_a_layer_that_a_preset_cannot_hold_is_answered_with_what_to_write(tmp_path):
    with pytest.raises(ValueError, match="down_proj has 48 inputs") as error:
        prepare_(tiny_model("llama"), QuantScheme.preset("int4_w4a16_g32"), export_dtype=torch.float32)
    recipe, command = re.findall(r"(scheme: \{.*?\}) \((.*)\)", str(error.value))[0]
    told = _scheme_from_yaml(recipe, tmp_path)
    assert _scheme_from_words(["--model.scheme=int8_w8a8", *shlex.split(command)]) == told
    prepared = prepare_(tiny_model("llama"), told, export_dtype=torch.float32)
    assert len(prepared) == LAYERS * (LINEARS_PER_LAYER - 1)


@pytest.mark.parametrize("option", [{"activation": TensorFormat("int8", "token")}, {"skip": ("*.down_proj",)}])
def test_an_option_without_effect_is_refused(option):
    with pytest.raises(ValueError, match="no effect"):
        QuantScheme("odd", **option)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": TensorFormat("int8", "token")},
        {"weight": TensorFormat("int8", "channel", symmetric=False)},
        {"activation": TensorFormat("int8", "token", dynamic=False)},
    ],
)
def test_a_format_that_nothing_computes_is_refused(change):
    with pytest.raises(ValueError, match="no kernel computes scheme"):
        linear_method(dataclasses.replace(INT8, **change))


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_are_the_seven_linears_of_each_layer_in_module_order(family):
    names = target_modules(tiny_model(family), INT8)
    assert len(names) == LAYERS * LINEARS_PER_LAYER
    assert [n.rpartition(".")[2] for n in names[:7]] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    assert names[0] == "model.layers.0.self_attn.q_proj"


def test_targets_are_the_same_names_on_both_sides_after_the_swap():
    plain, learner, engine = (tiny_model("qwen2") for _ in range(3))
    names = target_modules(plain, INT8)
    assert prepare_(learner, INT8, export_dtype=torch.float32) == names == convert_(engine, INT8)
    assert target_modules(learner, INT8) == names == target_modules(engine, INT8)


def test_an_output_head_is_left_out_whatever_its_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.unembed = nn.Linear(4, 4), nn.Linear(4, 8)

        def get_output_embeddings(self):
            return self.unembed

    assert target_modules(Model(), INT8) == ["proj"]


def test_head_and_routers_are_left_out_by_name():
    model = nn.ModuleDict(
        {
            "mlp": nn.ModuleDict({"gate": nn.Linear(4, 2), "gate_proj": nn.Linear(4, 4)}),
            "router": nn.Sequential(nn.Linear(4, 2)),
            "shared_expert_gate": nn.Linear(4, 1),
            "lm_head": nn.Linear(4, 8),
        }
    )
    assert target_modules(model, INT8) == ["mlp.gate_proj"]


def test_skip_patterns_remove_names():
    scheme = dataclasses.replace(INT8, skip=("*.down_proj", "model.layers.0.*"))
    names = target_modules(tiny_model("llama"), scheme)
    assert [n.rpartition(".")[2] for n in names] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    assert all(n.startswith("model.layers.1.") for n in names)


def test_a_skip_pattern_that_matches_nothing_raises():
    with pytest.raises(ValueError, match=r"'down_proj' of scheme 'int8_w8a8' matches no linear layer"):
        target_modules(tiny_model("llama"), dataclasses.replace(INT8, skip=("down_proj",)))


def test_a_quantizing_scheme_without_targets_raises_and_identity_does_not():
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"matches no nn\.Linear"):
        target_modules(model, INT8)
    assert target_modules(model, QuantScheme.preset("none")) == []


def test_scheme_imports_torch_only():
    code = "import sys, lqrl.quant.scheme; print([m for m in ('transformers', 'lightning') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
