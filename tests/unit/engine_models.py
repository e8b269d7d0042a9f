"""Tiny configs of the families that the embedded engine is tested with; no special tokens."""

from __future__ import annotations

from transformers import GemmaConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

SIZES = {
    "vocab_size": 56,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma": GemmaConfig(**SIZES, head_dim=8, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
}
