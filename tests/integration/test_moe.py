"""A mixture of experts from a checkpoint through two iterations of quantized rollouts and aligned updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from runs import DEVICE, POLICY, make_data, make_module, make_trainer, weights

from lqrl.callbacks import EngineRefresh, HFExport, SamplerFeedback
from lqrl.learner.refresh import refresh_engines
from lqrl.modeling.backbone import load_model
from lqrl.modeling.sources import load_tokenizer
from lqrl.quant.checkpoint import load_quantized
from lqrl.quant.experts import AlignedExperts, QuantizedExperts
from lqrl.rewards import RewardFn, RewardSum, RewardTerm
from lqrl.testing.models import tiny_moe_config
from lqrl.types import Completion, Prompt


class EvenTokens(RewardFn):
    """Whether most tokens are even: a signal that a random policy gets too."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        return [float((c.token_ids % 2 == 0).float().mean() > 0.5) for c in completions]


def test_two_iterations_train_experts_and_router_and_stay_aligned(tmp_path):
    load_model(tiny_moe_config(), dtype=torch.float32, seed=0).save_pretrained(tmp_path / "moe")
    load_tokenizer(POLICY).save_pretrained(tmp_path / "moe")
    module = make_module(model=str(tmp_path / "moe"), reward=RewardSum([RewardTerm(EvenTokens(), "even")]))
    module.configure_model()
    before = weights(module)
    callbacks = [EngineRefresh(), SamplerFeedback(), HFExport(str(tmp_path / "hf"), quantized=True)]
    trainer = make_trainer(tmp_path, epochs=1, callbacks=callbacks)
    trainer.fit(module, make_data(iterations_per_epoch=2))
    after = weights(module)
    assert float(trainer.callback_metrics["train/skipped_steps"]) == 0
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    for layer in range(2):
        mlp = f"policy.model.layers.{layer}.mlp"
        assert {f"{mlp}.gate.weight", f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"} <= moved
    assert float(trainer.callback_metrics["refresh/codes_changed_fraction"]) > 0

    assert any(isinstance(m, AlignedExperts) for m in module.policy.modules())
    assert any(isinstance(m, QuantizedExperts) for m in module.engine.decoder.model.modules())
    module.to(DEVICE)
    refresh_engines(module)
    data = make_data()
    data.setup("fit")
    batch = module.collect([data.train_prompts[i] for i in range(4)]).batch.to(DEVICE)
    with torch.no_grad():
        gap = (module(batch.input_ids, batch.attention_mask) - batch.rollout_logprobs)[batch.completion_mask].double()
    assert float((torch.expm1(gap) - gap).mean()) < 1e-5  # k3

    # What the run leaves behind is what its engine serves, and its masters.
    scheme, tensors = load_quantized(tmp_path / "hf-int8_w8a8")
    assert scheme == module.scheme
    read, sent = dict(tensors), dict(module.exported_weights())
    assert read.keys() == sent.keys()
    assert all(torch.equal(read[n], t.cpu()) for n, t in sent.items())
    masters = dict(load_model(tmp_path / "hf", dtype=torch.float32).named_parameters())
    assert all(torch.equal(p.cpu(), masters[n]) for n, p in module.policy.named_parameters())
