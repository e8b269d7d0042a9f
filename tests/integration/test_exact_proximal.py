"""In exact mode the engine's log-probs are those of the old policy: the proximal pass is saved and nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import DEVICE, make_data, make_module, make_trainer, weights
from torch import Tensor

from lqrl.algorithms import NoCorrection, SequenceTIS, TBPOLoss, TokenMIS
from lqrl.callbacks import EngineRefresh, SamplerFeedback
from lqrl.learner import PolicyModule
from lqrl.learner.update import score
from lqrl.rewards import RewardFn, RewardSum, RewardTerm
from lqrl.rollouts import Rollouts
from lqrl.types import Completion, Prompt, SamplingParams, TrainBatch


class Traced(PolicyModule):
    """Counts forward passes without a gradient, and keeps whether old log-probs were computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passes, self.computed = 0, []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.passes += not torch.is_grad_enabled()
        return super().forward(input_ids, attention_mask)

    def learn_from(self, rollouts: Rollouts) -> tuple[TrainBatch, dict[str, float]]:
        batch, metrics = super().learn_from(rollouts)
        self.computed.append(batch.old_logprobs is not None)
        return batch, metrics


class Explicit(PolicyModule):
    """Runs the proximal pass all the same."""

    def learn_from(self, rollouts: Rollouts) -> tuple[TrainBatch, dict[str, float]]:
        batch, metrics = super().learn_from(rollouts)
        assert batch.old_logprobs is None
        old = score(self, batch, token_budget=self.token_budget)
        assert torch.equal(old, batch.behavior_logprobs * batch.loss_mask)
        assert len(batch)
        return replace(batch, old_logprobs=old), metrics


class Parity(RewardFn):
    """Every group has both kinds, whatever the policy writes."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        return [float(c.sample_index % 2) for c in completions]


class RefreshedOnce(EngineRefresh):
    def on_train_batch_start(self, *_: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def run(folder: Path, cls: type[PolicyModule], refresh: EngineRefresh | None = None, **options: Any) -> tuple[Any, Any]:
    reward = RewardSum([RewardTerm(Parity(), "odd")])
    module = make_module(cls, **({"exact": True, "optimizer": fast, "reward": reward} | options))
    callbacks = [refresh or EngineRefresh(), SamplerFeedback()]
    trainer = make_trainer(folder, epochs=1, callbacks=callbacks, limit_val_batches=0)
    trainer.fit(module, make_data())
    return module.to(DEVICE), {name: float(value) for name, value in trainer.callback_metrics.items()}


def fast(parameters: Any) -> torch.optim.Optimizer:
    """Steps so large that the clip is reached and the policy leaves the engine's at once."""
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)


NUCLEUS = SamplingParams(max_tokens=12, top_p=0.8, temperature=1.2)
CASES = {
    "one step": {"num_minibatches": 1},
    "four steps": {"num_minibatches": 4},
    "two epochs": {"num_minibatches": 2, "num_epochs": 2, "token_budget": 100},
    "top-p, one step": {"num_minibatches": 1, "sampling": NUCLEUS},
    "top-p, four steps": {"num_minibatches": 4, "sampling": NUCLEUS},
    "top-k, bf16": {"num_minibatches": 4, "sampling": SamplingParams(max_tokens=12, top_k=4), "dtype": "bfloat16"},
    "masked": {"num_minibatches": 4, "correction": TokenMIS(), "scheme": "int4_w4a16_g32"},
    "sequence weights": {"num_minibatches": 4, "correction": SequenceTIS(), "scheme": "none", "token_budget": 100},
    "trust band": {"num_minibatches": 4, "correction": NoCorrection(), "loss": TBPOLoss()},
}


@pytest.mark.parametrize("name", CASES)
def test_the_trained_weights_are_those_with_a_proximal_pass(tmp_path: Path, name: str):
    saved, metrics = run(tmp_path / "saved", Traced, **CASES[name])
    explicit, expected = run(tmp_path / "explicit", Explicit, **CASES[name])
    assert (saved.passes, saved.computed) == (0, [False] * 3)
    assert (metrics["train/proximal_skipped"], expected["train/proximal_skipped"]) == (1, 0)
    ours, theirs = weights(saved), weights(explicit)
    assert all(torch.equal(tensor, theirs[n]) for n, tensor in ours.items())
    assert metrics["policy/ratio_max"] == expected["policy/ratio_max"]
    assert (metrics["policy/ratio_max"] > 1) == ("one step" not in name)
    assert metrics["mismatch/k3"] == expected["mismatch/k3"] == 0
    assert saved.last_rollouts.batch.rollout_log_mass.any() == ("sampling" in CASES[name])


def test_an_aligned_learner_that_is_not_exact_needs_the_pass(tmp_path: Path):
    module, metrics = run(tmp_path, Traced, exact=False, num_minibatches=4)
    assert (module.passes, module.computed) == (3, [True] * 3)
    assert metrics["train/proximal_skipped"] == 0


def test_tokens_of_an_older_policy_need_the_pass(tmp_path: Path):
    module, metrics = run(tmp_path, Traced, RefreshedOnce(), num_minibatches=4, max_staleness=2)
    assert (module.passes, module.computed) == (2, [False, True, True])
    assert metrics["train/proximal_skipped"] == 0
    assert metrics["mismatch/k3"] > 0


def test_one_row_of_an_older_policy_is_enough(tmp_path: Path):
    module, _ = run(tmp_path, Traced, num_minibatches=4)
    data = make_data()
    data.setup("fit")
    rollouts = module.collect([data.train_prompts[i] for i in range(8)])
    batch, _ = module.learn_from(rollouts)
    assert batch.old_logprobs is None
    rollouts.batch.policy_versions[5] -= 1
    batch, _ = module.learn_from(rollouts)
    assert torch.equal(batch.old_logprobs, batch.behavior_logprobs * batch.loss_mask)  # what it says is still true here
