"""Memory that is given away between generations: the same samples, whatever happened in between, and clear errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_models import CONFIGS

from lqrl.engines.base import EngineSpec
from lqrl.engines.cuda_memory import OutOfDeviceMemory
from lqrl.engines.releasable import ReleasableMemory, padded, releasable_memory
from lqrl.engines.slots import DecodeContext, SlotCache
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.backbone import AttentionShape, load_model
from lqrl.phases import PhaseClock
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, SamplingParams

PROMPTS = [Prompt(id=i, input_ids=tuple(range(1, 3 + 2 * i))) for i in range(5)]
PARAMS = SamplingParams(n=(3, 6, 1, 4, 5), max_tokens=14, temperature=0.9)
SHAPE = AttentionShape(kv_heads=2, key_width=16, value_width=16, scaling=0.25, sliding_window=None)


def engine(device: torch.device, scheme: str = "none", exact: bool = False, **options: Any) -> TorchEngine:
    spec = EngineSpec(CONFIGS["qwen3"], QuantScheme.parse(scheme), torch.float32, device, 64, (3, 4), exact=exact)
    settings: dict[str, Any] = {"max_num_seqs": 7} | options
    built = TorchEngineFactory(**settings)(spec)
    refresh(built, 0)
    return built


def refresh(built: TorchEngine, seed: int) -> None:
    policy = load_model(CONFIGS["qwen3"], dtype=torch.float32, seed=seed).eval()
    built.update_weights(export_weights(policy, built.spec.scheme, export_dtype=torch.float32), policy_version=seed)


def samples(built: TorchEngine, seed: int, prompts: Sequence[Prompt] = PROMPTS) -> list[Completion]:
    params = PARAMS if len(prompts) == len(PROMPTS) else SamplingParams(n=2, max_tokens=5)
    return [c for group in built.generate(prompts, params, seed=seed) for c in group]


def assert_same(a: list[Completion], b: list[Completion]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.token_ids, y.token_ids)
        assert torch.equal(x.logprobs, y.logprobs)


# ---------------------------------------------------------------- the memory


def test_tensors_outlive_a_release(device: torch.device) -> None:
    memory = releasable_memory(padded(300) + 2 * 12 * 4, device)
    small, large = memory.tensor((3, 100), torch.int8), memory.tensor((2, 12), torch.bfloat16)
    places = small.data_ptr(), large.data_ptr()
    assert memory.size >= 512 + 96
    assert (places[1] - places[0], large.shape, large.dtype, large.device.type) == (
        512, (2, 12), torch.bfloat16, device.type,
    )  # fmt: skip
    for value in (1, 2):
        small.fill_(value)
        large.fill_(-value)
        assert (int(small.sum()), float(large.sum())) == (300 * value, -24.0 * value)
        assert (memory.release(), memory.held, memory.release()) == (memory.size, False, 0)
        with pytest.raises(RuntimeError, match="released: restore it first"):
            memory.tensor((1,), torch.int8)
        assert (memory.restore(), memory.held, memory.restore()) == (memory.size, True, 0)
    if device.type == "cuda":
        assert (small.data_ptr(), large.data_ptr()) == places


def test_memory_has_an_end(device: torch.device) -> None:
    memory = releasable_memory(1024, device)
    with pytest.raises(RuntimeError, match=rf"tensor of {memory.size + 4} bytes does not fit"):
        memory.tensor((memory.size // 4 + 1,), torch.float32)
    memory.close()
    memory.close()
    for call in (memory.restore, lambda: memory.tensor((1,), torch.int8)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_device_whose_memory_cannot_be_released_is_named() -> None:
    with pytest.raises(NotImplementedError, match="memory of meta cannot be released; set the engine's sleep_level"):
        releasable_memory(512, torch.device("meta"))


# ---------------------------------------------------------------- the cache


def test_a_released_cache_refuses_every_use(device: torch.device) -> None:
    cache = SlotCache([SHAPE], torch.float32, device, releasable=True)
    cache.reserve(3, 8)
    positions, new = torch.zeros(3, dtype=torch.int64, device=device), torch.ones(1, 2, 3, 16, device=device)
    context = DecodeContext(cache, positions, 1, torch.float32)
    uses = {
        "write": lambda: cache.write(0, cache.rows(2, torch.arange(3, device=device), positions), new, new),
        "read": lambda: cache.read(0, 3, 1),
        "stored": lambda: cache.stored(0, 3, 1),
        "copy": lambda: cache.copy([0], [1], 1),
        "attend": lambda: context.attend(0, torch.ones(1, 4, 3, 16, device=device), new, new, 1.0, None),
    }
    for use in uses.values():
        use()
    cache.release()
    for use in uses.values():
        with pytest.raises(RuntimeError, match="cache is released"):
            use()
    cache.reserve(3, 8)
    assert not cache.read(0, 3, 8)[0].any()  # what comes back is empty
    for use in uses.values():
        use()


def test_a_cache_grows_shrinks_and_counts_its_bytes(device: torch.device) -> None:
    cache = SlotCache([SHAPE, SHAPE], torch.float32, device, releasable=True)
    assert (cache.token_bytes, cache.release(), cache.restore(), cache.bytes) == (2 * 2 * 2 * 16 * 4, 0, 0, 0)
    for slots, length, held in [(2, 8, 16), (3, 4, 16), (5, 8, 40)]:
        cache.release()
        assert cache.bytes == 0
        cache.reserve(slots, length)
        assert (cache.slots, cache.length, cache.bytes) == (slots, length, held * cache.token_bytes)
    cache.release()
    cache.reserve(2, 4, keep=True)
    assert (cache.slots, cache.length) == (5, 8)
    cache.free()
    assert (cache.slots, cache.bytes, cache.held) == (0, 0, True)


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
@pytest.mark.parametrize("scheme", ["none", "int8_w8a8", "none+kv_int8"])
def test_samples_do_not_know_of_a_release(scheme: str, exact: bool, device: torch.device) -> None:
    awake, sleepy = (engine(device, scheme, exact, sleep_level=level) for level in (0, 1))
    for seed in range(3):
        assert_same(samples(awake, seed), samples(sleepy, seed))
        sleepy.sleep()
        assert sleepy.cache_bytes == 0
        if seed == 1:  # a refresh of an engine that sleeps, as of one that is awake
            refresh(awake, 1)
            refresh(sleepy, 1)
            assert sleepy.cache_bytes == 0
        sleepy.wake()
        assert_same(samples(awake, seed, PROMPTS[:2]), samples(sleepy, seed, PROMPTS[:2]))
    assert awake.cache_bytes == sleepy.cache_bytes > 0


@pytest.mark.parametrize("level", [0, 1])
def test_an_engine_that_sleeps_says_so(level: int, device: torch.device) -> None:
    built = engine(device, sleep_level=level)
    samples(built, 0)
    held = built.cache_bytes
    for _ in range(2):
        built.sleep()
    assert built.cache_bytes == (held if level == 0 else 0)
    with pytest.raises(RuntimeError, match=r"asleep; call wake\(\)"):
        samples(built, 0)
    built.wake()
    samples(built, 0)
    assert built.cache_bytes == held


def test_a_step_on_a_released_cache_is_an_error(device: torch.device) -> None:
    built = engine(device, sleep_level=1)
    samples(built, 0)
    built.sleep()
    with pytest.raises(RuntimeError, match="cache is released"):
        built._stepper.run(1)


def test_an_engine_cannot_sleep_while_it_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine(torch.device("cpu"), sleep_level=1)
    decoder_logits = built.decoder.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        built.sleep()
        return decoder_logits(hidden)

    with monkeypatch.context() as patch:
        patch.setattr(built.decoder, "logits", logits)
        with pytest.raises(RuntimeError, match="generating and cannot sleep; wait"):
            samples(built, 0)
    built.sleep()  # the call that failed is over
    built.wake()
    assert_same(samples(built, 0), samples(engine(torch.device("cpu")), 0))


def test_giving_and_taking_is_a_phase_of_its_own() -> None:
    built = engine(torch.device("cpu"), sleep_level=1)
    samples(built, 0)
    with PhaseClock() as clock:
        samples(built, 1)
        assert clock.lap()["memory"] == 0
        built.sleep()
        given = clock.lap()["memory"]
        built.wake()
        samples(built, 1)
        assert min(given, clock.lap()["memory"]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sleep_level": 2}, "sleep_level must be 0 or 1, got 2"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\], got 1.5"),
        ({"gpu_memory_utilization": 0.5}, "share of a GPU, the engine is on cpu: set kv_cache_tokens"),
    ],
)
def test_options_out_of_range_name_the_fix(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(torch.device("cpu"), **options)


# ---------------------------------------------------------------- on a GPU


def free_memory() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def filled(size: int) -> ReleasableMemory:
    memory = releasable_memory(size, torch.device("cuda"))
    memory.tensor((size,), torch.uint8).fill_(1)
    return memory


@pytest.mark.gpu
def test_a_release_gives_the_memory_to_everybody(whole_card: None) -> None:
    memory = filled(3 * 2**30)
    before = free_memory()
    memory.release()
    assert free_memory() - before >= 0.95 * memory.size
    memory.restore()
    assert abs(free_memory() - before) < 2**24


@pytest.mark.gpu
def test_fifty_cycles_leave_nothing_behind(whole_card: None) -> None:
    filled(2**29).close()
    before = free_memory()
    for _ in range(25):
        memory = filled(2**29)
        memory.release()
        memory.restore()
        memory.close()
        del memory
        dropped = filled(2**29)  # and one that nobody closes
        del dropped
    assert free_memory() >= before - 2**21  # a cycle that leaked would take this much, the smallest piece


@pytest.mark.gpu
def test_graphs_survive_a_release_whose_memory_others_write() -> None:
    device = torch.device("cuda")
    awake, sleepy = (engine(device, exact=True, sleep_level=level) for level in (0, 1))
    assert_same(samples(awake, 0), samples(sleepy, 0))
    captured, geometry = sleepy._stepper.captured, sleepy._cache.geometry
    assert captured > 1
    for seed in range(1, 4):
        sleepy.sleep()
        noise = torch.full((2**26,), float("nan"), device=device)
        refresh(awake, seed)
        refresh(sleepy, seed)
        sleepy.wake()
        assert_same(samples(awake, seed), samples(sleepy, seed))
        del noise
    assert sleepy._stepper.captured == awake._stepper.captured >= captured
    assert sleepy._cache.geometry == geometry


@pytest.mark.gpu
def test_a_cache_that_does_not_fit_is_told_in_numbers_and_waits_for_room(whole_card: None) -> None:
    memory = filled(2**30)
    memory.release()
    free = free_memory()
    other = torch.empty(free - 2**29, dtype=torch.uint8, device="cuda")  # all but half of what the cache needs
    with pytest.raises(OutOfDeviceMemory, match=r"1\.00 GiB are asked for, 0\.\d+ of .*lower the engine's kv_cache"):
        memory.restore()
    assert not memory.held
    del other  # PyTorch keeps it, and nobody uses it
    assert memory.restore() == memory.size


@pytest.mark.gpu
def test_a_share_of_the_card_bounds_the_cache() -> None:
    device = torch.device("cuda")
    card = torch.cuda.get_device_properties(device).total_memory
    probe = engine(device)
    share = (probe.decoder.weight_bytes + 3.5 * (len(PROMPTS[-1].input_ids) + 14) * probe._cache.token_bytes) / card
    bounded = engine(device, gpu_memory_utilization=share)
    assert_same(samples(bounded, 0), samples(engine(device, max_num_seqs=3), 0))
    assert 0 < bounded.cache_bytes <= share * card - probe.decoder.weight_bytes
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=.*, less the weights, holds 0: raise it"):
        samples(engine(device, gpu_memory_utilization=1e-9), 0)
