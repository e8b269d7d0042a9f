"""The short cut through the decoder layers gives transformers' bits, or is not taken."""

from __future__ import annotations

import pytest
import torch
from engine_models import CONFIGS, SIZES
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
)

from lqrl.engines.base import EngineSpec
from lqrl.engines.decoder import Decoder
from lqrl.engines.transaction import write_weights_
from lqrl.modeling.attention import PackedContext
from lqrl.modeling.backbone import load_model, run_decoder
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme


def decoder(config: PretrainedConfig, dtype: torch.dtype, scheme: str = "none") -> Decoder:
    chosen = QuantScheme.preset(scheme)
    built = Decoder(EngineSpec(config, chosen, dtype, torch.device("cpu"), 64, ()))
    write_weights_(built.model, export_weights(load_model(config, dtype=dtype, seed=0), chosen, export_dtype=dtype))
    built.refresh_derived()
    return built


@pytest.mark.parametrize("scheme", ["none", "int8_w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=lambda c: c.model_type)
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
