"""fp8 that a real vLLM makes of the weights it is sent: the learner's codes, bit for bit but for scales of blocks."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("vllm")
from torch import Tensor, nn
from vllm_models import DEVICE, EOS, KV_BYTES, build, config_of, policy_of, weights_of

from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm import VLLMEngine, VLLMEngineFactory
from lqrl.engines.vllm.online import ONLINE
from lqrl.quant.export import export_weights
from lqrl.quant.lora import Lora
from lqrl.quant.prepare import prepare_
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams

pytestmark = pytest.mark.vllm

BF16, NONE = torch.bfloat16, QuantScheme.preset("none")
FORMATS = [
    name if name == "fp8_per_channel" else pytest.param(name, marks=pytest.mark.gpu) for name in ONLINE
]  # the CPU build has kernels for one
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def online(preset: str, spread: float = 0.05) -> VLLMEngine:
    return build("qwen2", preset, BF16, spread, online=True)


def held(engine: VLLMEngine) -> nn.Module:
    return engine._llm.collective_rpc("get_model")[0]


def codes_of(layer: nn.Module, rows: int) -> tuple[Tensor, Tensor]:
    """The codes ``[N, K]`` as bytes and the scales of a layer of vLLM's."""
    codes = layer.get_parameter("weight").data.view(torch.int8)
    scales = next(p for name, p in layer.named_parameters() if name.startswith("weight_scale"))
    return codes if len(codes) == rows and codes.is_contiguous() else codes.t(), scales.data


def check_blocks(weight: Tensor, theirs: tuple[Tensor, Tensor], ours: tuple[Tensor, Tensor]) -> None:
    """On a GPU vLLM's scales are products with 1/448, which differ from quotients in the last bit.

    Where they do, a weight halfway between two codes may get the other one.
    """
    scales = ours[1].contiguous()
    apart = (theirs[1].contiguous().view(torch.int32) - scales.view(torch.int32)).abs()
    assert apart.max() <= 1
    a, b = (codes.contiguous().view(torch.float8_e4m3fn).float() for codes in (theirs[0], ours[0]))
    differ = a != b
    assert not differ[each_in_block(apart == 0)].any()
    halfway = (a + b) / 2 * each_in_block(scales)
    torch.testing.assert_close(halfway[differ], weight.float()[differ], rtol=1e-6, atol=0)


def each_in_block(blocks: Tensor) -> Tensor:
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.mark.parametrize("preset", FORMATS)
def test_vllm_makes_the_codes_that_the_learner_computes_with(preset: str) -> None:
    engine = online(preset)
    assert engine.takes == NONE
    for version, seed in enumerate((0, 1)):  # at first, and again in place
        engine.update_weights(weights_of("qwen2", NONE, BF16, seed, spread=0.05), policy_version=version)
        ours = dict(weights_of("qwen2", QuantScheme.preset(preset), BF16, seed, spread=0.05))
        unquantized = dict(weights_of("qwen2", NONE, BF16, seed, spread=0.05))
        seen = 0
        for name, layer in held(engine).named_modules():
            parent, _, last = name.rpartition(".")
            if not last.endswith("_proj"):
                continue
            parts = [f"{parent}.{part}" for part in FUSED.get(last, (last,))]
            codes = torch.cat([ours[f"{part}.weight"].view(torch.int8) for part in parts])
            scales = [ours[f"{part}.weight_scale"] for part in parts]
            theirs, their_scales = (t.cpu() for t in codes_of(layer, len(codes)))
            wanted = scales[0] if preset == "fp8_per_tensor" else torch.cat(scales)
            if preset == "fp8_per_block" and their_scales.shape != wanted.shape:
                their_scales = their_scales.t()
            if preset == "fp8_per_block":
                weight = torch.cat([unquantized[f"{part}.weight"] for part in parts])
                check_blocks(weight, (theirs, their_scales), (codes, wanted))
            else:
                assert torch.equal(theirs, codes), name
                assert torch.equal(their_scales.flatten(), wanted.flatten()), name
            seen += 1
        assert seen == 8
    engine.close()


@pytest.mark.parametrize("preset", ["fp8_per_channel"])
def test_it_says_what_an_engine_says_that_was_sent_the_codes(preset: str) -> None:
    """The other formats have other kernels for codes that vLLM did not make itself."""
    said = []
    for made_online in (True, False):
        engine = build("qwen2", preset, BF16, 0.05, online=made_online)
        scheme = engine.takes or QuantScheme.preset(preset)
        engine.update_weights(weights_of("qwen2", scheme, BF16, spread=0.05), policy_version=3)
        said.append(engine.generate([Prompt(1, tuple(range(4, 20)))], SamplingParams(n=8, max_tokens=12), seed=1)[0])
        engine.close()
    for a, b in zip(*said, strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.logprobs, b.logprobs)


def test_a_run_ships_what_the_engine_takes() -> None:
    """The learner computes with the codes of its scheme, and exports what they are made of."""
    learner = copy.deepcopy(policy_of("qwen2", spread=0.05))
    prepare_(learner, QuantScheme.preset("fp8_per_channel"), export_dtype=BF16)
    engine = online("fp8_per_channel")
    weights = export_weights(learner, engine.takes or NONE, export_dtype=BF16)
    report = engine.update_weights(weights, policy_version=0)
    assert report.digest == engine.update_weights(weights_of("qwen2", NONE, BF16, spread=0.05), policy_version=1).digest
    engine.close()


def spec_of(preset: str, dtype: torch.dtype = BF16, lora: Lora | None = None) -> EngineSpec:
    return EngineSpec(config_of("qwen2"), QuantScheme.preset(preset), dtype, DEVICE, 128, EOS, lora)


NO_FP32 = {
    "cpu": (RuntimeError, r"(?s)cannot be built.*float32 is not supported"),  # in vLLM's own words
    "cuda": (ValueError, "give no fp32 on a GPU"),
}[DEVICE.type]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (spec_of("int8_w8a8"), ValueError, "not 'int8_w8a8'; set online: false"),
        (spec_of("fp8_per_channel+lm_head"), ValueError, r"not 'fp8_per_channel\+lm_head'"),
        (spec_of("none"), ValueError, "not 'none'"),
        (spec_of("fp8_per_channel", lora=Lora()), ValueError, "under adapters is sent once"),
        (spec_of("fp8_per_channel", torch.float32), *NO_FP32),
    ],
    ids=lambda _: None,
)
def test_what_vllm_does_not_make_is_refused(spec: EngineSpec, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        VLLMEngineFactory(kv_cache_bytes=KV_BYTES, online=True, gpu_memory_utilization=0.05)(spec)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="what the CPU build lacks")
@pytest.mark.parametrize("preset", ["fp8_per_tensor", "fp8_per_block"])
def test_the_cpu_build_says_what_it_makes(preset: str) -> None:
    with pytest.raises(ValueError, match=f"does not make '{preset}'; take fp8_per_channel"):
        VLLMEngineFactory(kv_cache_bytes=KV_BYTES, online=True)(spec_of(preset))
