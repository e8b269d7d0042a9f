"""Quantized Qwen3-MoE checkpoints: one name for each expert, read back bit for bit, loaded by others."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.backbone import load_model
from lqrl.quant import QuantScheme, export_weights, prepare_, target_modules
from lqrl.quant.checkpoint import check_exportable, load_quantized, save_quantized
from lqrl.quant.checkpoint_reader import full_precision_config
from lqrl.quant.methods import linear_method
from lqrl.quant.scheme import PRESETS
from lqrl.quant.stacks import CHILDREN, stack_of, stacked, unstacked
from lqrl.testing.models import tiny_moe_config
from lqrl.types import Prompt, SamplingParams

EXPERTS = "model.layers.0.mlp.experts"
EXPORTABLE = sorted(PRESETS.keys() - {"bf16", "int4_w4a4", "nf4", "none"})
MAIN = ["fp8_per_channel", "int4_w4a16_g32", "int8_w8a8"]
COUNT, HIDDEN, INNER = 4, 128, 128


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def saved(scheme: QuantScheme, directory: Path, dtype: torch.dtype = torch.bfloat16):
    policy = load_model(tiny_moe_config(), dtype=torch.float32, seed=0)
    prepare_(policy, scheme, export_dtype=dtype)
    save_quantized(policy, scheme, directory, export_dtype=dtype)
    return policy


def engine_of(config, scheme: QuantScheme, dtype: torch.dtype = torch.bfloat16) -> TorchEngine:
    return TorchEngineFactory()(EngineSpec(config, scheme, dtype, torch.device("cpu"), 64, ()))


def sampled(engine: TorchEngine) -> tuple[list[int], Tensor]:
    completions = engine.generate([Prompt(0, (5, 6, 7))], SamplingParams(n=4, max_tokens=8), seed=0)[0]
    return [t for c in completions for t in c.token_ids.tolist()], torch.cat([c.logprobs for c in completions])


@pytest.mark.parametrize("name", EXPORTABLE)
def test_the_engine_that_reads_it_back_is_the_engine_that_trained_it(name, tmp_path):
    scheme = QuantScheme.preset(name)
    policy = saved(scheme, tmp_path)
    sent = dict(export_weights(policy, scheme, export_dtype=torch.bfloat16))
    found, tensors = load_quantized(tmp_path)
    tensors = dict(tensors)
    assert found == (scheme if "int3" not in name else QuantScheme.preset("int4_w4a16_g32"))
    assert tensors.keys() == sent.keys()
    assert all(torch.equal(bits(tensors[n]), bits(t)) and tensors[n].dtype == t.dtype for n, t in sent.items())
    trained, served = engine_of(policy.config, scheme), engine_of(full_precision_config(tmp_path), found)
    reports = [e.update_weights(w.items(), policy_version=0) for e, w in ((trained, sent), (served, tensors))]
    assert reports[0].digest == reports[1].digest
    (tokens, logprobs), (again, same) = sampled(trained), sampled(served)
    assert tokens == again
    assert torch.equal(logprobs, same)


@pytest.mark.parametrize("name", MAIN)
def test_each_expert_has_its_names_and_routers_stay_as_they_are(name, tmp_path):
    policy = saved(QuantScheme.preset(name), tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    parts = {"weight_packed", "weight_scale", "weight_shape"} if "int4" in name else {"weight", "weight_scale"}
    expected = {f"{EXPERTS}.{e}.{child}.{part}" for e in range(COUNT) for child in CHILDREN for part in parts}
    assert {n for n in held if n.startswith(f"{EXPERTS}.")} == expected
    assert held[f"{EXPERTS}.1.down_proj.weight_scale"].shape[0] == HIDDEN
    router = held["model.layers.0.mlp.gate.weight"]
    assert torch.equal(router, policy.get_parameter("model.layers.0.mlp.gate.weight").to(torch.bfloat16))
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]


@pytest.mark.parametrize("name", ["fp8_per_block", "fp8_per_tensor", "int8_w8a16", "nvfp4_w4a16", *MAIN])
def test_compressed_tensors_makes_the_same_values_of_an_expert(name, tmp_path):
    """Its values are bf16 for nvfp4, which it always dequantizes so."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig

    saved(QuantScheme.preset(name), tmp_path, torch.float32)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(settings).config_groups.values()
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    held = load_file(tmp_path / "model.safetensors")
    masters = load_model(tmp_path, dtype=torch.float32)
    ours = dict(unstacked((n, p.detach()) for n, p in masters.named_parameters() if ".experts." in n))
    assert len(ours) == 2 * COUNT * 3
    for layer in {n.rpartition(".")[0] for n in ours}:
        own = {n.rpartition(".")[2]: t for n, t in held.items() if n.startswith(f"{layer}.")}
        values = compressor.decompress(own, scheme)["weight"]
        assert torch.equal(values, ours[f"{layer}.weight"].to(values.dtype))


@pytest.mark.parametrize(
    "name", ["int4_w4a16", "int4_w4a16_g32", "int8_w8a16", "fp8_per_channel", "fp8_per_tensor", "mxfp4_w4a16"]
)
def test_transformers_loads_the_experts(name, tmp_path):
    """The other formats it cannot: docs/formats.md has its errors."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    saved(QuantScheme.preset(name), tmp_path)
    logging.disable(logging.WARNING)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    logging.disable(logging.NOTSET)
    ours = dict(load_model(tmp_path, dtype=torch.bfloat16).named_parameters())
    found = {n: p for n, p in theirs.named_parameters() if n in ours}
    assert found.keys() == ours.keys()
    assert all(torch.equal(p, ours[n]) for n, p in found.items())


@pytest.mark.parametrize("name", MAIN)
def test_masters_start_at_the_values_of_the_codes(name, tmp_path):
    scheme = QuantScheme.preset(name)
    policy = saved(scheme, tmp_path)
    masters = load_model(tmp_path, dtype=torch.float32)
    method, sent = linear_method(scheme), dict(export_weights(policy, scheme, export_dtype=torch.bfloat16))
    for projection in ("gate_up_proj", "down_proj"):
        prefix = f"{EXPERTS}.{projection}_"
        codes = {n.removeprefix(prefix): t for n, t in sent.items() if n.startswith(prefix)}
        for e, values in enumerate(masters.get_parameter(f"{EXPERTS}.{projection}")):
            assert torch.equal(values, method.dequantize({n: t[e] for n, t in codes.items()}, torch.float32))
    again = dict(export_weights(masters, scheme, export_dtype=torch.float32))
    assert all(torch.equal(bits(again[n]), bits(t)) for n, t in sent.items() if t.dtype in (torch.int8, torch.int32))


def test_experts_in_high_precision_are_named_and_read_back(tmp_path):
    int8 = PRESETS["int8_w8a8"]
    scheme = QuantScheme("mine", int8.weight, int8.activation, skip=("model.layers.1.mlp.experts",))
    policy = saved(scheme, tmp_path)
    sent = dict(export_weights(policy, scheme, export_dtype=torch.bfloat16))
    found, tensors = load_quantized(tmp_path)
    assert found.skip == scheme.skip
    tensors = dict(tensors)
    assert tensors.keys() == sent.keys()
    assert all(torch.equal(bits(tensors[n]), bits(t)) for n, t in sent.items())
    masters = load_model(tmp_path, dtype=torch.float32)
    expected = policy.get_parameter("model.layers.1.mlp.experts.down_proj").detach().to(torch.bfloat16)
    assert torch.equal(masters.get_parameter("model.layers.1.mlp.experts.down_proj"), expected.float())
    ignore = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    patterns = [entry.removeprefix("re:") for entry in ignore if entry.startswith("re:")]
    assert len(patterns) == 1
    assert re.match(patterns[0], "model.layers.1.mlp.experts.0.gate_proj")  # as vLLM asks
    assert not re.match(patterns[0], f"{EXPERTS}.0.gate_proj")
    assert target_modules(policy, found) == target_modules(policy, scheme)


def test_names_go_both_ways():
    assert stack_of(f"{EXPERTS}.12.up_proj") == EXPERTS
    assert [stack_of(n) for n in ("model.layers.0.mlp.up_proj", EXPERTS, f"{EXPERTS}.gate_up_proj")] == [None] * 3
    # 2 experts, gate and up of 2 rows each, inputs 3: numbered so that a row out of place shows.
    stacks = {
        "gate_up_proj_weight": torch.arange(24).view(2, 4, 3),
        "gate_up_proj_weight_scale": torch.tensor([[0.5], [0.25]]),
        "down_proj_weight": torch.arange(12).view(2, 3, 2),
        "down_proj_weight_scale": torch.tensor([[1.0], [2.0]]),
    }
    flat = dict(unstacked((f"experts.{n}", t) for n, t in stacks.items()))
    assert flat["experts.1.up_proj.weight"].tolist() == [[18, 19, 20], [21, 22, 23]]
    assert (
        flat["experts.1.gate_proj.weight_scale"].tolist() == flat["experts.1.up_proj.weight_scale"].tolist() == [0.25]
    )
    parts = ("weight", "weight_scale")
    experts = [{c: {p: flat[f"experts.{e}.{c}.{p}"] for p in parts} for c in CHILDREN} for e in range(2)]
    back = stacked(experts)
    assert back.keys() == stacks.keys()
    assert all(torch.equal(back[n], t) for n, t in stacks.items())


def test_an_expert_that_does_not_fit_is_named(tmp_path):
    saved(QuantScheme.preset("fp8_per_tensor"), tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    up = f"{EXPERTS}.2.up_proj"
    for changed, reason in [
        ({n: t for n, t in held.items() if n != f"{up}.weight"}, rf"{up} in .* does not fit: it has no weight"),
        (held | {f"{up}.weight_scale": torch.ones(1)}, rf"{EXPERTS} in .* weight_scale of .* differ in expert 2"),
    ]:
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=reason):
            dict(load_quantized(tmp_path)[1])


def test_an_expert_without_weights_is_named(tmp_path):
    int8 = PRESETS["int8_w8a8"]
    saved(QuantScheme("mine", int8.weight, int8.activation, skip=("*.experts",)), tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    del held[f"{EXPERTS}.3.gate_proj.weight"]
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"does not hold {EXPERTS}\.3\.gate_proj\.weight"):
        dict(load_quantized(tmp_path)[1])


def test_experts_by_other_names_are_refused():
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    model = load_model(config, dtype=torch.float32, seed=0)
    with pytest.raises(ValueError, match=r"mlp\.experts stacks the weights of experts, and checkpoints of mixtral do"):
        check_exportable(model, PRESETS["int8_w8a8"])
