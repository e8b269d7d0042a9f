"""Tiny decoders of the families that lqrl is tested with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_INITIALIZER_RANGE = 0.15  # far from uniform: a mistake must show in the log-probs
FAMILIES = ("llama", "qwen2", "qwen3", "gemma")


def tiny_config(family: str, *, vocab_size: int = 64, layers: int = 2) -> PretrainedConfig:
    """A config with hidden size 64, 4 heads and 2 key heads.

    Qwen2 has biases; Qwen3 and Gemma tie their embeddings; Gemma's norms scale by ``1 + w``.

    Raises:
        ValueError: for a family that is not in `FAMILIES`.
    """
    from transformers import GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config

    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma": GemmaConfig}
    if family not in classes:
        raise ValueError(f"unknown family {family!r}; choose one of {', '.join(FAMILIES)}")
    config = classes[family](
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=family in ("qwen3", "gemma"),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.initializer_range = _INITIALIZER_RANGE
    return config


def tiny_moe_config(*, vocab_size: int = 64, layers: int = 2, experts: int = 4, active: int = 2) -> PretrainedConfig:
    """A Qwen3-MoE of hidden size 128 whose experts have 128 inner units, so that every format can hold it."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=experts,
        num_experts_per_tok=active,
        norm_topk_prob=True,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.initializer_range = _INITIALIZER_RANGE
    return config
