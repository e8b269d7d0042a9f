"""The short cut through the decoder layers gives transformers' bits, or is not taken."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lqrl.engines.base import EngineSpec
from lqrl.engines.decoder import Decoder
from lqrl.engines.transaction import write_weights_
from lqrl.modeling.attention import PackedContext
from lqrl.modeling.backbone import load_model, run_decoder
from lqrl.quant.prepare import export_weights
from lqrl.quant.scheme import QuantScheme

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
CONFIGS = [
    LlamaConfig(**SIZES),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES, head_dim=16),
    GemmaConfig(**SIZES, head_dim=8, tie_word_embeddings=True),
    MistralConfig(**SIZES, sliding_window=5),
]


def decoder(config: PretrainedConfig, dtype: torch.dtype, scheme: str = "none") -> Decoder:
    chosen = QuantScheme.preset(scheme)
    built = Decoder(EngineSpec(config, chosen, dtype, torch.device("cpu"), 64, ()))
    write_weights_(built.model, export_weights(load_model(config, dtype=dtype, seed=0), chosen, export_dtype=dtype))
    built.refresh_derived()
    return built


@pytest.mark.parametrize("scheme", ["none", "int8_w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_lean_layers_equal_transformers_bit_for_bit(config: PretrainedConfig, dtype: torch.dtype, scheme: str) -> None:
    built = decoder(config, dtype, scheme)
    assert built.lean is not None
    lengths = [7, 12, 1, 9]
    tokens = torch.randint(0, 56, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        lean = built(tokens, positions, PackedContext(lengths))
        plain = run_decoder(built.model, tokens[None], positions[None], PackedContext(lengths))
    assert torch.equal(lean, plain)


def test_another_layer_structure_runs_as_transformers_has_it() -> None:
    config = Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    assert decoder(config, torch.float32).lean is None


def test_the_same_structure_with_another_result_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) * 1.001)
    assert decoder(LlamaConfig(**SIZES), torch.float32).lean is None


def test_weights_that_give_nan_decide_nothing() -> None:
    config = LlamaConfig(**SIZES)
    built = Decoder(EngineSpec(config, QuantScheme.preset("none"), torch.float32, torch.device("cpu"), 64, ()))
    for parameter in built.model.parameters():
        parameter.fill_(torch.nan)
    built.refresh_derived()
    assert built.lean is None
    for parameter in built.model.parameters():
        parameter.fill_(0.01)
    built.refresh_derived()
    assert built.lean is not None
