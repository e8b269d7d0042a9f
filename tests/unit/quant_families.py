"""Tiny decoders of four families: plain, with q/k/v biases, with q/k norms, and Gemma's tied head with 1 + w gains."""

from __future__ import annotations

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen2", "qwen3", "gemma")
LINEARS_PER_LAYER = 7
LAYERS = 2
_SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def tiny_model(family: str, *, seed: int = 0, tied: bool | None = None) -> PreTrainedModel:
    """A random fp32 model whose biases and norm gains are not the trivial ones of a fresh model."""
    tied = family == "gemma" if tied is None else tied
    config, cls = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "gemma": (GemmaConfig, GemmaForCausalLM),
    }[family]
    shape = {k: v for k, v in _SHAPE.items() if not (family == "qwen2" and k == "head_dim")}
    torch.manual_seed(seed)
    model = cls(config(**shape, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, _SHAPE["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(seed))
