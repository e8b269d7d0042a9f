"""An engine that was interrupted anywhere in giving memory away or taking it back: the next call finds all in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import CONFIGS
from interrupts import each_line

from lqrl.engines.base import EngineSpec
from lqrl.engines.releasable import HostMemory, ReleasableMemory
from lqrl.engines.slots import SlotCache
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.backbone import AttentionShape, load_model
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, SamplingParams

PROMPTS = [Prompt(id=i, input_ids=tuple(range(5, 8 + 4 * i))) for i in range(3)]
PARAMS = SamplingParams(n=2, max_tokens=6)
SHAPE = AttentionShape(kv_heads=2, key_width=16, value_width=16, scaling=0.25, sliding_window=None)
FUNCTIONS = {
    *(function.__code__ for function in (ReleasableMemory.release, ReleasableMemory.restore, ReleasableMemory.close)),
    *(function.__code__ for function in (HostMemory._release, HostMemory._restore)),
    *(function.__code__ for function in (SlotCache.reserve, SlotCache.release, SlotCache.restore, SlotCache.clear)),
    *(function.__code__ for function in (SlotCache.free, SlotCache._allocate)),
    *(function.__code__ for function in (TorchEngine.sleep, TorchEngine.wake)),
}


def engine(**options: Any) -> TorchEngine:
    scheme = QuantScheme.parse("none+kv_int8")
    spec = EngineSpec(CONFIGS["qwen3"], scheme, torch.float32, torch.device("cpu"), 64, (3, 4))
    built = TorchEngineFactory(max_num_seqs=3, **options)(spec)
    refresh(built, 0)
    return built


def refresh(built: TorchEngine, seed: int) -> None:
    policy = load_model(CONFIGS["qwen3"], dtype=torch.float32, seed=seed).eval()
    built.update_weights(export_weights(policy, built.spec.scheme, export_dtype=torch.float32), policy_version=seed)


def samples(built: TorchEngine) -> list[Completion]:
    return [c for group in built.generate(PROMPTS, PARAMS, seed=1) for c in group]


def assert_same(a: list[Completion], b: list[Completion]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.token_ids, y.token_ids)
        assert torch.equal(x.logprobs, y.logprobs)


@pytest.mark.parametrize("then", [samples, lambda built: refresh(built, 0)], ids=["generate", "refresh"])
def test_an_engine_interrupted_between_two_generations(
    then: Callable[[TorchEngine], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = samples(engine())
    built = engine(sleep_level=1)
    samples(built)

    def night() -> None:
        built.sleep()
        built.wake()
        samples(built)

    monkeypatch.setattr(HostMemory, "_restore", _restored_full_of_nan)
    lines = 0
    for lines in each_line(FUNCTIONS, lambda: night):  # noqa: B007
        built.wake()
        then(built)
        assert_same(samples(built), good)
    assert lines > 30


def _restored_full_of_nan(memory: HostMemory) -> None:
    """Memory that comes back holds anything; every byte 255 is NaN in fp32, and in no format a key."""
    memory._storage.resize_(memory.size)
    memory._storage.fill_(255)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("before", [(2, 8), (16, 10)], ids=["less", "more"])
def test_a_cache_interrupted_while_it_makes_room(before: tuple[int, int], keep: bool) -> None:
    def growing() -> Callable[[], object]:
        nonlocal cache
        cache = SlotCache([SHAPE], torch.float32, torch.device("cpu"), releasable=True)
        cache.reserve(*before, keep=keep)
        return lambda: cache.reserve(4, 16, keep=keep)

    cache = SlotCache([SHAPE], torch.float32, torch.device("cpu"))
    for _ in each_line(FUNCTIONS, growing):
        cache.reserve(3, 10, keep=keep)
        keys, values = cache.read(0, 3, 10)
        assert keys.shape == values.shape == (3, 2, 10, 16)
        rows = cache.rows(2, torch.tensor([2]), torch.tensor([9]))
        cache.write(0, rows, torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16))
        assert float(cache.read(0, 3, 10)[0][2, :, 9].sum()) == 32
        assert float(cache.read(0, 3, 10)[0].sum()) == 32


@pytest.mark.parametrize("wish", ["take weights", "draw other samples", "sleep"])
def test_one_call_at_a_time(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine()
    good, logits = samples(built), built.decoder.logits
    actions = {"take weights": lambda: refresh(built, 7), "draw other samples": lambda: samples(built)}

    def interfering(hidden: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError, match=f"engine is generating and cannot {wish}; wait until generate"):
            actions.get(wish, built.sleep)()
        return logits(hidden)

    with monkeypatch.context() as patch:
        patch.setattr(built.decoder, "logits", interfering)
        during = samples(built)
    assert {c.policy_version for c in during} == {0}
    assert_same(during, good)
    refresh(built, 7)
    assert {c.policy_version for c in samples(built)} == {7}
