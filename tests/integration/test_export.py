"""What a run leaves behind is what its engine served."""

from __future__ import annotations

import json

import pytest
import torch
from runs import DEVICE, make_data, make_module, make_trainer
from transformers import AutoModelForCausalLM

from lqrl.callbacks import EngineRefresh, HFExport, SamplerFeedback
from lqrl.callbacks.hf_export import export
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
        trainer.fit(module, make_data())
    assert module.iteration == 0


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
