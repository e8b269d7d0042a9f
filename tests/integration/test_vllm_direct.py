"""Refreshes that copy into a real vLLM's memory give what its reload gives, or are not made.

On a CPU most of vLLM's kernels pack their weights. With oneDNN switched off, those of unquantized and fp8 layers
compute with what the model holds.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm")
from test_vllm_refresh import FAULTS, Stream, broken, check_refusal, completions
from torch import Tensor
from vllm_models import DEVICE, build, policy_of, weights_of

from lqrl.engines.base import RefreshError
from lqrl.engines.vllm import VLLMEngine, reload
from lqrl.engines.vllm.direct_refresh import DirectRefresh
from lqrl.engines.vllm.layout import Part, SentTensors
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme

pytestmark = pytest.mark.vllm

BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = [
    ("qwen3", "none", FP32),  # tied
    ("qwen2", "none", BF16),  # with biases
    ("qwen2", "fp8_per_channel", BF16),  # transposed
    ("llama", "fp8_per_tensor", BF16),  # one scale in every channel
    ("qwen2", "fp8_per_channel+lm_head", BF16),
    ("qwen3", "fp8_per_channel+kv_fp8_static", BF16),  # numbers beside tensors
]
FORMATS += [pytest.param("qwen2", "int8_w8a8", BF16, marks=pytest.mark.gpu)]
NONE = QuantScheme.preset("none")


@pytest.fixture(scope="module", autouse=True)
def unpacked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr("vllm._custom_ops._supports_onednn", False)
        yield


def stream_of(family: str, preset: str, dtype: torch.dtype, seed: int) -> Stream:
    return [(n, t.clone()) for n, t in weights_of(family, QuantScheme.preset(preset), dtype, seed)]


def is_direct(engine: VLLMEngine) -> bool:
    return engine._direct is not None and engine._direct.copies is not None


def made_ready(engine: VLLMEngine) -> VLLMEngine:
    """With two reloads at most, which leave the weights of seed 1, the next refresh is direct."""
    for version, seed in enumerate((0, 1)):
        if not is_direct(engine):
            engine.update_weights(stream_of("qwen3", "none", FP32, seed), policy_version=version)
    assert is_direct(engine)
    return engine


@pytest.fixture(scope="module")
def one() -> Iterator[VLLMEngine]:
    engine = build("qwen3", direct_refresh=True)
    yield engine
    engine.close()


def forbidden(*_: object) -> None:
    raise AssertionError("a reload")


@pytest.mark.parametrize(("family", "preset", "dtype"), FORMATS, ids=lambda v: str(v).removeprefix("torch."))
def test_direct_copies_are_what_a_reload_gives(
    monkeypatch: pytest.MonkeyPatch, family: str, preset: str, dtype: torch.dtype
) -> None:
    weights = [stream_of(family, preset, dtype, seed) for seed in (0, 1, 2)]
    direct, reloaded = (build(family, preset, dtype, direct_refresh=direct) for direct in (True, False))
    streamed = build(family, preset, dtype, direct_refresh=True, stream_refresh=True, count_changes=False)
    digests = set()
    for version, seed in enumerate((0, 1, 0, 2, 2)):
        expected = reloaded.update_weights(weights[seed], policy_version=version)
        said = completions(reloaded)
        for engine in (direct, streamed):
            assert is_direct(engine) == (version >= 2)
            with monkeypatch.context() as patch:
                if version >= 2:
                    patch.setattr(reload, "reload_weights", forbidden)
                report = engine.update_weights(weights[seed], policy_version=version)
            assert (report.digest, report.tensors) == (expected.digest, expected.tensors)
            assert report.elements == expected.elements
            for share in ("elements_changed_fraction", "codes_changed_fraction"):
                if engine is direct:
                    assert getattr(report, share) == pytest.approx(getattr(expected, share), rel=1e-9)
                else:
                    assert math.isnan(getattr(report, share))
            for a, b in zip(completions(engine), said, strict=True):
                assert torch.equal(a.token_ids, b.token_ids)
                assert torch.equal(a.logprobs, b.logprobs)
        digests.add(expected.digest)
    assert len(digests) == 3
    for engine in (direct, streamed, reloaded):
        engine.close()


ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="what the CPU kernels pack")
LOST = "no tensor of its model holds model.layers.0.self_attn.q_proj."
PACKED = [
    pytest.param("none", f"{LOST}weight as it was sent", marks=ON_CPU),
    pytest.param("int8_w8a8", f"{LOST}weight as it was sent", marks=ON_CPU),
    pytest.param("fp8_per_channel", "model.embed_tokens.cpu_linear.0.handler_tensor is more than a copy", marks=ON_CPU),
    pytest.param("int4_w4a16", f"{LOST}weight_packed as it was sent"),
]


@pytest.mark.parametrize(("preset", "reason"), PACKED, ids=["none", "int8", "fp8", "int4"])
def test_packed_weights_are_reloaded_and_the_log_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, preset: str, reason: str
) -> None:
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", DEVICE.type == "cpu", raising=False)
    engine, plain = build("llama", preset, BF16, direct_refresh=True), build("llama", preset, BF16)
    caplog.set_level(logging.INFO, "lqrl")
    for version, seed in enumerate((0, 1, 0, 1)):
        digests = {
            each.update_weights(stream_of("llama", preset, BF16, seed), policy_version=version).digest
            for each in (engine, plain)
        }
        assert len(digests) == 1
        assert not is_direct(engine)
    told = [record.getMessage() for record in caplog.records if "reloads all weights" in record.getMessage()]
    assert len(told) == 1
    assert reason in told[0]
    engine.close()
    plain.close()


@pytest.mark.parametrize("swap", [("k_proj.weight", "v_proj.weight"), ("q_norm.weight", "k_norm.weight")])
def test_a_wrong_map_is_noticed(monkeypatch: pytest.MonkeyPatch, swap: tuple[str, str]) -> None:
    """Two tensors of one shape change places in what is found."""
    found = SentTensors.parts_of
    first, second = (f"model.layers.1.self_attn.{name}" for name in swap)
    other = {first: second, second: first}

    def mistaken(self: SentTensors, name: str, tensor: Tensor) -> list[Part]:
        return [part._replace(name=other.get(part.name, part.name)) for part in found(self, name, tensor)]

    monkeypatch.setattr(SentTensors, "parts_of", mistaken)
    engine, plain = build("qwen3", direct_refresh=True), build("qwen3")
    for version, seed in enumerate((0, 1, 0)):
        weights = stream_of("qwen3", "none", FP32, seed)
        digests = {each.update_weights(weights, policy_version=version).digest for each in (engine, plain)}
        assert len(digests) == 1
    assert engine._direct is not None
    assert not is_direct(engine)
    assert "layers.1.self_attn" in str(engine._direct.refusal)
    engine.close()
    plain.close()


def test_what_real_weights_alone_show_to_be_more_than_a_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that cuts off large values, which trial weights do not have."""
    engine = build("qwen2", "none", BF16, direct_refresh=True)
    load = type(engine._llm.collective_rpc("get_model")[0]).load_weights

    def cutting(self: torch.nn.Module, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        return load(self, ((n, t.clamp(max=0.3) if n.endswith("o_proj.weight") else t) for n, t in weights))

    monkeypatch.setattr(type(engine._llm.collective_rpc("get_model")[0]), "load_weights", cutting)
    digests = [
        engine.update_weights(stream_of("qwen2", "none", BF16, seed), policy_version=version).digest
        for version, seed in enumerate((0, 1, 0))
    ]
    assert digests[0] == digests[2] != digests[1]
    assert engine._direct is not None
    assert "o_proj.weight is more than a copy" in str(engine._direct.refusal)
    engine.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_direct_refresh_makes_the_engine_refuse_until_a_good_one(one: VLLMEngine, fault: str) -> None:
    change, message = FAULTS[fault]
    message = "could not be copied into vLLM's memory" if fault == "no data" else message
    engine, good = made_ready(one), stream_of("qwen3", "none", FP32, 0)
    digest = engine.update_weights(good, policy_version=2).digest
    said = completions(engine)
    with pytest.raises(RefreshError, match=message):
        engine.update_weights(change(stream_of("qwen3", "none", FP32, 1)), policy_version=3)
    check_refusal(engine)
    for version in (4, 5, 6):  # a reload, one that learns again, a direct one
        assert engine.update_weights(good, policy_version=version).digest == digest
        assert is_direct(engine) == (version > 4)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(said, completions(engine), strict=True))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_write_that_breaks_off_makes_the_engine_refuse(
    one: VLLMEngine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine, good = made_ready(one), stream_of("qwen3", "none", FP32, 0)
    digest = engine.update_weights(good, policy_version=2).digest
    stream = engine.served.checkpoint_stream

    def some(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for i, item in enumerate(stream(weights)):
            if i == 7:
                raise error
            yield item

    with monkeypatch.context() as patch:
        patch.setattr(engine.served, "checkpoint_stream", some)
        with pytest.raises((RefreshError, KeyboardInterrupt)):
            engine.update_weights(stream_of("qwen3", "none", FP32, 1), policy_version=3)
    check_refusal(engine)
    assert engine.update_weights(good, policy_version=4).digest == digest


@pytest.mark.parametrize("at", [1, 2])
def test_learning_that_breaks_off_leaves_the_engine_to_reload(
    one: VLLMEngine, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """In one of the reloads of trial weights."""
    engine, good = made_ready(one), stream_of("qwen3", "none", FP32, 0)
    digest = engine.update_weights(good, policy_version=2).digest
    engine._direct = DirectRefresh(engine.served.tensors, DEVICE)
    load, calls = reload.reload_weights, itertools.count(1)

    def interrupted(worker: object, weights: Iterator[tuple[str, Tensor]]) -> list[str]:
        if next(calls) == at:
            raise KeyboardInterrupt
        return load(worker, weights)

    with monkeypatch.context() as patch:
        patch.setattr(reload, "reload_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(good, policy_version=3)
    check_refusal(engine)
    assert engine.update_weights(good, policy_version=4).digest == digest


def test_prefixes_that_vllm_keeps_fail_a_direct_refresh(one: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made_ready(one)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(RefreshError, match="kept prefixes of the old weights"):
            engine.update_weights(stream_of("qwen3", "none", FP32, 0), policy_version=3)
    check_refusal(engine)


def test_weights_that_moved_are_learned_again(one: VLLMEngine) -> None:
    engine, good = made_ready(one), stream_of("qwen3", "none", FP32, 0)
    digest = engine.update_weights(good, policy_version=2).digest
    assert engine._direct is not None
    before = engine._direct.copies
    weight = engine._llm.collective_rpc("get_model")[0].get_parameter("model.layers.1.mlp.down_proj.weight")
    weight.data = weight.data.clone()
    for version in (3, 4):
        assert engine.update_weights(good, policy_version=version).digest == digest
    assert engine._direct.copies not in (None, before)


def test_an_engine_that_gave_up_its_weights_reloads(one: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies would leave what is no part of what is sent, as paddings are."""
    engine, good = made_ready(one), stream_of("qwen3", "none", FP32, 0)
    digest = engine.update_weights(good, policy_version=2).digest
    with monkeypatch.context() as patch:
        patch.setattr(engine, "options", replace(engine.options, sleep_level=2))
        patch.setattr(engine._llm, "sleep", lambda level: None)
        patch.setattr(engine._llm, "wake_up", lambda: None)
        engine.sleep()
        engine.wake()
    assert engine.update_weights(good, policy_version=3).digest == digest
    assert not is_direct(engine)


def test_a_refresh_in_inference_mode_can_be_followed_by_one_outside(one: VLLMEngine) -> None:
    engine = made_ready(one)
    for version, (seed, inference) in enumerate(((2, True), (0, False), (1, True), (0, False))):
        with torch.inference_mode(inference):
            weights = export_weights(policy_of("qwen3", seed), NONE, export_dtype=FP32)
            report = engine.update_weights(weights, policy_version=version)
        assert is_direct(engine)
        assert report.elements_changed_fraction > 0.5


def test_a_streamed_fault_is_noticed_too() -> None:
    engine = made_ready(build("qwen3", direct_refresh=True, stream_refresh=True, count_changes=False))
    with pytest.raises(RefreshError, match="failed after 4 tensors"):
        engine.update_weights(broken(stream_of("qwen3", "none", FP32, 0)), policy_version=3)
    check_refusal(engine)
    engine.close()
