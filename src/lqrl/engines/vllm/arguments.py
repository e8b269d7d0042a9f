"""The arguments that vLLM is built with: what the recipe decides, what the engine needs, what the user adds."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm.served import kv_cache_dtype

if TYPE_CHECKING:
    from lqrl.engines.vllm.factory import VLLMEngineFactory

log = logging.getLogger(__name__)

_CPU_KV_BYTES = 2**30
_CPU_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_CUTS_PROMPTS = ("enable_chunked_prefill", "long_prefill_token_threshold")

_OWN_SEED = "the engine: a sample must depend on its own seed alone"
_FROM_LEARNER = "weights come from the learner"
_GENERATES = "the engine generates text"
_TEXT = "prompts are tokens of text"
_ONE_ADAPTER = "one adapter of one rank is on linear layers"

# Arguments of vLLM that have one source already, and where that is.
_OWNED = {
    "model": "model.init_args.model",
    "dtype": "model.init_args.dtype",
    "max_model_len": "the model's config",
    "hf_config_path": "the model's config",
    "hf_overrides": "the model's config, and the engine's fp32_head",
    "quantization": "model.init_args.scheme",
    "quantization_config": "model.init_args.scheme",
    "kv_cache_dtype": "model.init_args.scheme (+kv_fp8_static and the like)",
    "enable_lora": "model.init_args.lora",
    "max_loras": "model.init_args.lora, one adapter",
    "max_cpu_loras": "model.init_args.lora, one adapter",
    "max_lora_rank": "model.init_args.lora.r",
    "lora_dtype": "model.init_args.dtype",
    "lora_target_modules": "model.init_args.lora.target_modules",
    "logprobs_mode": "the engine, which reports processed log-probs",
    "logits_processors": "the engine's record_log_mass",
    "max_num_seqs": "the engine's max_num_seqs",
    "gpu_memory_utilization": "the engine's gpu_memory_utilization",
    "kv_cache_memory_bytes": "the engine's kv_cache_bytes",
    "enable_sleep_mode": "the engine's sleep_level",
    "seed": "the seed of each sample",
    "tokenizer": "the learner: the engine takes and gives tokens",
    "skip_tokenizer_init": "the learner: the engine takes and gives tokens",
    "load_format": "the engine: weights come with a refresh",
    "generation_config": "model.init_args.sampling",
    "override_generation_config": "model.init_args.sampling",
    "distributed_executor_backend": "the engine, which runs in this process",
    "tensor_parallel_size": "the engine's tensor_parallel_size, or the `cards` of a server",
    "pipeline_parallel_size": "the engine, which has no pipeline",
    "data_parallel_size": "the engine, whose ranks hold one model together",
    "speculative_config": _OWN_SEED,
    "spec_method": _OWN_SEED,
    "spec_model": _OWN_SEED,
    "spec_tokens": _OWN_SEED,
}

# Arguments of parts of vLLM that have nothing to do here, by how they begin.
_IDLE = {
    "tokenizer_": "the engine takes and gives tokens",
    "enable_prompt_embeds": "the engine takes and gives tokens",
    "structured_outputs_config": "a completion is drawn from all tokens",
    "reasoning_": "the engine takes and gives tokens",
    "stream_interval": "completions come whole",
    "tokens_only": "the engine takes and gives tokens",
    "served_model_name": "nobody asks for the model by a name",
    "revision": _FROM_LEARNER,
    "code_revision": _FROM_LEARNER,
    "hf_token": _FROM_LEARNER,
    "download_dir": _FROM_LEARNER,
    "ignore_patterns": _FROM_LEARNER,
    "safetensors_": _FROM_LEARNER,
    "model_weights": _FROM_LEARNER,
    "model_loader_extra_config": _FROM_LEARNER,
    "pt_load_map_location": _FROM_LEARNER,
    "max_parallel_loading_workers": _FROM_LEARNER,
    "use_tqdm_on_load": _FROM_LEARNER,
    "weight_transfer_config": _FROM_LEARNER,
    "data_parallel_": "ranks hold one model together",
    "nnodes": "ranks come with the run",
    "node_rank": "ranks come with the run",
    "master_": "ranks come with the run",
    "device_ids": "the device is trainer.accelerator's",
    "runner": _GENERATES,
    "convert": _GENERATES,
    "pooler_config": _GENERATES,
    "diffusion_config": _GENERATES,
    "mm_": _TEXT,
    "enable_mm_": _TEXT,
    "limit_mm_": _TEXT,
    "skip_mm_": _TEXT,
    "interleave_mm_": _TEXT,
    "media_": _TEXT,
    "allowed_": _TEXT,
    "video_": _TEXT,
    "default_mm_loras": _TEXT,
    "enable_tower_connector_lora": _TEXT,
    "fully_sharded_loras": _ONE_ADAPTER,
    "specialize_active_lora": _ONE_ADAPTER,
    "enable_mixed_moe_lora_format": _ONE_ADAPTER,
    "enable_moe_shared_loras": _ONE_ADAPTER,
    "max_lora_cls_labels": _ONE_ADAPTER,
}


def engine_arguments(
    spec: EngineSpec, options: VLLMEngineFactory, directory: Path, known: frozenset[str]
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` but for the logits processors.

    Args:
        spec: what to build.
        options: the engine's, ``engine_args`` among them.
        directory: where config.json is.
        known: arguments that the installed vLLM has.

    Raises:
        ValueError: when ``engine_args`` holds an unknown argument or one that is decided elsewhere, or the cache's size
            is set twice.
    """
    check_engine_args(options.engine_args, known)
    arguments: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": spec.max_model_len,
        "kv_cache_dtype": kv_cache_dtype(spec.scheme, spec.device.type),
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": options.max_num_seqs,
        "seed": 0,
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": "uni" if options.tensor_parallel_size == 1 else "external_launcher",
        "disable_log_stats": True,
    }
    if options.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    if options.sleep_level > 0 and spec.device.type == "cpu":
        raise ValueError(
            f"VLLMEngineFactory.sleep_level={options.sleep_level}: vLLM's CPU build gives nothing up in sleep; set 0"
        )
    if options.sleep_level > 0:
        arguments["enable_sleep_mode"] = True
    if options.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_bytes
    if spec.device.type == "cpu":
        arguments |= _cpu_arguments(options)
    return arguments | dict(options.engine_args)


def _cpu_arguments(options: VLLMEngineFactory) -> dict[str, Any]:
    """On the CPU vLLM would take nearly all memory for the cache, compile for minutes, and cut prompts.

    After each part of a prompt but the last it puts the sample's generator back, which those of a CPU cannot do.
    """
    for name in _CUTS_PROMPTS:
        if options.engine_args.get(name):
            raise ValueError(
                f"engine_args.{name}={options.engine_args[name]}: vLLM cuts prompts then, and on a CPU it cannot draw "
                "a sample with a seed after a cut prompt; remove it"
            )
    if options.gpu_memory_utilization is not None:
        log.warning(
            "gpu_memory_utilization: %s has no effect on a CPU; kv_cache_bytes sets the cache's size",
            options.gpu_memory_utilization,
        )
    arguments: dict[str, Any] = {"enforce_eager": True, "enable_chunked_prefill": False}
    if _CPU_KV_VARIABLE not in os.environ:
        return arguments | {"kv_cache_memory_bytes": options.kv_cache_bytes or _CPU_KV_BYTES}
    if options.kv_cache_bytes is not None:
        raise ValueError(
            f"VLLMEngineFactory.kv_cache_bytes={options.kv_cache_bytes} has no effect while the variable "
            f"{_CPU_KV_VARIABLE} is set; unset it"
        )
    return arguments


def with_hint(words: str) -> str:
    """What vLLM says of a failed start, and which options of this engine it means where it has no memory."""
    if "memory" not in words.lower():
        return words
    return f"{words} (of this engine: kv_cache_bytes, on a GPU gpu_memory_utilization, the policy's max_model_len)"


def check_engine_args(engine_args: Mapping[str, Any], known: frozenset[str]) -> None:
    """Refuse an argument that would have no effect here, or would say again what something else says.

    Raises:
        ValueError: naming it.
    """
    for name in engine_args:
        if name in _OWNED:
            raise ValueError(f"engine_args.{name} is not free: it comes from {_OWNED[name]}")
        idle = next((reason for start, reason in _IDLE.items() if name.startswith(start)), None)
        if idle is not None:
            raise ValueError(f"engine_args.{name} would have no effect: {idle}")
        if name not in known:
            near = get_close_matches(name, known - _OWNED.keys(), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"engine_args.{name} is no argument of this vLLM{hint}")
