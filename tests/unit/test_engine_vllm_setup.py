"""How a vLLM engine is set up, as far as no vLLM is needed: formats, the model it is told of, arguments, versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm import VLLMEngineFactory, VLLMServerEngineFactory
from lqrl.engines.vllm.arguments import check_engine_args, engine_arguments, with_hint
from lqrl.engines.vllm.patches import PATCHES
from lqrl.engines.vllm.process import check_process
from lqrl.engines.vllm.rounding import vllm_arithmetic
from lqrl.engines.vllm.served import ServedModel, kv_cache_dtype, served_scheme
from lqrl.engines.vllm.versions import check_version, import_vllm, parse_version
from lqrl.modeling.arithmetic import Arithmetic
from lqrl.modeling.backbone import load_model
from lqrl.quant.checkpoint import save_quantized
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CPU, GPU = torch.device("cpu"), torch.device("cuda")
QWEN3 = Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)
MOE = Qwen3MoeConfig(**SIZES, head_dim=32, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2)


def spec(preset: str, config: PretrainedConfig = QWEN3, device: torch.device = GPU) -> EngineSpec:
    return EngineSpec(config, QuantScheme.preset(preset), torch.bfloat16, device, 64, (2,))


# ---------------------------------------------------------------- formats


SERVED = (
    "none", "int8_w8a8", "int8_w8a16", "int4_w4a16", "int4_w4a16_g32", "int3_w3a16_g32", "fp8_per_channel",
    "fp8_per_block", "nvfp4_w4a16", "mxfp4_w4a16", "int8_w8a8+lm_head",
)  # fmt: skip


@pytest.mark.parametrize("preset", SERVED)
def test_what_vllm_has_is_held_as_it_is(preset: str) -> None:
    assert served_scheme(QuantScheme.preset(preset)) == QuantScheme.preset(preset)


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("nf4", "a format of bitsandbytes"),
        ("mxfp8", "leaves the activations of mxfp8"),
        ("nvfp4_w4a4", "calibrated global scale"),
        ("int4_w4a4", "no product of int4 weights with int4 activations"),
    ],
)
def test_what_vllm_computes_otherwise_is_refused_by_name(preset: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"vLLM does not run scheme '{preset}'.*{reason}"):
        served_scheme(QuantScheme.preset(preset))


def test_activations_with_one_scale_a_tensor_are_refused() -> None:
    scheme = QuantScheme.preset("fp8_per_tensor")
    assert scheme.activation is not None
    with pytest.raises(ValueError, match="the scale is that of the batch"):
        served_scheme(replace(scheme, activation=replace(scheme.activation, granularity="tensor")))


@pytest.mark.parametrize(
    ("preset", "device", "expected"),
    [
        ("int8_w8a8", "cuda", "auto"),
        ("int8_w8a8+kv_int8", "cuda", "int8_per_token_head"),
        ("none+kv_fp8", "cuda", "fp8_per_token_head"),
        ("fp8_per_channel+kv_fp8_static", "cuda", "fp8_e4m3"),
        ("fp8_per_channel+kv_fp8_static", "cpu", "fp8_e4m3"),
    ],
)
def test_the_cache_format_by_vllms_name(preset: str, device: str, expected: str) -> None:
    assert kv_cache_dtype(QuantScheme.preset(preset), device) == expected


@pytest.mark.parametrize(
    ("preset", "device", "message"),
    [("int8_w8a8+kv_int8", "cpu", "plain cache"), ("none+kv_fp8_static", "cuda", "with quantized weights only")],
)
def test_a_cache_that_vllm_lacks_is_refused(preset: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_cache_dtype(QuantScheme.preset(preset), device)


# ---------------------------------------------------------------- the served model


def shipped(config: PretrainedConfig, preset: str) -> dict[str, Tensor]:
    policy = load_model(config, dtype=torch.float32, seed=0)
    return dict(export_weights(policy, QuantScheme.preset(preset), export_dtype=torch.bfloat16))


@pytest.mark.parametrize("config", [QWEN3, MOE], ids=["tied", "experts"])
@pytest.mark.parametrize("preset", [p for p in SERVED if p != "none"])
def test_what_is_streamed_is_what_the_exporter_writes(config: PretrainedConfig, preset: str, tmp_path: Path) -> None:
    weights, served = shipped(config, preset), ServedModel(spec(preset, config), unties=False)
    assert {n: (t.shape, t.dtype) for n, t in served.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in weights.items()
    }
    save_quantized(
        load_model(config, dtype=torch.float32, seed=0),
        QuantScheme.preset(preset),
        tmp_path,
        export_dtype=torch.bfloat16,
    )
    written, streamed = load_file(tmp_path / "model.safetensors"), dict(served.checkpoint_stream(weights))
    assert written.keys() == streamed.keys()
    assert all(torch.equal(written[n].view(torch.uint8), streamed[n].view(torch.uint8)) for n in written)
    described = (tmp_path / "config.json").read_text()
    served.write_config(tmp_path)
    assert (tmp_path / "config.json").read_text() == described


def test_one_scale_a_tensor_is_held_for_every_channel() -> None:
    weights, served = shipped(QWEN3, "fp8_per_tensor"), ServedModel(spec("fp8_per_tensor"), unties=False)
    streamed = dict(served.checkpoint_stream(weights))
    assert streamed.keys() == weights.keys()
    for name, tensor in streamed.items():
        if name.endswith("weight_scale"):
            assert tensor.shape == (weights[name.removesuffix("_scale")].shape[0], 1)
            assert (tensor == weights[name]).all()
        else:
            assert tensor is weights[name]
    group = served.config.quantization_config["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel"
    assert group["input_activations"]["strategy"] == "token"


def test_experts_with_one_scale_are_refused() -> None:
    with pytest.raises(ValueError, match="use fp8_per_channel"):
        ServedModel(spec("fp8_per_tensor", MOE), unties=False)


def test_a_tied_head_is_sent_apart_where_kernels_keep_a_copy() -> None:
    weights = shipped(QWEN3, "none")
    tied, apart = (ServedModel(spec("none"), unties=unties) for unties in (False, True))
    assert tied.aliases == apart.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied.may_miss("lm_head.weight")
    assert not apart.may_miss("lm_head.weight")
    assert (tied.config.tie_word_embeddings, apart.config.tie_word_embeddings) == (True, False)
    assert "lm_head.weight" not in dict(tied.checkpoint_stream(weights))
    assert dict(apart.checkpoint_stream(weights))["lm_head.weight"] is weights["model.embed_tokens.weight"]


def test_calibrated_scales_must_be_loaded() -> None:
    plain, calibrated = (ServedModel(spec(p), unties=False) for p in ("int8_w8a8+kv_int8", "int8_w8a8+kv_fp8_static"))
    name = "model.layers.0.self_attn.attn.k_scale"
    assert plain.may_miss(name)
    assert not calibrated.may_miss(name)
    assert calibrated.may_miss("model.layers.0.self_attn.attn.q_scale")
    assert not plain.may_miss("model.layers.0.self_attn.qkv_proj.weight_scale")
    assert calibrated.tensors.keys() - plain.tensors.keys() == {
        f"model.layers.0.self_attn.{which}_scale" for which in "kv"
    }


def test_llama_without_ties_has_no_alias() -> None:
    served = ServedModel(spec("none", LlamaConfig(**SIZES)), unties=True)
    assert served.aliases == {}
    assert "lm_head.weight" in served.tensors
    assert served.vocabulary == 64


# ---------------------------------------------------------------- arguments


KNOWN = frozenset(
    {"block_size", "enforce_eager", "dtype", "async_scheduling", "max_num_batched_tokens"}
    | {"enable_chunked_prefill", "long_prefill_token_threshold"}
)


def arguments(preset: str, device: torch.device = GPU, **options) -> dict:
    return engine_arguments(spec(preset, device=device), VLLMEngineFactory(**options), Path("/model"), KNOWN)


def test_the_recipe_and_the_options_become_arguments() -> None:
    made = arguments(
        "fp8_per_channel+kv_fp8_static",
        max_num_seqs=7,
        gpu_memory_utilization=0.3,
        sleep_level=2,
        engine_args={"block_size": 32},
    )
    wanted = {
        "model": "/model",
        "dtype": "bfloat16",
        "max_model_len": 64,
        "kv_cache_dtype": "fp8_e4m3",
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": 7,
        "gpu_memory_utilization": 0.3,
        "enable_sleep_mode": True,
        "block_size": 32,
        "load_format": "dummy",
    }
    assert {name: made[name] for name in wanted} == wanted
    assert "enforce_eager" not in made
    assert "kv_cache_memory_bytes" not in made


def test_on_the_cpu_the_cache_is_small_and_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert arguments("none", CPU)["kv_cache_memory_bytes"] == 2**30
    assert arguments("none", CPU, kv_cache_bytes=99)["kv_cache_memory_bytes"] == 99
    assert arguments("none", CPU)["enforce_eager"] is True
    assert arguments("none", CPU, engine_args={"enforce_eager": False})["enforce_eager"] is False
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert "kv_cache_memory_bytes" not in arguments("none", CPU)
    with pytest.raises(ValueError, match="VLLM_CPU_KVCACHE_SPACE is set"):
        arguments("none", CPU, kv_cache_bytes=99)


@pytest.mark.parametrize("engine_args", [{"enable_chunked_prefill": True}, {"long_prefill_token_threshold": 8}])
def test_on_the_cpu_no_prompt_is_cut(engine_args: dict) -> None:
    assert arguments("none", CPU)["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in arguments("none", GPU)
    assert arguments("none", GPU, engine_args=engine_args).items() >= engine_args.items()
    with pytest.raises(ValueError, match=rf"engine_args.{next(iter(engine_args))}=.*on a CPU it cannot.*; remove it"):
        arguments("none", CPU, engine_args=engine_args)


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        ({"quantization": "fp8"}, "comes from model.init_args.scheme"),
        ({"max_num_seqs": 4}, "comes from the engine's max_num_seqs"),
        ({"tensor_parallel_size": 2}, "comes from the engine's tensor_parallel_size"),
        ({"max_loras": 2}, "comes from model.init_args.lora"),
        ({"spec_method": "ngram"}, "a sample must depend on its own seed alone"),
        ({"hf_overrides": {}}, "comes from the model's config"),
        ({"revision": "main"}, "would have no effect: weights come from the learner"),
        ({"mm_processor_cache_gb": 1}, "would have no effect: prompts are tokens of text"),
        ({"tokenizer_mode": "slow"}, "would have no effect: the engine takes and gives tokens"),
        ({"blocksize": 4}, "did you mean block_size"),
        ({"zzz": 4}, "is no argument of this vLLM$"),
    ],
)
def test_an_argument_without_effect_or_with_two_sources_is_refused(engine_args: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine_args(engine_args, KNOWN)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0}, {"kv_cache_bytes": 0}, {"kv_cache_bytes": 1e9}, {"gpu_memory_utilization": 1.5},
        {"sleep_level": 3},
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        VLLMEngineFactory(**options)


# ---------------------------------------------------------------- versions and patches


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.1.dev7+g12ab", "0.29.3+cu130"])
def test_tested_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.26.0", "0.9.1"])
def test_other_versions_are_refused_with_a_way_out(version: str) -> None:
    with pytest.raises(RuntimeError, match=rf"found {version}; pip install 'vllm>=0.26,<0.33' in an"):
        check_version(version)


def test_a_version_without_numbers_is_refused() -> None:
    assert parse_version("0.32.1.dev7") == (0, 32)
    with pytest.raises(RuntimeError, match="names no release"):
        parse_version("dev")


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'vllm>=0.26,<0.33' in an environment of its own"):
        import_vllm()


def test_a_patch_is_bound_to_platform_and_version() -> None:
    (patch,) = (p for p in PATCHES if p.name == "onednn-keeps-scales")
    assert patch.applies("0.32.0", "cpu")
    assert not patch.applies("0.32.0", "cuda")
    assert patch.applies("0.26.0", "cpu")
    assert not patch.applies("0.25.9", "cpu")
    assert not patch.applies("0.33.0", "cpu")


# ---------------------------------------------------------------- the process


def test_another_device_than_vllms_is_refused() -> None:
    with pytest.raises(ValueError, match="runs on cuda, the engine is asked for on cpu"):
        check_process(spec("none", device=CPU), "cuda")
    with pytest.raises(ValueError, match="runs on no device here"):
        check_process(spec("none", device=GPU), "")
    with pytest.raises(NotImplementedError, match="choose the card with CUDA_VISIBLE_DEVICES"):
        check_process(spec("none", device=torch.device("cuda", 1)), "cuda")
    check_process(spec("none", device=torch.device("cuda", 0)), "cuda")


def test_a_run_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    check_process(spec("none"), "cuda")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(NotImplementedError, match="knows a single rank"):
        check_process(spec("none"), "cuda")


def test_mxfp4_is_refused_where_activations_would_be_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_process(spec("mxfp4_w4a16"), "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    check_process(spec("nvfp4_w4a16"), "cuda")
    with pytest.raises(ValueError, match="quantizes the activations too; take nvfp4_w4a16"):
        check_process(spec("mxfp4_w4a16"), "cuda")


def test_where_a_vllm_rounds_depends_on_where_it_runs_and_whether_it_compiles() -> None:
    eager, fp32_head = VLLMEngineFactory(engine_args={"enforce_eager": True}), VLLMServerEngineFactory(fp32_head=True)
    kernels = Arithmetic(rounds_normed=False, rounds_rotated=False, rounds_logits=True)
    assert vllm_arithmetic("cuda", eager) == kernels
    compiled = Arithmetic(rounds_sums=False, rounds_normed=False, rounds_rotated=False)
    assert vllm_arithmetic("cuda", fp32_head.each) == compiled
    native = Arithmetic(rounds_sums=False, rounds_rotated=False, rounds_logits=True)
    assert vllm_arithmetic("cpu", VLLMEngineFactory()) == native


def test_an_error_of_memory_names_this_engines_options() -> None:
    said = with_hint("No available memory for the cache blocks. Try increasing gpu_memory_utilization")
    assert said.endswith(
        "(of this engine: kv_cache_bytes, on a GPU gpu_memory_utilization, the policy's max_model_len)"
    )
    assert with_hint("unknown architecture") == "unknown architecture"


def test_a_share_of_a_gpu_is_said_to_do_nothing_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    assert "gpu_memory_utilization" in arguments("none", gpu_memory_utilization=0.3)
    assert not caplog.messages
    arguments("none", torch.device("cpu"), gpu_memory_utilization=0.3)
    assert caplog.messages == [
        "gpu_memory_utilization: 0.3 has no effect on a CPU; kv_cache_bytes sets the cache's size"
    ]
