"""Deep copies of engines and scorers compute with tensors of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from exact_sides import Sides, both, prompts

from lqrl.engines.base import EngineSpec
from lqrl.engines.decoder import Decoder
from lqrl.engines.layers import fuse_projections_
from lqrl.engines.torch import TorchEngine
from lqrl.engines.transaction import write_weights_
from lqrl.modeling.attention import PackedContext
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.testing.models import tiny_config
from lqrl.types import SamplingParams


def drawn(engine: TorchEngine) -> list[list[int]]:
    groups = engine.generate(prompts(3, 9, 60), SamplingParams(n=2, max_tokens=6), seed=1)
    return [completion.token_ids.tolist() for group in groups for completion in group]


def refreshed(engine: TorchEngine, sides: Sides) -> list[list[int]]:
    engine.update_weights(export_weights(sides.policy, sides.scheme, export_dtype=sides.dtype), policy_version=1)
    return drawn(engine)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("scheme", "exact"),
    [("none", False), ("int8_w8a8", False), ("fp8_per_channel", False), ("none+kv_fp8_static", True)],
)
def test_a_copied_engine_computes_with_the_weights_it_was_sent(scheme, exact, device):
    sides = both(tiny_config("qwen2"), scheme, exact=exact, device=device)
    other = copy.deepcopy(sides.engine)  # before steps are captured
    before = drawn(sides.engine)
    assert type(other.decoder.lean) is type(sides.engine.decoder.lean) is not type(None)
    assert drawn(other) == before
    with torch.no_grad():
        for parameter in sides.policy.parameters():  # norms too
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).to(device))
    after = refreshed(other, sides)
    assert drawn(sides.engine) == before != after
    assert refreshed(sides.engine, sides) == after


def test_a_copied_decoder_multiplies_layers_together_with_its_own_weights():
    """Parameters that are parts of one tensor come apart in a copy, and the product would read what nobody writes."""
    config, chosen = tiny_config("qwen2"), QuantScheme.preset("none")
    one = Decoder(EngineSpec(config, chosen, torch.float32, torch.device("cpu"), 64, ()))
    one._fused = fuse_projections_(one.model)  # as it is on CUDA
    sent = [
        dict(export_weights(load_model(config, dtype=torch.float32, seed=s), chosen, export_dtype=torch.float32))
        for s in range(2)
    ]

    def hidden(decoder: Decoder) -> torch.Tensor:
        with torch.no_grad():
            return decoder(torch.arange(7), torch.arange(7), PackedContext([7]))

    def written(decoder: Decoder, seed: int) -> torch.Tensor:
        write_weights_(decoder.model, iter(sent[seed].items()))
        decoder.refresh_derived()
        return hidden(decoder)

    first = written(one, 0)
    assert one._way is not None
    assert one._way.products
    other = copy.deepcopy(one)
    assert len(other._fused) == len(one._fused) > 0
    second = written(other, 1)
    assert torch.equal(hidden(one), first)
    assert torch.equal(written(one, 1), second)
    assert not torch.equal(first, second)


def test_a_copied_scorer_rounds_with_its_own_cache_scales():
    sides = both(tiny_config("llama"), "none+kv_fp8_static", exact=False)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    one, mask = sides.scorer(1.0), torch.ones_like(ids)
    other = copy.deepcopy(one)

    def calibrated(scorer: torch.nn.Module) -> None:
        for name, buffer in scorer.named_buffers():
            if name.endswith(("k_scale", "v_scale")):
                buffer.fill_(0.01)

    with torch.no_grad():
        before = one.score(ids, mask)
        calibrated(other)
        after = other.score(ids, mask)
        assert torch.equal(one.score(ids, mask), before)
        assert not torch.equal(before, after)
        calibrated(one)
        assert torch.equal(one.score(ids, mask), after)
