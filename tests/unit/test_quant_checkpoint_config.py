"""What config.json says of a quantized model besides compressed-tensors' own words, and who reads it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from test_quant_checkpoint import bits, saved
from transformers import AutoModelForCausalLM

from lqrl.modeling.backbone import load_model
from lqrl.quant.checkpoint import resolve_scheme
from lqrl.quant.checkpoint_reader import holds_codes
from lqrl.quant.compressed_format import ACTIVATIONS, CACHE
from lqrl.quant.scheme import PRESETS
from lqrl.testing.models import tiny_config


def test_nvfp4_activations_are_for_lqrl_alone(tmp_path):
    """A vLLM that was told of them would read a calibrated scale that no checkpoint of lqrl has."""
    policy = saved("nvfp4_w4a4", tmp_path / "w4a4")
    saved("nvfp4_w4a16", tmp_path / "w4a16")
    content, other = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("w4a4", "w4a16"))
    arguments = content.pop(ACTIVATIONS)
    assert (arguments["num_bits"], arguments["strategy"], arguments["dynamic"]) == (4, "tensor_group", True)
    assert content == other  # weight-only, to all others
    held, same = (load_file(tmp_path / d / "model.safetensors") for d in ("w4a4", "w4a16"))
    assert held.keys() == same.keys()
    assert all(torch.equal(bits(held[n]), bits(t)) for n, t in same.items())
    masters = load_model(tmp_path / "w4a4", dtype=torch.float32)
    assert ACTIVATIONS not in masters.config.to_dict()
    assert resolve_scheme(tmp_path / "w4a4").activation == PRESETS["nvfp4_w4a4"].activation
    (tmp_path / "w4a4" / "config.json").write_text(json.dumps(content | {ACTIVATIONS: arguments | {"num_bits": 6}}))
    with pytest.raises(ValueError, match=f"{ACTIVATIONS} have 6 bits of type float"):
        resolve_scheme(tmp_path / "w4a4")
    assert ACTIVATIONS not in policy.config.to_dict()  # the export has a config of its own


def test_a_cache_with_scales_per_token_is_for_lqrl_alone(tmp_path):
    """A ``kv_cache_scheme`` of that kind is refused by vLLM, and transformers has no use for one."""
    saved("int8_w8a16+kv_fp8", tmp_path / "cache")
    saved("int8_w8a16", tmp_path / "plain")
    content, other = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("cache", "plain"))
    arguments = content.pop(CACHE)
    assert (arguments["num_bits"], arguments["type"], arguments["strategy"]) == (8, "float", "token_head")
    assert content == other
    masters = load_model(tmp_path / "cache", dtype=torch.float32)
    assert CACHE not in masters.config.to_dict()
    pytest.importorskip("compressed_tensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "cache", dtype=torch.float32)
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    ids = torch.arange(12)[None]
    assert torch.equal(theirs(ids).logits, same(ids).logits)
    config = tmp_path / "cache" / "config.json"
    for changes, message in (
        ({"num_bits": 6}, f"{CACHE} have 6 bits of type float"),
        ({"num_bits": 4}, "no cache holds keys and values as fp4_e2m1 per token_head"),
        ({"strategy": "channel"}, f"{CACHE} have strategy channel"),
    ):
        config.write_text(json.dumps(content | {CACHE: arguments | changes}))
        with pytest.raises(ValueError, match=message):
            resolve_scheme(tmp_path / "cache")


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_a_model_that_another_library_quantized_is_no_start(method, tmp_path):
    load_model(tiny_config("qwen2"), dtype=torch.float32, seed=0).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"quantization_config": {"quant_method": method, "load_in_4bit": True}}))
    with pytest.raises(NotImplementedError, match=f"is quantized by {method}, .*start from the full-precision model"):
        load_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("settings", ["fp8", ["fp8"], 5])
def test_a_quantization_config_of_another_type_is_refused(settings, tmp_path):
    saved("int8_w8a8", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    for use in (resolve_scheme, holds_codes):
        with pytest.raises(ValueError, match=r"quantization_config of .* is .*, where an object is needed"):
            use(tmp_path)
