"""LoRA on a quantized base, as a run: both refreshes with noise, checkpoints of adapters, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runs import DEVICE, make_data, make_module, make_trainer, weights

from lqrl.callbacks import EngineRefresh, SamplerFeedback
from lqrl.engines import RefreshError
from lqrl.engines.transaction import model_digest
from lqrl.fabric import fit as fabric_fit
from lqrl.learner import RolloutNoise
from lqrl.learner.refresh import refresh_engines
from lqrl.quant import Lora, QuantScheme, UpdateAwareScaling

pytest.importorskip("peft")
LORA = Lora(r=4, alpha=8, train_norms=True)
REFRESHES = pytest.mark.parametrize("refresh", ["adapter", "merge"])


def run(folder, *, epochs=1, lora=LORA, stages=(), resume=None, callbacks=None, **options):
    module = make_module(lora=lora, **({"scheme": "nvfp4_w4a16"} | options))
    ours = callbacks or [EngineRefresh(stages=stages), SamplerFeedback()]
    trainer = make_trainer(folder, epochs=epochs, callbacks=ours, limit_val_batches=0)
    trainer.fit(module, make_data(iterations_per_epoch=2), ckpt_path=resume)
    return module, trainer


def mismatch(module) -> float:
    """Mean k3 between what the engine sampled and what the learner scores, on fresh rollouts."""
    data = make_data()
    data.setup("fit")
    module.to(DEVICE)  # Lightning leaves it on the CPU
    batch = module.collect([data.train_prompts[i] for i in range(6)]).batch.to(DEVICE)
    with torch.no_grad():
        gap = (module(batch.input_ids, batch.attention_mask) - batch.rollout_logprobs)[batch.completion_mask].double()
    return float((torch.expm1(gap) - gap).mean())


@REFRESHES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_iterations_with_noise_train_the_adapters_alone(tmp_path, refresh, dtype):
    """Noise falls in stages of policy versions: 0 without, then 1e-2."""
    before = make_module(lora=LORA)
    before.configure_model()
    noise = RolloutNoise(total_iterations=2, stages=3, sigma_start=1e-2, sigma_end=1e-2)
    module, trainer = run(tmp_path, lora=replace(LORA, refresh=refresh), dtype=dtype, stages=[noise])
    assert module.policy_version == module.engine.policy_version == 2
    assert trainer.callback_metrics["refresh/noise_sigma"] == pytest.approx(1e-2)
    assert trainer.callback_metrics["refresh/noise_changed_fraction"] > 0
    assert trainer.callback_metrics["train/grad_norm"] > 0
    assert (trainer.callback_metrics["refresh/codes_changed_fraction"] > 0) == (refresh == "merge")
    assert trainer.callback_metrics["refresh/elements_changed_fraction"] > 0
    old, new = weights(before), weights(module)
    changed = {n for n in old if not torch.equal(old[n], new[n])}
    assert {n for n in changed if ".lora_" not in n} == {n for n in old if n.endswith("norm.weight")}
    assert {n.rpartition(".lora_B")[0] for n in changed if ".lora_B" in n} == {
        n.removesuffix(".lora_B.weight") for n in old if n.endswith("lora_B.weight")
    }
    # Without noise the engine is the learner's policy.
    module.engine.policy_version = -1
    refresh_engines(module)
    assert mismatch(module) < (1e-9 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize("scheme", ["none", "int4_w4a16_g32", "int8_w8a8+lm_head"])
@REFRESHES
def test_the_learner_scores_as_the_engine_samples(scheme, refresh):
    module = built(scheme=scheme, lora=replace(LORA, refresh=refresh))
    assert mismatch(module) < 1e-5


def built(**options):
    module = make_module(**options)
    module.configure_model()
    perturb_(module)
    module.to(DEVICE)
    module.build_engines(DEVICE)
    refresh_engines(module)
    return module


def perturb_(module, size=0.02):
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if name.endswith("lora_B.weight"):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                parameter.add_(noise.to(parameter.device), alpha=size)


def test_an_adapter_refresh_sends_adapters_and_vectors_only():
    module = built(scheme="nvfp4_w4a16", lora=LORA)
    perturb_(module)
    module.policy_version += 1
    report = refresh_engines(module)
    held = sum(t.numel() for t in module.engine.decoder.model.state_dict().values())
    adapters = sum(p.numel() for n, p in module.policy.named_parameters() if ".lora_" in n)
    vectors = sum(t.numel() for _, t in module.exported_weights() if t.dim() < 2)
    assert report.elements == adapters + vectors
    assert report.elements + report.frozen_elements == held - module.policy.get_output_embeddings().weight.numel()
    fresh = built(scheme="nvfp4_w4a16", lora=LORA)
    perturb_(fresh)
    fresh.policy_version += 2
    assert refresh_engines(fresh).digest == report.digest


def test_a_frozen_weight_that_is_written_is_sent_again():
    module = built(scheme="nvfp4_w4a16", lora=LORA)
    with torch.no_grad():
        module.policy.get_parameter("model.layers.0.mlp.up_proj.weight").mul_(1.5)
    report = refresh_engines(module)
    assert report.frozen_elements == 0
    assert report.codes_changed_fraction + report.elements_changed_fraction > 0
    perturb_(module)
    assert refresh_engines(module).frozen_elements > 0
    assert mismatch(module) < 1e-9


def test_an_engine_whose_codes_are_not_those_that_were_sent_is_refused_and_then_mended():
    module = built(scheme="nvfp4_w4a16", lora=LORA)
    digest = model_digest(module.engine.decoder.model)
    codes = module.engine.decoder.model.get_buffer("model.layers.0.mlp.up_proj.weight_packed")
    codes.view(-1)[7] ^= 1
    module.policy_version += 1
    with pytest.raises(RefreshError, match=r"up_proj\.weight_packed was declared frozen with digest"):
        refresh_engines(module)
    report = refresh_engines(module)  # complete: the engine holds nothing that can be relied on
    assert (report.frozen_elements, report.digest) == (0, digest)


@REFRESHES
def test_the_full_precision_engine_gets_merged_weights(refresh):
    module = built(scheme="nvfp4_w4a16", lora=replace(LORA, refresh=refresh), validate_full_precision=True)
    name = "model.layers.0.mlp.up_proj"
    layer = module.policy.get_submodule(name)
    held = module.full_engine.decoder.model.get_parameter(f"{name}.weight")
    expected = layer.weight + 2.0 * layer.lora_B.weight @ layer.lora_A.weight  # alpha / r = 8 / 4
    torch.testing.assert_close(held, expected.detach())
    assert not torch.equal(held, layer.weight)
    names = {n for n, _ in module.exported_weights(QuantScheme.preset("none"))}
    assert not [n for n in names if "lora_" in n or "base_layer" in n]


def test_a_resumed_run_is_the_same_run_from_a_checkpoint_without_the_base(tmp_path):
    whole, _ = run(tmp_path / "whole", epochs=2)
    path = tmp_path / "part.ckpt"
    run(tmp_path / "part", epochs=1)[1].save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert all(".lora_" in n or n.endswith("norm.weight") for n in checkpoint["state_dict"])
    resumed, _ = run(tmp_path / "rest", epochs=2, resume=path)
    a, b = weights(whole), weights(resumed)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert torch.equal(whole.last_rollouts.batch.rollout_logprobs, resumed.last_rollouts.batch.rollout_logprobs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transforms": [UpdateAwareScaling(2.0)]}, "frozen weights under the adapters are not those"),
        ({"lora": replace(LORA, alpha=4)}, r"lora=Lora\(r=4, alpha=8"),
        ({"lora": replace(LORA, r=2)}, r"tensors differ.*set model\.init_args\.lora to Lora\(r=4"),
        ({"lora": None}, r"lora=Lora\(r=4.*, the config says None; set model\.init_args\.lora to the same"),
    ],
)
def test_a_checkpoint_of_another_base_or_adapter_is_refused(tmp_path_factory, saved, options, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path_factory.mktemp("other"), epochs=2, resume=saved, **options)


def test_a_checkpoint_without_adapters_is_not_given_any(tmp_path):
    run(tmp_path, lora=None)[1].save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"lora=None, the config says Lora.*set model\.init_args\.lora to null"):
        run(tmp_path / "other", epochs=2, resume=tmp_path / "run.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run(folder)[1].save_checkpoint(folder / "run.ckpt")
    return folder / "run.ckpt"


def test_the_fabric_loop_trains_and_resumes_adapters(tmp_path):
    import lightning as L

    def fit(module, iterations, checkpoint=None):
        fabric = L.Fabric(accelerator=DEVICE.type, devices=1)
        return fabric_fit(fabric, module, make_data(), iterations=iterations, checkpoint=checkpoint)

    options = {"scheme": "nvfp4_w4a16", "lora": LORA}
    whole = fit(make_module(**options), 2)
    path = tmp_path / "run.ckpt"
    fit(make_module(**options), 1, path)
    resumed = fit(make_module(**options), 2, path)
    a, b = weights(whole), weights(resumed)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_full_precision_validation_of_an_unquantized_base_with_adapters(tmp_path):
    module = make_module(scheme="none", lora=Lora(r=4), validate_full_precision=True)
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.fit(module, make_data())
    assert "val_full/pass@1" in trainer.callback_metrics
