"""Adapters beside a real vLLM's weights: the learner's function, sent alone once the base is there."""

from __future__ import annotations

import copy
import math

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("peft")
from torch import Tensor
from transformers import PreTrainedModel
from vllm_models import DEVICE, EOS, build, config_of, policy_of

from lqrl.engines.base import EngineSpec, RefreshError, StaleEngineError
from lqrl.engines.torch import TorchEngineFactory
from lqrl.engines.vllm import VLLMEngine, VLLMEngineFactory
from lqrl.engines.vllm.patches import PATCHES
from lqrl.learner.frozen import note_frozen
from lqrl.learner.noise import RolloutNoise
from lqrl.learner.scorer import Scorer
from lqrl.quant.adapters import adapter_layers, add_adapters_
from lqrl.quant.export import export_weights
from lqrl.quant.lora import Lora
from lqrl.quant.prepare import prepare_
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.stream import StableTensors
from lqrl.types import Completion, Prompt, SamplingParams

pytestmark = pytest.mark.vllm

LORA = Lora(r=4, alpha=6.0, train_norms=True)
PROMPTS = [Prompt(id=10 * i + 3, input_ids=tuple(range(4, 6 + 3 * i))) for i in range(4)]
PARAMS = SamplingParams(n=2, max_tokens=9, ignore_eos=True)
IN_FP32 = pytest.mark.skipif(DEVICE.type != "cpu", reason="vLLM's adapters have no fp32 on a GPU")
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="what the CPU build lacks")
DTYPE, SPREAD, NEAR = (torch.float32, 0.15, 1e-3) if DEVICE.type == "cpu" else (torch.bfloat16, 0.05, 0.1)
FORMATS = [
    pytest.param("qwen2", "none", torch.float32, marks=IN_FP32),
    ("qwen3", "none", torch.bfloat16),
    ("qwen2", "fp8_per_channel", DTYPE),
    ("llama", "int4_w4a16", torch.bfloat16),
    pytest.param("qwen2", "nvfp4_w4a16", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("qwen2", "int8_w8a8", torch.bfloat16, marks=pytest.mark.gpu),
]


@torch.no_grad()
def turned(learner: PreTrainedModel, seed: int, spread: float = SPREAD) -> PreTrainedModel:
    """Other adapters and norms, as large as the weights: without them it is another policy."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapter_layers(learner).values():
        for factor in (layer.lora_A, layer.lora_B):
            factor.weight.copy_(spread * torch.randn(factor.weight.shape, generator=generator))
    for name, parameter in learner.named_parameters():
        if parameter.requires_grad and name.endswith("norm.weight"):
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return learner


def learner_of(
    family: str, preset: str, dtype: torch.dtype, lora: Lora = LORA, spread: float = SPREAD
) -> PreTrainedModel:
    learner = copy.deepcopy(policy_of(family, spread=spread))
    prepare_(learner, QuantScheme.preset(preset), export_dtype=dtype)
    add_adapters_(learner, lora, export_dtype=dtype, seed=0)
    return turned(learner, 1, spread)


def sent(
    learner: PreTrainedModel, preset: str, dtype: torch.dtype, skip: dict[str, int] | None = None
) -> StableTensors:
    scheme = QuantScheme.preset(preset)
    return export_weights(learner, scheme, export_dtype=dtype, adapters=True, skip=skip or {})


def send_base(engine: VLLMEngine, learner: PreTrainedModel, preset: str, dtype: torch.dtype) -> dict[str, int]:
    """Version 0, whole; what need not be sent again."""
    frozen: dict[str, int] = {}
    engine.update_weights(note_frozen(sent(learner, preset, dtype), learner, frozen), policy_version=0)
    return frozen


def said(engine: VLLMEngine) -> list[Completion]:
    return [c for group in engine.generate(PROMPTS, PARAMS, seed=7) for c in group]


def gaps(completions: list[Completion], learner: PreTrainedModel, dtype: torch.dtype) -> Tensor:
    """Differences of the engine's log-probs from the learner's."""
    prompts, found = {p.id: p for p in PROMPTS}, []
    for c in completions:
        prompt = prompts[c.prompt_id].input_ids
        ids = torch.tensor([[*prompt, *c.token_ids.tolist()]])
        with torch.no_grad():
            scores = Scorer(learner, 1.0, dtype).score(ids, torch.ones_like(ids, dtype=torch.bool))
        found.append((c.logprobs - scores[0, len(prompt) :]).abs())
    return torch.cat(found)


@pytest.mark.parametrize(("family", "preset", "dtype"), FORMATS, ids=lambda v: str(v).removeprefix("torch."))
def test_adapters_alone_make_the_learners_function(family: str, preset: str, dtype: torch.dtype) -> None:
    spread = 0.15 if dtype == torch.float32 else 0.05
    engine, learner = build(family, preset, dtype, spread, LORA), learner_of(family, preset, dtype, spread=spread)
    frozen = send_base(engine, learner, preset, dtype)
    first = said(engine)
    report = engine.update_weights(
        sent(turned(learner, 2, spread), preset, dtype, frozen), policy_version=1, frozen=frozen
    )
    second = said(engine)
    engine.close()
    assert {c.policy_version for c in second} == {1}
    now, before = gaps(second, learner, dtype), gaps(first, turned(learner, 1, spread), dtype)
    bound, times = 1e-4 if preset == "none" and dtype == torch.float32 else 0.01, 10
    if QuantScheme.preset(preset).activation is not None and dtype == torch.bfloat16:
        bound, times = 0.1, 5  # what is rounded otherwise has another code in the next layer
    assert max(now.median(), before.median()) < bound
    # The other adapters are another policy altogether.
    assert gaps(second, learner, dtype).mean() > times * now.mean()
    turned(learner, 2, spread)
    sizes = {name: t.numel() for name, t in sent(learner, preset, dtype)}
    assert report.frozen_elements == sum(sizes[name] for name in frozen) > report.elements
    assert report.frozen_elements + report.elements == sum(sizes.values())
    assert report.tensors + len(frozen) == len(sizes)
    assert 0 < report.elements_changed_fraction < 1
    assert report.codes_changed_fraction == 0


@IN_FP32
def test_the_embedded_engine_says_the_same() -> None:
    """In bf16 the likeliest token is another one now and then."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    engine, learner = build("qwen2", lora=LORA), learner_of("qwen2", "none", torch.float32)
    spec = EngineSpec(config_of("qwen2"), QuantScheme.preset("none"), torch.float32, DEVICE, 128, EOS, LORA)
    embedded = TorchEngineFactory()(spec)
    for each in (engine, embedded):
        each.update_weights(sent(learner, "none", torch.float32), policy_version=0)
    for ours, theirs in zip(*(each.generate(PROMPTS, params, seed=0) for each in (engine, embedded)), strict=True):
        assert torch.equal(ours[0].token_ids, theirs[0].token_ids)
        torch.testing.assert_close(ours[0].logprobs, theirs[0].logprobs, rtol=0, atol=1e-4)
    engine.close()


def test_there_and_back_is_the_same_engine() -> None:
    preset, dtype = "fp8_per_channel", torch.bfloat16
    engine, learner = build("qwen2", preset, dtype, lora=LORA), learner_of("qwen2", preset, dtype)
    frozen = send_base(engine, learner, preset, dtype)
    reports, spoken = [], []
    for version, seed in enumerate((1, 2, 1), start=1):
        weights = sent(turned(learner, seed), preset, dtype, frozen)
        reports.append(engine.update_weights(weights, policy_version=version, frozen=frozen))
        spoken.append(said(engine))
    whole = engine.update_weights(sent(learner, preset, dtype), policy_version=4)
    assert reports[0].digest == reports[2].digest == whole.digest != reports[1].digest
    assert whole.frozen_elements == 0
    for a, b, c in zip(*spoken, strict=True):
        assert torch.equal(a.logprobs, c.logprobs)
        assert not torch.equal(a.logprobs, b.logprobs)
    engine.close()


def test_noise_on_the_norms_reaches_the_engine_alone() -> None:
    engine, learner = build("qwen2", "none", DTYPE, SPREAD, LORA), learner_of("qwen2", "none", DTYPE)
    frozen = send_base(engine, learner, "none", DTYPE)
    quiet = said(engine)
    noise = RolloutNoise(total_iterations=10, sigma_start=0.1, sigma_end=0.01)
    weights = noise(sent(learner, "none", DTYPE, frozen), policy_version=1)
    engine.update_weights(weights, policy_version=1, frozen=frozen)
    loud = said(engine)
    assert gaps(quiet, learner, DTYPE).max() < NEAR < gaps(loud, learner, DTYPE).mean()
    engine.close()


def test_some_layers_may_have_adapters() -> None:
    lora = Lora(r=9, alpha=9, target_modules=("q_proj", "down_proj"))
    engine, learner = build("qwen2", "none", DTYPE, SPREAD, lora), learner_of("qwen2", "none", DTYPE, lora)
    send_base(engine, learner, "none", DTYPE)
    assert gaps(said(engine), learner, DTYPE).max() < NEAR
    engine.close()


def test_what_is_not_the_base_is_refused_and_a_whole_set_cures_it() -> None:
    engine, learner = build("qwen2", "none", DTYPE, SPREAD, LORA), learner_of("qwen2", "none", DTYPE)
    frozen = send_base(engine, learner, "none", DTYPE)
    matrix, bias = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
    rest = [(name, t) for name, t in sent(learner, "none", DTYPE, frozen)]
    faults = {
        rf"{matrix} was declared frozen with digest": (rest, frozen | {matrix: 5}),
        rf"{matrix} is not declared": (rest, {n: d for n, d in frozen.items() if n != matrix}),
        r"model\.norm\.weight is no matrix of it": (rest, frozen | {"model.norm.weight": 5}),
        rf"{matrix} came although it is declared frozen": ([*rest, (matrix, torch.zeros(256, 256))], frozen),
        rf"{bias} changed": ([(n, t + 1 if n == bias else t) for n, t in rest], frozen),
        r"missing: model\.layers\.\d\.\S+lora_[AB]\.weight": ([(n, t) for n, t in rest if "lora" not in n], frozen),
        r"lora_A\.weight holds NaN": (
            [(n, t * math.nan if "0.mlp.up_proj.lora_A" in n else t) for n, t in rest],
            frozen,
        ),
    }
    for version, (message, (weights, declared)) in enumerate(faults.items(), start=1):
        with pytest.raises(RefreshError, match=message):
            engine.update_weights(weights, policy_version=version, frozen=declared)
        with pytest.raises(StaleEngineError, match="its last refresh failed"):
            said(engine)
        engine.update_weights(sent(learner, "none", DTYPE), policy_version=version)
    assert gaps(said(engine), learner, DTYPE).max() < NEAR
    engine.close()


def test_frozen_weights_need_a_base() -> None:
    engine = build("qwen2", "none", DTYPE, SPREAD, LORA)
    with pytest.raises(RefreshError, match="does not hold what is declared frozen"):
        engine.update_weights([], policy_version=0, frozen={"model.norm.weight": 3})
    engine.close()


def test_a_base_that_something_else_wrote_to_is_noticed() -> None:
    engine, learner = build("qwen2", "none", DTYPE, SPREAD, LORA), learner_of("qwen2", "none", DTYPE)
    frozen = send_base(engine, learner, "none", DTYPE)
    model = engine._llm.collective_rpc("get_model")[0]
    model.get_parameter("model.embed_tokens.weight").data[7, 3] += 1
    with pytest.raises(RefreshError, match=r"embed_tokens.weight is frozen, and vLLM holds other values"):
        engine.update_weights(sent(learner, "none", DTYPE, frozen), policy_version=1, frozen=frozen)
    engine.close()


def test_an_adapter_that_vllm_passes_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, learner = build("qwen2", "none", DTYPE, SPREAD, LORA), learner_of("qwen2", "none", DTYPE)
    from vllm.lora.layers import RowParallelLinearWithLoRA

    with monkeypatch.context() as patch:
        patch.setattr(RowParallelLinearWithLoRA, "set_lora", lambda *_: None)
        with pytest.raises(RefreshError, match=r"8 of 28 adapter tensors are not what vLLM holds, first \S+o_proj"):
            engine.update_weights(sent(learner, "none", DTYPE), policy_version=0)
    engine.close()


def test_the_patch_for_older_releases_loads_the_layers_under_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.layers.base import BaseLayerWithLoRA

    (patch,) = (p for p in PATCHES if p.name == "load-under-adapters")
    assert patch.applies("0.26.0", "cuda")
    assert patch.applies("0.26.0", "cpu")
    if hasattr(BaseLayerWithLoRA, "load_weights"):
        monkeypatch.delattr(BaseLayerWithLoRA, "load_weights")
    engine, learner = build("qwen2", "none", DTYPE, SPREAD, LORA), learner_of("qwen2", "none", DTYPE)
    patch.install()
    send_base(engine, learner, "none", DTYPE)
    assert gaps(said(engine), learner, DTYPE).max() < NEAR
    engine.close()


@pytest.mark.parametrize(
    ("preset", "lora", "options", "message"),
    [
        ("none", Lora(r=513), {}, "rank 512 at most"),
        ("none", LORA, {"stream_refresh": True, "count_changes": False}, "stream_refresh is not for adapters"),
        ("none", LORA, {"engine_args": {"max_lora_rank": 8}}, "comes from model.init_args.lora.r"),
        pytest.param("int8_w8a8", LORA, {}, "int8 layers hold no weight", marks=ON_CPU),
    ],
    ids=lambda _: None,
)
def test_adapters_that_vllm_cannot_hold_are_refused(preset: str, lora: Lora, options: dict, message: str) -> None:
    spec = EngineSpec(config_of("qwen2"), QuantScheme.preset(preset), DTYPE, DEVICE, 128, EOS, lora)
    with pytest.raises(ValueError, match=message):
        VLLMEngineFactory(kv_cache_bytes=2**24, **options)(spec)
