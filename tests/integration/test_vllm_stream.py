"""A refresh that a real vLLM takes as it comes: the same engine, with one layer of what is sent in memory at once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from weakref import finalize

import pytest
import torch

pytest.importorskip("vllm")
from torch import Tensor
from vllm_models import build, reused, shared, weights_of

from lqrl.engines.base import RefreshError, StaleEngineError
from lqrl.engines.vllm import VLLMEngine, coverage
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.stream import StableTensors
from lqrl.types import Prompt, SamplingParams

pytestmark = pytest.mark.vllm

FORMATS = [
    ("qwen2", "none", torch.bfloat16),
    ("qwen3", "none", torch.bfloat16),  # tied: on a CPU the embedding is kept for the head
    ("qwen2", "fp8_per_channel", torch.bfloat16),
    ("llama", "int4_w4a16", torch.bfloat16),
    ("qwen2", "int8_w8a8", torch.bfloat16),
]
NONE = QuantScheme.preset("none")


class Meter:
    """Bytes of a stream's tensors that are alive, at most; each is made when it is asked for."""

    def __init__(self) -> None:
        self.alive = self.most = self.total = 0

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            fresh = tensor.clone()
            self._count(fresh.nbytes)
            finalize(fresh.untyped_storage(), self._count, -fresh.nbytes)
            yield name, fresh
            del tensor, fresh

    def _count(self, nbytes: int) -> None:
        self.alive += nbytes
        self.most = max(self.most, self.alive)
        self.total += max(nbytes, 0)


def streaming(family: str = "qwen2", preset: str = "none", dtype: torch.dtype = torch.float32) -> VLLMEngine:
    return build(family, preset, dtype, stream_refresh=True, count_changes=False)


def largest_layer(weights: Iterable[tuple[str, Tensor]]) -> int:
    """Bytes of the largest set that vLLM loads together: what it fuses, or a matrix alone."""
    sizes: dict[str, int] = {}
    for name, tensor in weights:
        module = name.rpartition(".")[0]
        for part in ("q_proj", "k_proj", "v_proj"):
            module = module.replace(part, "qkv")
        for part in ("gate_proj", "up_proj"):
            module = module.replace(part, "gate_up")
        sizes[module] = sizes.get(module, 0) + tensor.nbytes
    return max(sizes.values())


@pytest.mark.parametrize(("family", "preset", "dtype"), FORMATS, ids=lambda v: str(v).removeprefix("torch."))
def test_one_layer_is_in_memory_at_once(
    monkeypatch: pytest.MonkeyPatch, family: str, preset: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(coverage, "_LOOK_BYTES", 2**12)  # tensors of this model are small enough to wait for each other
    scheme = QuantScheme.preset(preset)
    engine, whole = streaming(family, preset, dtype), build(family, preset, dtype)
    for version, seed in enumerate((1, 0)):
        meter, weights = Meter(), list(weights_of(family, scheme, dtype, seed))
        gc.disable()  # what waits for the collector is alive
        try:
            report = engine.update_weights(StableTensors(meter.watch(weights)), policy_version=version)
        finally:
            gc.enable()
        expected = whole.update_weights(weights, policy_version=version)
    assert (report.digest, report.tensors, report.elements) == (expected.digest, expected.tensors, expected.elements)
    params = SamplingParams(n=4, max_tokens=8)
    for a, b in zip(
        *(each.generate([Prompt(1, (5, 6, 7))], params, seed=7)[0] for each in (engine, whole)), strict=True
    ):
        assert torch.equal(a.logprobs, b.logprobs)
    engine.close()
    whole.close()
    kept = weights[0][1].nbytes if family == "qwen3" else 0
    # vLLM's layer, and the tensor that is on its way
    assert meter.most <= largest_layer(weights) + max(t.nbytes for _, t in weights) + kept + 2**12
    assert meter.total == sum(t.nbytes for _, t in weights) > 3 * meter.most


def test_without_streaming_all_is_there_first() -> None:
    meter, engine = Meter(), shared("qwen2", count_changes=False)
    engine.update_weights(StableTensors(meter.watch(weights_of("qwen2", NONE, torch.float32))), policy_version=0)
    assert meter.most == meter.total


Stream = list[tuple[str, Tensor]]
NORM, MATRIX = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
FAULTS: dict[str, tuple[Callable[[Stream], Stream], str]] = {
    "missing": (lambda w: [x for x in w if x[0] != MATRIX], f"missing: {MATRIX}"),
    "empty": (lambda w: [], r"0 of \d+ elements"),
    "unknown": (lambda w: [*w, ("model.extra", torch.zeros(1))], "no tensor named model.extra"),
    "doubled": (lambda w: [*w, w[0]], "model.embed_tokens.weight came twice"),
    "shape": (lambda w: [(n, t[:-1] if n == MATRIX else t) for n, t in w], "k_proj.weight has shape"),
    "nan": (lambda w: [(n, t * torch.nan if n == NORM else t) for n, t in w], "model.norm.weight holds NaN"),
}


def test_a_faulty_stream_makes_the_engine_refuse_until_a_good_one() -> None:
    engine, good = streaming(), list(weights_of("qwen2", NONE, torch.float32))
    digest = engine.update_weights(good, policy_version=0).digest
    for change, message in FAULTS.values():
        with pytest.raises(RefreshError, match=message):
            engine.update_weights(change(list(weights_of("qwen2", NONE, torch.float32, 1))), policy_version=1)
        assert engine.policy_version == -1
        with pytest.raises(StaleEngineError, match="its last refresh"):
            engine.generate([Prompt(1, (5,))], SamplingParams(), seed=0)
        assert engine.update_weights(good, policy_version=2).digest == digest
    engine.close()


def test_a_buffer_that_the_sender_uses_again_is_no_fault() -> None:
    engine, weights = streaming(), list(weights_of("qwen2", NONE, torch.float32))
    good = engine.update_weights(weights, policy_version=0).digest
    assert engine.update_weights(reused(weights), policy_version=1).digest == good
    engine.close()
