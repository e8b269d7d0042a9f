"""A refresh of a real vLLM is a transaction: complete, counted, there and back, or the engine refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("vllm")
from torch import Tensor
from vllm_models import LOW_BIT_DTYPE, build, policy_of, reused, shared, weights_of

from lqrl.engines.base import RefreshError, StaleEngineError
from lqrl.engines.vllm import VLLMEngine, reload
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, RefreshReport, SamplingParams

pytestmark = pytest.mark.vllm

Stream = list[tuple[str, Tensor]]
PROMPTS, PARAMS = [Prompt(1, (5, 6, 7)), Prompt(2, (9, 8))], SamplingParams(n=3, max_tokens=8)
NONE = QuantScheme.preset("none")
BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = [
    ("qwen3", "none", BF16),
    ("qwen3", "none", FP32),
    ("qwen2", "fp8_per_channel", BF16),
    ("llama", "fp8_per_tensor", BF16),
    ("llama", "int4_w4a16", BF16),
    ("qwen2", "int4_w4a16_g32+lm_head", BF16),
    ("qwen3", "int8_w8a8", BF16),
    ("qwen3", "int8_w8a8+lm_head", LOW_BIT_DTYPE),
    ("qwen2", "fp8_per_channel+kv_fp8_static", BF16),
]
GPU_FORMATS = [
    "int8_w8a16",
    "fp8_per_block",
    "nvfp4_w4a16",
    "mxfp4_w4a16",
    "int8_w8a8+kv_int8",
    "fp8_per_channel+kv_fp8",
]
FORMATS += [pytest.param("llama", preset, BF16, marks=pytest.mark.gpu) for preset in GPU_FORMATS]


def completions(engine: VLLMEngine) -> list[Completion]:
    return [c for group in engine.generate(PROMPTS, PARAMS, seed=7) for c in group]


def stream(seed: int = 0) -> Stream:
    return [(name, tensor.clone()) for name, tensor in weights_of("qwen3", NONE, torch.float32, seed)]


def addresses(engine: VLLMEngine) -> dict[str, int]:
    return engine._llm.collective_rpc(reload.addresses)[0]


@pytest.mark.parametrize(("family", "preset", "dtype"), FORMATS, ids=lambda v: str(v).removeprefix("torch."))
def test_there_and_back_is_the_same_engine(family: str, preset: str, dtype: torch.dtype) -> None:
    engine, scheme = build(family, preset, dtype), QuantScheme.preset(preset)
    reports: list[RefreshReport] = []
    said: list[list[Completion]] = []
    places = addresses(engine)
    for version, seed in enumerate((0, 1, 0, 0)):
        weights = weights_of(family, scheme, dtype, seed)
        reports.append(engine.update_weights(weights, policy_version=version))
        said.append(completions(engine))
        assert {c.policy_version for c in said[-1]} == {version} == {engine.policy_version}
    assert addresses(engine) == places
    engine.close()
    first, other, back, again = reports
    assert first.digest == back.digest == again.digest != other.digest
    sent = dict(weights_of(family, scheme, dtype))
    assert (first.tensors, first.elements) == (len(sent), sum(t.numel() for t in sent.values()))
    for a, b, c in zip(said[0], said[2], said[3], strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.logprobs, b.logprobs)
        assert torch.equal(a.logprobs, c.logprobs)
    assert not any(torch.equal(a.logprobs, b.logprobs) for a, b in zip(said[0], said[1], strict=True))
    assert other.elements_changed_fraction > 0.5
    assert (other.codes_changed_fraction > 0.9) == scheme.quantizes
    assert again.elements_changed_fraction == again.codes_changed_fraction == 0


@pytest.mark.parametrize("preset", ["none", "int8_w8a8"])
def test_a_refreshed_engine_samples_like_a_new_one(preset: str) -> None:
    scheme, dtype = QuantScheme.preset(preset), FP32 if preset == "none" else LOW_BIT_DTYPE
    engine, fresh = shared("qwen3", preset, dtype), build("qwen3", preset, dtype)
    for version, seed in enumerate((1, 2)):
        engine.update_weights(weights_of("qwen3", scheme, dtype, seed), policy_version=version)
    report = fresh.update_weights(weights_of("qwen3", scheme, dtype, 2), policy_version=0)
    assert engine.update_weights(weights_of("qwen3", scheme, dtype, 2), policy_version=2).digest == report.digest
    for a, b in zip(completions(engine), completions(fresh), strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.logprobs, b.logprobs)
    fresh.close()


def test_calibrated_cache_scales_are_used() -> None:
    preset = "fp8_per_channel+kv_fp8_static"
    engine = build("qwen2", preset, LOW_BIT_DTYPE)
    weights = dict(weights_of("qwen2", QuantScheme.preset(preset), LOW_BIT_DTYPE))
    first = engine.update_weights(weights.items(), policy_version=0)
    before = completions(engine)
    weights["model.layers.1.self_attn.v_scale"] = torch.tensor([0.5])
    assert engine.update_weights(weights.items(), policy_version=1).digest != first.digest
    after = completions(engine)
    assert not any(torch.equal(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True))
    engine.close()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.1.mlp.down_proj.weight", 3),  # a CPU kernel's own copy: seen by what the model says
        ("model.embed_tokens.weight", -1),  # a token that the digest does not try: seen in the tensors
        ("model.norm.weight", 3),
    ],
)
def test_one_element_changes_the_digest_and_is_counted(name: str, place: int) -> None:
    engine = shared("qwen2")
    weights = [(n, t.clone()) for n, t in weights_of("qwen2", NONE, torch.float32)]
    first = engine.update_weights(weights, policy_version=0)
    changed = [(n, t.clone()) for n, t in weights]
    dict(changed)[name].view(-1)[place] += 1
    report = engine.update_weights(changed, policy_version=1)
    assert report.digest != first.digest
    assert report.elements_changed_fraction == pytest.approx(1 / sum(t.numel() for _, t in weights))
    assert engine.update_weights(weights, policy_version=2).digest == first.digest


def test_changes_are_not_counted_where_nobody_asks() -> None:
    engine = build(count_changes=False)
    for version in (0, 1):
        report = engine.update_weights(stream(), policy_version=version)
        assert math.isnan(report.elements_changed_fraction)
        assert math.isnan(report.codes_changed_fraction)
    assert not engine._sent
    engine.close()


def test_no_prefix_of_the_old_weights_is_read() -> None:
    """With blocks of 32 tokens, a prompt of 70 fills two, which the second call finds again unless they are dropped."""
    engine, fresh = build(engine_args={"block_size": 32}), build(engine_args={"block_size": 32})
    prompt, params = Prompt(1, tuple(5 + i % 50 for i in range(70))), SamplingParams(n=2, max_tokens=4)
    engine.update_weights(stream(1), policy_version=0)
    engine.generate([prompt], params, seed=0)
    for each in (engine, fresh):
        each.update_weights(stream(0), policy_version=1)
    a, b = (each.generate([prompt], params, seed=0)[0] for each in (engine, fresh))
    assert all(torch.equal(x.logprobs, y.logprobs) for x, y in zip(a, b, strict=True))
    engine.close()
    fresh.close()


@pytest.mark.parametrize("count_changes", [True, False])
def test_a_buffer_that_the_sender_uses_again_is_no_fault(count_changes: bool) -> None:
    """VLLM keeps what it is sent until a layer is complete."""
    engine, weights = shared(count_changes=count_changes), stream()
    good = engine.update_weights(weights, policy_version=0).digest
    assert engine.update_weights(reused(weights), policy_version=1).digest == good


def test_a_refresh_in_inference_mode_can_be_followed_by_one_outside() -> None:
    engine = shared()
    good = engine.update_weights(stream(), policy_version=0).digest
    with torch.inference_mode():
        assert engine.update_weights(stream(1), policy_version=1).digest != good
    assert engine.update_weights(stream(), policy_version=2).digest == good


def with_value(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Stream], Stream]:
    return lambda weights: [(n, change(t.clone()) if n == name else t) for n, t in weights]


def broken(weights: Stream) -> Iterator[tuple[str, Tensor]]:
    yield from weights[:4]
    raise ConnectionError("the learner has gone")


NORM, MATRIX = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
FAULTS = {
    "missing": (lambda w: w[:-1], r"of \d+ elements came; missing: model.norm.weight"),
    "missing shard": (lambda w: [x for x in w if x[0] != MATRIX], f"missing: {MATRIX}"),
    "empty": (lambda w: [], r"0 of \d+ elements"),
    "unknown": (lambda w: [*w, ("model.extra", torch.zeros(1))], "no tensor named model.extra"),
    "tied": (lambda w: [*w, ("lm_head.weight", w[0][1])], "tied to model.embed_tokens.weight"),
    "doubled": (lambda w: [*w, w[0]], "model.embed_tokens.weight came twice"),
    "shape": (
        with_value(MATRIX, lambda t: t[:-1]),
        r"k_proj.weight has shape \(127, 256\), the engine's is \(128, 256\)",
    ),
    "dtype": (with_value(NORM, lambda t: t.bfloat16()), "model.norm.weight is torch.bfloat16"),
    "nan": (with_value(NORM, lambda t: t.index_fill_(0, torch.tensor([5]), torch.nan)), "model.norm.weight holds NaN"),
    "inf": (
        with_value(MATRIX, lambda t: t.index_fill_(0, torch.tensor([5]), -torch.inf)),
        f"{MATRIX} holds NaN or inf",
    ),
    "stream": (broken, "stream of weights failed after 4 tensors: the learner has gone"),
    "no data": (with_value(NORM, lambda t: t.to("meta")), "stream of weights failed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_refresh_makes_the_engine_refuse_until_a_good_one(fault: str) -> None:
    change, message = FAULTS[fault]
    engine, good = shared(), stream()
    digest = engine.update_weights(good, policy_version=0).digest
    said = completions(engine)
    with pytest.raises(RefreshError, match=message):
        engine.update_weights(change(stream(1)), policy_version=1)
    check_refusal(engine)
    assert engine.update_weights(good, policy_version=2).digest == digest
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(said, completions(engine), strict=True))


def check_refusal(engine: VLLMEngine) -> None:
    assert engine.policy_version == -1
    with pytest.raises(StaleEngineError, match="its last refresh"):
        engine.generate(PROMPTS, PARAMS, seed=0)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_a_reload_that_vllm_breaks_off_leaves_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException
) -> None:
    """Buffered shards of a broken reload would be counted in the next one."""
    engine = shared()
    digest = engine.update_weights(stream(), policy_version=0).digest
    model = engine._llm.collective_rpc("get_model")[0]
    load = type(model).load_weights

    def break_off(self: torch.nn.Module, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        def some() -> Iterator[tuple[str, Tensor]]:
            for i, item in enumerate(weights):
                if i == at:
                    raise error
                yield item

        return load(self, some())

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "load_weights", break_off)
        with pytest.raises((RefreshError, KeyboardInterrupt)):
            engine.update_weights(stream(1), policy_version=1)
    check_refusal(engine)
    assert engine.update_weights(stream(), policy_version=2).digest == digest


def test_an_engine_whose_reload_cannot_be_ended_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    model = engine._llm.collective_rpc("get_model")[0]

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "load_weights", fail)
        patch.setattr("vllm.model_executor.model_loader.reload.finalize_layerwise_reload", fail)
        with pytest.raises(RefreshError, match="failed while it loaded the weights: out of memory"):
            engine.update_weights(stream(), policy_version=0)
    with pytest.raises(RefreshError, match=r"could not end it.*build a new engine"):
        engine.update_weights(stream(), policy_version=0)
    check_refusal(engine)
    engine.close()


def test_a_tensor_that_vllm_passes_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = shared()
    model = engine._llm.collective_rpc("get_model")[0]
    load = type(model).load_weights

    def pass_over(self: torch.nn.Module, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        return load(self, ((name, t) for name, t in weights if "layers.1.mlp.down_proj" not in name))

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "load_weights", pass_over)
        with pytest.raises(RefreshError, match=r"did not load model\.layers\.1\.mlp\.down_proj\.weight"):
            engine.update_weights(stream(), policy_version=1)
    check_refusal(engine)


def test_prefixes_that_vllm_keeps_fail_the_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = shared()
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(RefreshError, match="kept prefixes of the old weights"):
            engine.update_weights(stream(), policy_version=1)
    check_refusal(engine)


def test_weights_that_compute_nan_fail_the_refresh() -> None:
    """Each is finite; their product overflows."""
    engine, weights = shared(), stream()
    huge = [(n, t.fill_(3e38) if "layers.0.mlp" in n else t) for n, t in weights]
    with pytest.raises(RefreshError, match="gives NaN or inf log-probs"):
        engine.update_weights(huge, policy_version=1)
    check_refusal(engine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"policy_version": -2}, "policy_version must be >= 0"), ({"frozen": {NORM: 3}}, "declare none frozen")],
)
def test_what_a_refresh_cannot_mean_is_refused(arguments: dict, message: str) -> None:
    engine = shared()
    with pytest.raises(RefreshError, match=message):
        engine.update_weights(stream(), **({"policy_version": 1} | arguments))
    check_refusal(engine)


def test_an_engine_asleep_or_closed_takes_no_weights() -> None:
    engine = build()
    engine.sleep()
    with pytest.raises(RefreshError, match="asleep"):
        engine.update_weights(stream(), policy_version=0)
    engine.wake()
    assert engine.update_weights(stream(), policy_version=0).policy_version == 0
    engine.close()
    with pytest.raises(RefreshError, match="closed"):
        engine.update_weights(stream(), policy_version=1)


def test_a_learner_that_was_not_exported_for_the_engine_is_refused() -> None:
    engine = shared("qwen3", "int8_w8a8", LOW_BIT_DTYPE)
    weights = export_weights(policy_of("qwen3"), NONE, export_dtype=LOW_BIT_DTYPE)
    with pytest.raises(RefreshError, match=rf"q_proj\.weight is {LOW_BIT_DTYPE}, the engine's is torch\.int8"):
        engine.update_weights(weights, policy_version=0)
