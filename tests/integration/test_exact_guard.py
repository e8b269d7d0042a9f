"""`MismatchGuard` in exact mode: one token that differs ends the run, and the error says in which module."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from runs import DEVICE, make_data, make_module, make_trainer
from torch import Tensor

from lqrl.callbacks import EngineRefresh, MismatchError, MismatchGuard, SamplerFeedback
from lqrl.callbacks.mismatch_guard import check_exact
from lqrl.learner import PolicyModule, RolloutNoise
from lqrl.learner.divergence import SampledRow, divergence_of
from lqrl.modeling.exact import ExactRMSNorm
from lqrl.rollouts import to_train_batch
from lqrl.testing import ScriptedEngine
from lqrl.types import Advantages, SamplingParams


class PlainNorm(PolicyModule):
    """One norm of the learner computes as transformers has it."""

    def configure_model(self) -> None:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

        super().configure_model()
        layer: Any = self.policy.get_submodule("model.layers.1")
        exact = layer.post_attention_layernorm
        if isinstance(exact, ExactRMSNorm):
            plain = Qwen3RMSNorm(len(exact.weight), exact.variance_epsilon)
            plain.weight = exact.weight
            layer.post_attention_layernorm = plain


class Shifted(PolicyModule):
    """What a step sees is not what the scorer gives."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids, attention_mask) * (1 - 2**-20)


class Perturbed(L.Callback):
    """Changes the engine's model before iteration 1, behind the learner's back."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    @torch.no_grad()
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.iteration == 1:
            self.change(pl_module.engine.decoder)


class RefreshedOnce(EngineRefresh):
    def on_train_batch_start(self, *_: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def run(
    folder: Path,
    cls: type[PolicyModule] = PolicyModule,
    *others: L.Callback,
    refresh: EngineRefresh | None = None,
    **options: Any,
) -> tuple[PolicyModule, L.Trainer]:
    module = make_module(cls, **({"exact": True} | options))
    callbacks = [refresh or EngineRefresh(), SamplerFeedback(), *others]
    trainer = make_trainer(folder, epochs=1, callbacks=callbacks, limit_val_batches=0)
    trainer.fit(module, make_data())
    return module.to(DEVICE), trainer  # the Trainer leaves it on the CPU


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_minibatches": 2, "num_epochs": 2, "dtype": "bfloat16"},
        {"scheme": "none", "sampling": SamplingParams(max_tokens=12, top_p=0.9), "token_budget": 100},
    ],
    ids=["one step", "four steps", "truncated"],
)
def test_an_exact_run_passes(tmp_path: Path, options: dict[str, Any]):
    module, trainer = run(tmp_path, PolicyModule, MismatchGuard(max_k3=0, patience=1, action="raise"), **options)
    assert module.policy_version == 3
    assert {float(trainer.callback_metrics[f"mismatch/{name}"]) for name in ("k1", "k3", "log_ratio_max")} == {0.0}
    assert module.watch is None  # the next Trainer may have no guard


def named(error: pytest.ExceptionInfo[MismatchError]) -> str:
    """The module that the message names; its numbers are checked on the way."""
    found = re.search(
        r"log-probs of (\d+) of (\d+) fresh tokens in iteration \d differ by at most (\S+): on the first of them "
        r"engine and learner part at ([\w. ]+?)(?: \(.*\))?, prompt (\d+), position (\d+), by at most (\S+);",
        str(error.value),
    )
    assert found is not None, error.value
    assert 0 < int(found[1]) <= int(found[2])
    assert min(float(found[3]), float(found[7])) > 0
    data = make_data()
    data.setup("fit")
    assert int(found[5]) in {prompt.id for prompt in data.train_prompts}
    assert int(found[6]) < 40
    return found[4]


@pytest.mark.parametrize("steps", [1, 4])
def test_a_plain_norm_in_the_learner_is_named_at_once(tmp_path: Path, steps: int):
    with pytest.raises(MismatchError) as error:
        run(tmp_path, PlainNorm, MismatchGuard(action="warn", patience=9), scheme="none", num_minibatches=steps)
    assert named(error) == "model.layers.1.post_attention_layernorm"
    assert "in iteration 0" in str(error.value)


def norm(decoder: Any) -> None:
    decoder.model.get_submodule("model.layers.1.input_layernorm").weight[5] += 2**-10


def scale(decoder: Any) -> None:
    layer = decoder.model.get_submodule("model.layers.0.mlp.down_proj")
    layer.weight_scale[7] *= 1.001
    layer.pack()


def cached_key(decoder: Any) -> None:
    decoder.model.get_submodule("model.layers.0.self_attn.k_norm").weight[0] *= 1.01


def head(decoder: Any) -> None:
    decoder.head *= 1.0001


CHANGES = {
    norm: "model.layers.1.input_layernorm",
    scale: "model.layers.0.mlp.down_proj",
    cached_key: "model.layers.0.self_attn.k_norm",
    # On CUDA the head multiplies with its weight itself, which this policy shares with the embedding.
    head: "output head" if DEVICE.type == "cpu" else "model.embed_tokens",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_differs_in_the_engine_is_named(tmp_path: Path, change: Callable[[Any], None]):
    with pytest.raises(MismatchError) as error:
        run(tmp_path, PolicyModule, Perturbed(change), MismatchGuard())
    assert named(error) == CHANGES[change]
    assert "in iteration 1" in str(error.value)  # the first iteration had nothing to complain about


def test_a_step_that_sees_other_log_probs_than_the_scorer_is_told_apart(tmp_path: Path):
    with pytest.raises(MismatchError, match="scored on their own they are equal"):
        run(tmp_path, Shifted, MismatchGuard())


def test_without_a_guard_the_metrics_show_it(tmp_path: Path):
    for steps in (1, 4):
        module, trainer = run(tmp_path / str(steps), PlainNorm, scheme="none", num_minibatches=steps)
        assert module.policy_version == 3
        assert float(trainer.callback_metrics["mismatch/k3"]) > 0


def test_tokens_of_an_older_policy_may_differ(tmp_path: Path):
    module, trainer = run(tmp_path, PolicyModule, MismatchGuard(), refresh=RefreshedOnce(), max_staleness=2)
    assert (module.policy_version, module.engine.policy_version) == (3, 0)
    assert float(trainer.callback_metrics["mismatch/k3"]) > 0


def test_rows_are_judged_one_by_one(tmp_path: Path):
    module, _ = run(tmp_path)
    data = make_data()
    data.setup("fit")
    rollouts = module.collect([data.train_prompts[i] for i in range(4)]).batch
    rows = len(rollouts)
    batch = to_train_batch(rollouts, Advantages(torch.ones(rows), torch.ones(rows, dtype=torch.bool))).to(module.device)
    apart = batch.behavior_logprobs.clone()
    apart[3] -= 1e-6
    check_exact(module, batch, batch.behavior_logprobs)
    with pytest.raises(MismatchError, match="scored on their own they are equal"):
        check_exact(module, batch, apart)
    assert batch.policy_versions is not None
    batch.policy_versions[3] -= 1
    check_exact(module, batch, apart)
    with pytest.raises(ValueError, match="make the batch with"):
        check_exact(module, replace(batch, policy_versions=None), apart)
    batch.policy_versions[3] += 1
    module.engine = ScriptedEngine(lambda prompt, index: [0])
    with pytest.raises(MismatchError, match="ScriptedEngine does not show its layers' outputs"):
        check_exact(module, batch, apart)


def test_noise_in_the_engine_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="RolloutNoise changes them: remove the stages of EngineRefresh"):
        run(tmp_path, refresh=EngineRefresh([RolloutNoise(3)]))


def test_a_learner_and_an_engine_of_two_models_are_not_compared():
    module, other = (make_module(exact=exact, dtype=dtype) for exact, dtype in ((True, "float32"), (False, "bfloat16")))
    for each in (module, other):
        each.build_engines(torch.device("cpu"))
    row = SampledRow(1, 2, [1, 2, 3], torch.zeros(1))
    with pytest.raises(ValueError, match="build the engine from the learner's config and dtype"):
        divergence_of(module.scorer, other.engine, [row])
    with pytest.raises(ValueError, match="nothing to compare"):
        divergence_of(module.scorer, module.engine, [])
