"""What a run leaves behind is what its engine served."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from runs import DEVICE, make_data, make_module, make_trainer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from lqrl.callbacks import EngineRefresh, HFExport, SamplerFeedback
from lqrl.callbacks.hf_export import export, export_quantized
from lqrl.data import Uniform
from lqrl.learner.refresh import refresh_engines
from lqrl.modeling.sources import load_tokenizer
from lqrl.quant import UpdateAwareScaling
from lqrl.quant.checkpoint import load_quantized


def test_the_low_bit_export_is_the_engine_of_the_run(tmp_path):
    module = make_module(transforms=[UpdateAwareScaling(1.5)])
    callbacks = [EngineRefresh(), SamplerFeedback(), HFExport(str(tmp_path / "hf"), quantized=True)]
    make_trainer(tmp_path, epochs=1, callbacks=callbacks).fit(module, make_data())
    sent = dict(module.exported_weights())
    scheme, tensors = load_quantized(tmp_path / "hf-int8_w8a8")
    tensors = dict(tensors)
    assert scheme == module.scheme
    assert tensors.keys() == sent.keys()
    assert all(torch.equal(tensors[name], t.cpu()) for name, t in sent.items())
    assert load_tokenizer(str(tmp_path / "hf-int8_w8a8")).eos_token_id == module.tokenizer.eos_token_id
    assert (tmp_path / "hf" / "config.json").is_file()
    # A run that starts there serves the same codes at once.
    again = make_module(model=str(tmp_path / "hf-int8_w8a8"))
    again.configure_model()
    again.to(DEVICE)
    again.build_engines(DEVICE)
    refresh_engines(again)
    assert all(torch.equal(t, sent[name]) for name, t in dict(again.exported_weights()).items())


def trained(tmp_path, scheme: str):
    """A run of three iterations and its low-bit export."""
    module = make_module(scheme=scheme)
    callbacks = [EngineRefresh(), SamplerFeedback(), HFExport(str(tmp_path / "hf"), quantized=True)]
    make_trainer(tmp_path, epochs=1, callbacks=callbacks, limit_val_batches=0).fit(module, make_data())
    return module, str(tmp_path / f"hf-{scheme}")


def refreshed(**options):
    module, data = make_module(**options), make_data()
    module.configure_model()
    data.setup("fit")
    module.calibration_prompts = data.first_prompts(8)
    module.to(DEVICE)
    module.build_engines(DEVICE)
    refresh_engines(module)
    return module


def cache_scales(module) -> dict[str, torch.Tensor]:
    return {n: t.cpu().clone() for n, t in module.exported_weights() if n.endswith(("k_scale", "v_scale"))}


def test_a_run_starts_with_the_cache_scales_of_its_checkpoint(tmp_path):
    scheme = "fp8_per_channel+kv_fp8_static"
    module, directory = trained(tmp_path, scheme)
    saved, again = cache_scales(module), refreshed(model=directory, scheme=scheme)
    assert len(saved) == 4
    held = again.engine.decoder.model.state_dict()
    assert all(torch.equal(held[name].cpu(), scale) for name, scale in saved.items())
    assert again.engine.decoder.model.state_dict().keys() == module.engine.decoder.model.state_dict().keys()
    fresh = cache_scales(refreshed(scheme=scheme))  # calibrated on prompts
    assert not any(torch.equal(fresh[name], scale) for name, scale in saved.items())
    moved = refreshed(model=directory, scheme=scheme, transforms=[UpdateAwareScaling(1.5)])
    assert not any(torch.equal(scale, saved[name]) for name, scale in cache_scales(moved).items())


def test_a_saved_cache_scale_that_is_no_number_is_named(tmp_path):
    _, directory = trained(tmp_path, "int8_w8a8+kv_fp8_static")
    tensors = load_file(f"{directory}/model.safetensors")
    name = "model.layers.1.self_attn.v_scale"
    tensors[name] = torch.tensor([-1.0])
    save_file(tensors, f"{directory}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_scale in .* is \[-1\.0\]"):
        refreshed(model=directory, scheme="int8_w8a8+kv_fp8_static")
    del tensors[name]  # a checkpoint without all of them is calibrated
    save_file(tensors, f"{directory}/model.safetensors", metadata={"format": "pt"})
    scales = cache_scales(refreshed(model=directory, scheme="int8_w8a8+kv_fp8_static"))
    assert all(float(scale) not in (1.0, float(tensors.get(n, torch.zeros(1)))) for n, scale in scales.items())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("int8_w8a8+kv_fp8", None),
        ("int8_w8a8", r"scheme int8_w8a8\+kv_fp8, and this run has int8_w8a8\. .* kv_cache \(fp8_e4m3 per token_head"),
        ("int8_w8a8+lm_head+kv_fp8", r"lm_head \(False there, True here\), 1 layers .* such as lm_head\."),
        ("none", r"this run has none\. They differ in weight \(int8 per channel there, None here\), activation"),
    ],
)
def test_a_run_in_another_scheme_than_its_checkpoint_says_so(tmp_path, asked, says):
    module = make_module(scheme="int8_w8a8+kv_fp8")
    module.configure_model()
    export_quantized(module, tmp_path / "low")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_module(model=str(tmp_path / "low"), scheme=asked).configure_model()
    said = [str(w.message) for w in caught if "holds the scheme" in str(w.message)]
    assert len(said) == (says is not None)
    assert says is None or re.search(says, said[0])


def test_the_config_names_the_dtype_of_the_weights(tmp_path):
    module = make_module()
    module.configure_model()
    export(module, tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_scheme_that_cannot_be_exported_is_refused_before_training(tmp_path):
    module = make_module(scheme="none")
    trainer = make_trainer(tmp_path, epochs=1, callbacks=[EngineRefresh(), HFExport(quantized=True)])
    with pytest.raises(ValueError, match="quantizes no weights"):
        trainer.fit(module, make_data(sampler=Uniform()))
    assert module.iteration == 0


@pytest.mark.parametrize("scheme", ["fp8_per_block", "fp8_per_channel"])
def test_an_export_that_transformers_cannot_run_is_named_before_training(tmp_path, scheme):
    """Its inputs of 64 are no whole group of 128 activations."""
    module, export = make_module(scheme=scheme), HFExport(str(tmp_path / "hf"), quantized=True)
    trainer = make_trainer(tmp_path, epochs=1, callbacks=[EngineRefresh(), export], limit_val_batches=0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, make_data(sampler=Uniform(), iterations_per_epoch=1))
    said = [str(w.message) for w in warned if "HFExport" in str(w.message)]
    tokens = torch.arange(3, 9)[None]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf-{scheme}")
    if scheme == "fp8_per_channel":
        assert not said
        assert bool(torch.isfinite(model(tokens).logits).all())
        return
    (message,) = said
    assert "q_proj (64 inputs) and 13 other layers" in message
    assert "CompressedTensorsConfig(dequantize=True)" in message
    with pytest.raises(RuntimeError, match="unflatten"):
        model(tokens)
    plain = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf-{scheme}", quantization_config=plain)
    assert bool(torch.isfinite(model(tokens).logits).all())


def test_a_model_with_folded_transforms_is_not_folded_again(tmp_path):
    module = make_module(transforms=[UpdateAwareScaling(1.5)])
    module.configure_model()
    export(module, tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"comes with UpdateAwareScaling\(s=1.5\) folded in, .*set transforms: \[\]"):
        make_module(model=str(tmp_path), transforms=[UpdateAwareScaling(1.5)]).configure_model()
    again = make_module(model=str(tmp_path))
    again.configure_model()
    export(again, tmp_path / "again", dtype=torch.float32)
    assert "UpdateAwareScaling" in (tmp_path / "again" / "config.json").read_text()
