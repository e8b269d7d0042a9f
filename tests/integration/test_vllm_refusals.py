"""What a real vLLM cannot do for the recipe, said before it is built where that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm")
from vllm_models import DEVICE, EOS, KV_BYTES, build, config_of

from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm import VLLMEngineFactory
from lqrl.engines.vllm.process import check_dtype, words_of
from lqrl.quant.scheme import QuantScheme

pytestmark = pytest.mark.vllm

NONE = QuantScheme.preset("none")


def spec_with(**changes) -> EngineSpec:
    return replace(EngineSpec(config_of("qwen3"), NONE, torch.float32, DEVICE, 128, EOS), **changes)


EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
PARTS = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, EXAMPLE]
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": PARTS}}


def narrow_heads() -> EngineSpec:
    config = config_of("qwen3")
    config.head_dim = 16
    return spec_with(config=config)


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        (spec_with(exact=True), {}, NotImplementedError, "exact: true needs TorchEngineFactory"),
        (spec_with(device=torch.device("meta")), {}, ValueError, "asked for on meta"),
        (spec_with(scheme=QuantScheme.preset("nf4")), {}, ValueError, "'nf4'.*bitsandbytes"),
        (spec_with(), {"engine_args": {"dtype": "half"}}, ValueError, "comes from model.init_args.dtype"),
        (spec_with(), {"engine_args": {"block_sise": 32}}, ValueError, "did you mean block_size"),
        (spec_with(), {"engine_args": {"kv_transfer_config": EXAMPLE}}, ValueError, "ExampleConnector cannot drop"),
        (spec_with(), {"engine_args": {"kv_transfer_config": MULTI}}, ValueError, "ExampleConnector cannot drop"),
    ],
    ids=lambda value: None,
)
def test_what_vllm_does_not_have_is_refused_by_name(spec: EngineSpec, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        VLLMEngineFactory(kv_cache_bytes=KV_BYTES, **options)(spec)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="what the CPU build lacks")
@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        (narrow_heads(), {}, ValueError, "heads are 16 wide"),
        (spec_with(scheme=QuantScheme.preset("none+kv_fp8")), {}, ValueError, "fp8_per_token_head"),
        (spec_with(), {"sleep_level": 1}, ValueError, "gives nothing up in sleep"),
        (spec_with(scheme=QuantScheme.preset("int8_w8a16")), {}, RuntimeError, "cannot be built.*'int8_w8a16'"),
    ],
    ids=lambda value: None,
)
def test_what_the_cpu_build_does_not_have_is_refused(
    spec: EngineSpec, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        VLLMEngineFactory(kv_cache_bytes=KV_BYTES, **options)(spec)


@pytest.mark.parametrize("preset", ["int8_w8a8", "fp8_per_channel", "int4_w4a16", "nvfp4_w4a16"])
def test_low_bits_in_fp32_are_refused_on_a_gpu(preset: str) -> None:
    with pytest.raises(ValueError, match=f"'{preset}'.* no fp32 on a GPU; set model.init_args.dtype: bfloat16"):
        check_dtype(QuantScheme.preset(preset), torch.float32, "cuda")
    check_dtype(QuantScheme.preset(preset), torch.bfloat16, "cuda")
    check_dtype(QuantScheme.preset(preset), torch.float32, "cpu")
    check_dtype(QuantScheme.preset("none+kv_fp8"), torch.float32, "cuda")
    if DEVICE.type != "cpu":
        with pytest.raises(ValueError, match=f"'{preset}'.* no fp32 on a GPU"):
            build("llama", preset, torch.float32)


def test_an_assertion_without_words_is_told_by_its_line() -> None:
    try:
        assert not DEVICE.type
    except AssertionError as error:
        error.args = ()
        told = words_of(error)
    assert told.startswith("AssertionError: assert not DEVICE.type (")
    assert "test_vllm_refusals.py, line " in told
    assert words_of(ValueError("no kernel")) == "no kernel"
