"""What a server that runs already is refused for, and what the error says to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engine_vllm_server import SPEC
from vllm_peers import VLLMPeer

from lqrl.engines.base import EngineSpec, EngineUnavailableError
from lqrl.engines.vllm import VLLMServerEngineFactory
from lqrl.engines.vllm.served import ServedModel, described
from lqrl.quant.scheme import QuantScheme


def recipe(preset: str) -> EngineSpec:
    return replace(SPEC, scheme=QuantScheme.preset(preset))


def refusal(serves: str, preset: str, unties: bool = True, **facts: Any) -> str:
    """What the engine for ``preset`` says of a server on a CPU whose model has another scheme, or other facts."""
    server = VLLMPeer(ServedModel(recipe(serves), unties=unties), **{"platform": "cpu", "capability": None} | facts)
    try:
        with pytest.raises(EngineUnavailableError) as error:
            VLLMServerEngineFactory(urls=[server.url], attempts=1)(recipe(preset))
    finally:
        server.close()
    assert server.url in str(error.value)
    assert "config_groups" not in str(error.value)
    return str(error.value)


@pytest.fixture
def fitting() -> Iterator[VLLMPeer]:
    """A server on a CPU with all that the recipe asks for."""
    server = VLLMPeer(ServedModel(recipe("int8_w8a8"), unties=True), platform="cpu", capability=None)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("serves", "preset", "message"),
    [
        ("int8_w8a8", "fp8_per_channel", "it serves scheme 'int8_w8a8', the recipe has scheme 'fp8_per_channel': "),
        ("none", "int8_w8a8", "it serves a model without quantization, the recipe has scheme 'int8_w8a8': "),
        ("int8_w8a8+kv_fp8_static", "int8_w8a8", "it serves scheme 'int8_w8a8+kv_fp8_static', the recipe has scheme"),
        ("none", "fp8_per_tensor", "has scheme 'fp8_per_tensor', which vLLM holds as scheme 'fp8_per_channel': "),
    ],
)
def test_another_scheme_is_named_with_what_to_serve_instead(serves: str, preset: str, message: str) -> None:
    said = refusal(serves, preset)
    assert message in said
    assert "start it with a checkpoint of that scheme as MODEL (lqrl.quant.checkpoint.save_quantized)" in said


def test_a_checkpoint_where_the_recipe_quantizes_nothing_is_named() -> None:
    said = refusal("int8_w8a8", "none")
    assert (
        "it serves scheme 'int8_w8a8', the recipe has scheme 'none': start it with the policy itself as MODEL" in said
    )


def test_the_layers_of_a_scheme_that_differ_are_listed() -> None:
    said = refusal("int8_w8a8", "int8_w8a8", served={"quantization_config": quantization(ignore=["lm_head", "a"])})
    assert """it serves scheme 'int8_w8a8' with ignore ["lm_head", "a"] instead of ["lm_head"]: start it""" in said


def quantization(**changes: Any) -> dict[str, Any]:
    return ServedModel(recipe("int8_w8a8"), unties=True).config.quantization_config | changes


def test_a_quantization_that_lqrl_does_not_have_is_said_to_be_none_of_its() -> None:
    said = refusal("none", "int8_w8a8", served={"quantization_config": {"quant_method": "awq"}})
    assert "it serves a quantization that lqrl does not have (quant_method is 'awq', not 'compressed-tensors')" in said


def test_a_tied_head_on_a_cpu_is_a_matter_of_its_config_alone() -> None:
    said = refusal("int8_w8a8", "int8_w8a8", unties=False)
    assert "it serves tie_word_embeddings true, the recipe has false" not in said
    assert "start it with a copy of MODEL that has tie_word_embeddings: false in its config.json" in said
    assert "the recipe's model" not in said  # which ties them


def test_a_model_that_computes_something_else_is_named() -> None:
    model = described(ServedModel(recipe("none"), unties=True).config)["model"]
    assert model["rms_norm_eps"] != 0.5
    rope = model["rope_parameters"] | {"rope_theta": 7.0, "of_another_release": 1}
    said = refusal("none", "none", served={"model": model | {"rms_norm_eps": 0.5, "rope_parameters": rope}})
    assert f"its model has rms_norm_eps 0.5 instead of {model['rms_norm_eps']}, rope_parameters {{" in said
    assert "start it with the recipe's model" in said
    server = VLLMPeer(ServedModel(SPEC, unties=False), served={"model": model | {"new": 1, "rope_parameters": {}}})
    VLLMServerEngineFactory(urls=[server.url])(SPEC).close()
    server.close()


def test_weights_that_a_server_quantizes_itself_are_named() -> None:
    said = refusal("none", "none", served={"quantization": "fp8"})
    assert "it quantizes what it loads (fp8): start it without --quantization" in said


@pytest.mark.parametrize("served", [{"model": None}, {"quantization_config": "awq"}, {"quantization_config": [1]}])
def test_facts_of_another_form_are_refused_in_words(served: dict[str, Any]) -> None:
    assert "start it with" in (said := refusal("int8_w8a8", "int8_w8a8", served=served)) or "the learner's lqrl" in said


def test_all_that_differs_is_said_at_once() -> None:
    facts = {"dtype": "torch.bfloat16", "logprobs_mode": "raw_logprobs", "generation_config": "auto"}
    said = refusal("int8_w8a8", "int8_w8a8", served=facts)
    for flag in ("--dtype float32", "--logprobs-mode processed_logprobs", "--generation-config vllm"):
        assert f"start it with {flag}" in said


def test_logits_in_fp32_are_an_option_of_the_engine() -> None:
    said = refusal("int8_w8a8", "int8_w8a8", served={"head_dtype": "float32"})
    assert "it computes logits in float32: set fp32_head: true, or start it without head_dtype" in said


def test_a_server_on_a_cpu_that_cuts_prompts_is_refused(fitting: VLLMPeer) -> None:
    said = refusal("int8_w8a8", "int8_w8a8", cuts_prompts=True)
    assert "start it with --no-enable-chunked-prefill" in said
    engine = VLLMServerEngineFactory(urls=[fitting.url])(recipe("int8_w8a8"))
    assert engine.serving == [fitting.url]
    engine.close()


def test_a_server_on_a_gpu_may_cut_prompts() -> None:
    server = VLLMPeer(ServedModel(SPEC, unties=False), cuts_prompts=True)
    engine = VLLMServerEngineFactory(urls=[server.url])(replace(SPEC, device=torch.device("cpu")))
    assert engine.serving == [server.url]
    engine.close()
    server.close()
