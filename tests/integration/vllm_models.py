"""Tiny policies that vLLM's kernels take, and engines on them that tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

# Before vLLM is imported: no log, no compiler, nothing sent home.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# On a GPU attention in fp32 is a Triton kernel, which would round what it multiplies to TF32.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm import VLLMEngine, VLLMEngineFactory
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.kv import prepare_kv_
from lqrl.quant.lora import Lora
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.stream import StableTensors

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# The same tests on a GPU: LQRL_TEST_ACCELERATOR=cuda pytest tests/integration/test_vllm_*.py
DEVICE = torch.device(os.environ.get("LQRL_TEST_ACCELERATOR", "cpu"))
# On a GPU vLLM's low-bit layers have no fp32.
LOW_BIT_DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
EOS = (2, 3)
KV_BYTES = 2**24


def config_of(family: str, spread: float = 0.15) -> PretrainedConfig:
    """Qwen3 ties its embeddings, Qwen2 has biases."""
    classes = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    return classes[family](**_SIZES, tie_word_embeddings=family == "qwen3", initializer_range=spread)


@cache
def policy_of(family: str, seed: int = 0, spread: float = 0.15, kv: bool = False) -> PreTrainedModel:
    """A random policy; ``kv``: with calibrated cache scales, which are made up."""
    policy = load_model(config_of(family, spread), dtype=torch.float32, seed=seed).eval()
    if kv:
        prepare_kv_(policy, QuantScheme.preset("none+kv_fp8_static"))
        for name, buffer in policy.named_buffers():
            if name.endswith(("k_scale", "v_scale")):
                buffer.fill_(0.01 * (1 + seed))
    return policy


def weights_of(family: str, scheme: QuantScheme, dtype: torch.dtype, seed: int = 0, **options: Any) -> StableTensors:
    """What a learner sends."""
    policy = policy_of(family, seed, kv=scheme.kv_cache is not None, **options)
    return export_weights(policy, scheme, export_dtype=dtype)


def reused(weights: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """``weights``, one after another in the same buffer, which holds NaN when the next is asked for."""
    buffer = torch.empty(max(t.numel() for _, t in weights))
    for name, tensor in weights:
        part = buffer[: tensor.numel()].view(tensor.shape)
        part.copy_(tensor)
        yield name, part
        buffer.fill_(torch.nan)


def build(
    family: str = "qwen3",
    preset: str = "none",
    dtype: torch.dtype = torch.float32,
    spread: float = 0.15,
    lora: Lora | None = None,
    **options: Any,
) -> VLLMEngine:
    """An engine without weights; its refreshes are reloads unless ``direct_refresh`` is set."""
    spec = EngineSpec(config_of(family, spread), QuantScheme.preset(preset), dtype, DEVICE, 128, EOS, lora)
    engine_args = {"enforce_eager": True} | options.pop("engine_args", {})
    if DEVICE.type != "cpu":
        options = {"gpu_memory_utilization": 0.05} | options  # many engines live at once
    options = {"kv_cache_bytes": KV_BYTES, "max_num_seqs": 16, "direct_refresh": False} | options
    return VLLMEngineFactory(**options, engine_args=engine_args)(spec)


@cache
def shared(
    family: str = "qwen3", preset: str = "none", dtype: torch.dtype = torch.float32, **options: Any
) -> VLLMEngine:
    """One engine for many tests; each sends its own weights."""
    return build(family, preset, dtype, **options)


def refreshed(
    family: str = "qwen3", preset: str = "none", dtype: torch.dtype = torch.float32, **options: Any
) -> VLLMEngine:
    """The shared engine, after other weights, with those of seed 0 as version 5."""
    engine, scheme = shared(family, preset, dtype, **options), QuantScheme.preset(preset)
    spread = {"spread": options["spread"]} if "spread" in options else {}
    for version, seed in ((4, 1), (5, 0)):
        engine.update_weights(weights_of(family, scheme, dtype, seed, **spread), policy_version=version)
    return engine


def full_logits(family: str, ids: list[int], dtype: torch.dtype = torch.float32, spread: float = 0.15) -> Tensor:
    """Transformers' own logits ``[L, V]`` in fp32."""
    model = AutoModelForCausalLM.from_config(config_of(family, spread), dtype=dtype, attn_implementation="eager").eval()
    model.load_state_dict(policy_of(family, spread=spread).state_dict())
    with torch.no_grad():
        return model(torch.tensor(ids)[None]).logits[0].float()
