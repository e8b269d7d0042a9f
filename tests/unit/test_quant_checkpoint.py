"""Compressed-tensors checkpoints: read back bit for bit, loaded by transformers, or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from engine_models import CONFIGS
from safetensors.torch import load_file, save_file
from torch import Tensor

from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.backbone import load_model
from lqrl.quant import Lora, QuantScheme, add_adapters_, export_weights, prepare_, target_modules
from lqrl.quant.checkpoint import load_quantized, resolve_scheme, save_quantized
from lqrl.quant.checkpoint_reader import full_precision_config, holds_codes
from lqrl.quant.compressed_format import quantization_config
from lqrl.quant.kv import prepare_kv_
from lqrl.quant.methods import linear_method
from lqrl.quant.scheme import PRESETS
from lqrl.testing.models import tiny_config
from lqrl.types import Prompt, SamplingParams

EXPORTABLE = sorted(PRESETS.keys() - {"bf16", "int4_w4a4", "nf4", "none"})
WEIGHT_ONLY = [name for name in EXPORTABLE if PRESETS[name].activation is None]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def built(scheme: QuantScheme, dtype: torch.dtype = torch.bfloat16, family: str = "qwen2"):
    config = tiny_config(family, layers=1)
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32  # groups of 128 must fit
    policy = load_model(config, dtype=torch.float32, seed=0)
    prepare_kv_(policy, scheme)
    prepare_(policy, scheme, export_dtype=dtype)
    return policy


def saved(name: str, directory: Path, dtype: torch.dtype = torch.bfloat16, family: str = "qwen2"):
    policy = built(QuantScheme.preset(name), dtype, family)
    save_quantized(policy, QuantScheme.preset(name), directory, export_dtype=dtype)
    return policy


def engine_of(config, scheme: QuantScheme, dtype: torch.dtype) -> TorchEngine:
    return TorchEngineFactory()(EngineSpec(config, scheme, dtype, torch.device("cpu"), 64, ()))


def edited(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"] |= changes
    path.write_text(json.dumps(content))


# ------------------------------------------------------------------------------------------------- read back


@pytest.mark.parametrize(
    ("name", "family"),  # qwen2 has biases, qwen3 ties its embeddings
    [
        *((name, "qwen2") for name in EXPORTABLE),
        ("int8_w8a8", "qwen3"),
        ("int8_w8a8+lm_head", "qwen3"),
        ("int4_w4a16_g32+lm_head", "qwen2"),
        ("fp8_per_channel+kv_fp8_static", "qwen3"),
        ("int8_w8a8+lm_head+kv_fp8_static", "qwen2"),
        ("int8_w8a16+kv_int8", "qwen2"),
        ("fp8_per_channel+lm_head+kv_fp8", "qwen3"),
        ("nvfp4_w4a4+kv_fp8", "qwen2"),
    ],
)
def test_the_engine_that_reads_it_back_is_the_engine_that_trained_it(name, family, tmp_path):
    scheme = QuantScheme.preset(name)
    policy = saved(name, tmp_path, family=family)
    trained = engine_of(policy.config, scheme, torch.bfloat16)
    sent = {n: t.clone() for n, t in export_weights(policy, scheme, export_dtype=torch.bfloat16)}
    report = trained.update_weights(iter(sent.items()), policy_version=0)
    found, tensors = load_quantized(tmp_path)
    tensors = dict(tensors)
    assert tensors.keys() == sent.keys()
    assert all(torch.equal(bits(tensors[n]), bits(t)) and tensors[n].dtype == t.dtype for n, t in sent.items())
    served = engine_of(full_precision_config(tmp_path), found, torch.bfloat16)
    assert served.update_weights(iter(tensors.items()), policy_version=0).digest == report.digest
    assert found == (scheme if "int3" not in name else QuantScheme.preset("int4_w4a16_g32"))


@pytest.mark.parametrize("name", ["int8_w8a16", "int4_w4a16_g32"])
def test_an_engine_of_a_wider_dtype_loses_nothing(name, tmp_path):
    policy = saved(name, tmp_path)
    scheme, tensors = load_quantized(tmp_path, dtype=torch.float32)
    engine_of(policy.config, scheme, torch.float32).update_weights(tensors, policy_version=0)
    narrow, wide = dict(load_quantized(tmp_path)[1]), dict(load_quantized(tmp_path, dtype=torch.float32)[1])
    assert all(torch.equal(bits(wide[n].to(t.dtype)), bits(t)) for n, t in narrow.items())


def test_skipped_layers_come_back_by_name_and_the_config_lists_what_is_not_quantized(tmp_path):
    int8 = PRESETS["int8_w8a8"]
    scheme = QuantScheme("mine", int8.weight, int8.activation, skip=("*.down_proj",))
    policy = built(scheme)
    save_quantized(policy, scheme, tmp_path, export_dtype=torch.bfloat16)
    down = ("model.layers.0.mlp.down_proj",)
    found = resolve_scheme(tmp_path)
    assert (found.name, found.skip) == ("int8_w8a8", down)
    assert target_modules(policy, found) == target_modules(policy, scheme)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == [*down, "lm_head"]


def test_tied_weights_are_written_once_and_a_quantized_head_unties_them(tmp_path):
    saved("int8_w8a8", tmp_path / "plain", family="qwen3")
    saved("int8_w8a8+lm_head", tmp_path / "head", family="qwen3")
    plain, head = (load_file(tmp_path / d / "model.safetensors") for d in ("plain", "head"))
    assert "lm_head.weight" not in plain
    assert (head["lm_head.weight"].dtype, head["model.embed_tokens.weight"].dtype) == (torch.int8, torch.bfloat16)
    assert full_precision_config(tmp_path / "plain").tie_word_embeddings
    assert not full_precision_config(tmp_path / "head").tie_word_embeddings


def test_shards_hold_the_same_tensors_and_a_new_export_leaves_no_old_ones(tmp_path):
    saved("fp8_per_channel", tmp_path)
    whole = dict(load_quantized(tmp_path)[1])
    policy = built(QuantScheme.preset("fp8_per_channel"))
    save_quantized(
        policy, QuantScheme.preset("fp8_per_channel"), tmp_path, export_dtype=torch.bfloat16, max_shard_bytes=50_000
    )
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == names
    assert index["metadata"]["total_size"] == sum(t.nbytes for n in names for t in load_file(tmp_path / n).values())
    parts = dict(load_quantized(tmp_path)[1])
    assert parts.keys() == whole.keys()
    assert all(torch.equal(bits(parts[n]), bits(t)) for n, t in whole.items())
    saved("fp8_per_channel", tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("name", EXPORTABLE)
def test_masters_start_at_the_values_of_the_codes(name, tmp_path):
    """Requantized they mean the same: the rules are fixed points (mxfp8 may halve a scale and double its codes)."""
    policy = saved(name, tmp_path)
    masters = load_model(tmp_path, dtype=torch.float32)
    assert "quantization_config" not in masters.config.to_dict()
    assert masters.generation_config.eos_token_id == policy.generation_config.eos_token_id
    scheme, before = QuantScheme.preset(name), dict(load_quantized(tmp_path)[1])
    method = linear_method(scheme)
    after = dict(export_weights(masters, scheme, export_dtype=torch.bfloat16))
    for layer in target_modules(masters, scheme):
        values = [
            method.dequantize(
                {n.rpartition(".")[2]: t for n, t in w.items() if n.startswith(f"{layer}.")}, torch.float32
            )
            for w in (before, after)
        ]
        assert torch.equal(masters.get_parameter(f"{layer}.weight"), values[0])
        assert torch.equal(*values)
    assert all(torch.equal(after[n], t) for n, t in before.items() if n.endswith(("norm.weight", "bias")))


# ------------------------------------------------------------------------------------------------- transformers


def logprob_gap(policy, name: str, directory: Path, dtype: torch.dtype, **options: object) -> Tensor:
    """|log-prob of transformers - log-prob of our engine| of sampled tokens."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    logging.disable(logging.WARNING)
    engine = engine_of(policy.config, QuantScheme.preset(name), dtype)
    engine.update_weights(export_weights(policy, engine.spec.scheme, export_dtype=dtype), policy_version=0)
    completions = engine.generate([Prompt(0, (5, 6, 7))], SamplingParams(n=8, max_tokens=16), seed=0)[0]
    ids = torch.tensor([[5, 6, 7, *c.token_ids.tolist()] for c in completions])
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, quantization_config=CompressedTensorsConfig(**options)
    ).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(theirs(ids).logits.float(), -1)[:, 2:-1].gather(2, ids[:, 3:, None])[..., 0]
    logging.disable(logging.NOTSET)
    return (logprobs - torch.stack([c.logprobs for c in completions])).abs()


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, "int4_w4a16_g32+lm_head"])
def test_transformers_computes_the_log_probs_of_weight_only_formats(name, tmp_path):
    """Measured: 6e-6 at most. compressed-tensors dequantizes nvfp4 to bf16 in every model: 0.05."""
    pytest.importorskip("compressed_tensors")
    gap = logprob_gap(saved(name, tmp_path, torch.float32), name, tmp_path, torch.float32, dequantize=True)
    assert gap.max() < (0.15 if name == "nvfp4_w4a16" else 5e-5)
    assert gap.numel() == 128


@pytest.mark.parametrize(
    ("name", "limit"),
    # Means measured: 2e-3, 5e-7, 5e-3 (a code near a boundary flips) and 0.06 (another grid for the activations).
    [("fp8_per_channel", 0.02), ("fp8_per_tensor", 0.02), ("fp8_per_block", 0.03), ("int8_w8a8", 0.15)],
)
def test_transformers_emulates_formats_with_activations(name, limit, tmp_path):
    pytest.importorskip("compressed_tensors")
    gap = logprob_gap(saved(name, tmp_path, torch.float32), name, tmp_path, torch.float32)
    assert gap.mean() < limit


# ------------------------------------------------------------------------------------------------- refusals


def test_adapters_beside_the_codes_are_refused_by_name(tmp_path):
    scheme = QuantScheme.preset("int8_w8a8")
    pytest.importorskip("peft")
    policy = built(scheme, torch.float32)
    add_adapters_(policy, Lora(r=2), export_dtype=torch.float32, seed=0)
    with pytest.raises(ValueError, match=r"q_proj computes with its codes and an adapter.*refresh='merge'"):
        save_quantized(policy, scheme, tmp_path, export_dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_merged_adapters_are_exported_as_they_are_served(tmp_path):
    pytest.importorskip("peft")
    scheme = QuantScheme.preset("int4_w4a16_g32")
    policy = built(scheme, torch.float32)
    add_adapters_(policy, Lora(r=2, refresh="merge"), export_dtype=torch.float32, seed=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    save_quantized(policy, scheme, tmp_path, export_dtype=torch.float32)
    sent, read = dict(export_weights(policy, scheme, export_dtype=torch.float32)), dict(load_quantized(tmp_path)[1])
    assert sent.keys() == read.keys()
    assert all(torch.equal(bits(read[n]), bits(t)) for n, t in sent.items())


def test_every_reason_is_listed(tmp_path):
    saved("int8_w8a8", tmp_path)
    edited(tmp_path, sparsity_config={"format": "dense"}, transform_config={"R1": {}}, kv_cache_scheme={"num_bits": 8})
    with pytest.raises(ValueError, match=r"sparsity_config is set; transform_config is set; kv_cache_scheme is int8"):
        resolve_scheme(tmp_path)


def test_two_groups_and_another_method_are_refused(tmp_path):
    saved("int8_w8a8", tmp_path)
    group = quantization_config(PRESETS["int8_w8a8"], [])["config_groups"]["group_0"]
    edited(tmp_path, config_groups={"a": group, "b": group})
    with pytest.raises(ValueError, match="2 config_groups"):
        load_quantized(tmp_path)
    assert holds_codes(tmp_path)
    edited(tmp_path, quant_method="gptq")
    assert not holds_codes(tmp_path)


def test_a_layer_that_does_not_fit_is_named(tmp_path):
    saved("int8_w8a8", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    for change, reason in [
        ({f"{name}.weight": torch.zeros(3, 3, dtype=torch.int8)}, r"weight is torch.int8 \(3, 3\)"),
        ({f"{name}.input_scale": torch.ones(1)}, "input_scale, which no kernel here reads"),
    ]:
        save_file(tensors | change, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"{name} in .* does not fit: .*{reason}"):
            dict(load_quantized(tmp_path)[1])
    save_file(tensors | {"model.norm.weight_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"quantizes model\.norm"):
        resolve_scheme(tmp_path)


def test_missing_weights_are_no_masters(tmp_path):
    saved("int8_w8a8", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_weight_with_nan_leaves_no_model_directory(tmp_path):
    policy = built(QuantScheme.preset("int8_w8a8"))
    with torch.no_grad():
        policy.get_parameter("model.layers.0.mlp.up_proj.weight")[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"up_proj\.weight holds NaN"):
        save_quantized(policy, QuantScheme.preset("int8_w8a8"), tmp_path, export_dtype=torch.bfloat16)
    assert not (tmp_path / "config.json").exists()


def test_a_refused_export_leaves_the_one_before(tmp_path):
    scheme = QuantScheme.preset("int8_w8a8")
    model = saved("int8_w8a8", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="holds NaN or inf"):
        save_quantized(model, scheme, tmp_path, export_dtype=torch.bfloat16, max_shard_bytes=10_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_lost_file_is_missed(tmp_path):
    scheme = QuantScheme.preset("fp8_per_channel")
    save_quantized(built(scheme), scheme, tmp_path, export_dtype=torch.bfloat16, max_shard_bytes=10_000)
    last = sorted(tmp_path.glob("model*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(ValueError, match=rf"lacks {last.name}, which model\.safetensors\.index\.json names"):
        load_quantized(tmp_path)


@pytest.mark.parametrize("name", ["int8_w8a8", "fp8_per_channel", "int4_w4a16_g32", "nvfp4_w4a16"])
def test_codes_without_a_scale_are_no_weights(name, tmp_path):
    saved(name, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    layer = "model.layers.0.mlp.up_proj"
    del tensors[f"{layer}.weight_scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    for use in (lambda: list(load_quantized(tmp_path)[1]), lambda: load_model(str(tmp_path), dtype=torch.float32)):
        with pytest.raises(ValueError, match=rf"{layer}\.weight.* holds codes, but {layer}\.weight_scale is missing"):
            use()


@pytest.mark.parametrize(
    ("last", "value", "message"),
    [
        ("weight_zero_point", torch.ones(4), "its weight_zero_point is not 0"),
        ("weight_shape", torch.tensor([3, 5]), r"its weight_shape is \[3, 5\], the model's"),
        ("weight_scale", torch.tensor([torch.nan]), "its weight_scale holds NaN or inf"),
    ],
)
def test_what_a_layer_says_beside_its_codes_is_read(last, value, message, tmp_path):
    saved("int4_w4a16_g32", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.0.mlp.up_proj.{last}"
    tensors[name] = value if last != "weight_scale" else tensors[name] * torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        list(load_quantized(tmp_path)[1])


def test_a_head_that_the_config_ties_and_the_file_does_not_is_refused(tmp_path):
    saved("int8_w8a8", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, path, metadata={"format": "pt"})
    assert "lm_head.weight" not in dict(load_quantized(tmp_path)[1])
    save_file(tensors | {"lm_head.weight": embedding * 2}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but"):
        list(load_quantized(tmp_path)[1])


def test_another_architecture_is_read_back_too(tmp_path):
    """Mistral, 32 wide: int8 needs no multiple of anything."""
    policy = load_model(CONFIGS["mistral"], dtype=torch.float32, seed=0)
    scheme = QuantScheme.preset("int8_w8a8")
    save_quantized(policy, scheme, tmp_path, export_dtype=torch.float32)
    found, tensors = load_quantized(tmp_path)
    engine_of(policy.config, found, torch.float32).update_weights(tensors, policy_version=0)
