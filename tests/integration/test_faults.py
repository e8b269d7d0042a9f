"""What goes wrong says so, and names the fix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from runs import make_data, make_module, make_trainer

from lqrl.algorithms import NoCorrection, TBPOLoss
from lqrl.callbacks import EngineRefresh, MismatchError, MismatchGuard, SamplerFeedback
from lqrl.cli import run as command
from lqrl.data import PromptSource, Sort, UniformBudget
from lqrl.engines import RefreshError, StaleEngineError
from lqrl.rewards import RewardError, RewardFn, RewardSum, RewardTerm


@dataclass(frozen=True)
class BadReward(RewardFn):
    """Misbehaves as told."""

    how: str

    def __call__(self, prompt, completions):
        if self.how == "raises":
            raise KeyError("gold")
        values = [0.0] * len(completions)
        return values[:-1] if self.how == "short" else [math.nan, *values[1:]]


def run(tmp_path, *, epochs=1, callbacks=None, data=None, resume=None, **options):
    module = make_module(**options)
    make_trainer(tmp_path, epochs=epochs, callbacks=callbacks, limit_val_batches=0).fit(
        module, data or make_data(), ckpt_path=resume
    )
    return module


@pytest.mark.parametrize(
    ("how", "message"), [("raises", "raised KeyError"), ("short", "3 values for 4"), ("nan", "returned nan")]
)
def test_a_bad_reward_is_named(tmp_path, how, message):
    with pytest.raises(RewardError, match=message) as error:
        run(tmp_path, reward=RewardSum([RewardTerm(BadReward(how), "gold")]))
    assert "'gold'" in str(error.value)


def test_a_forgotten_engine_refresh_is_an_error_not_a_slow_failure(tmp_path):
    with pytest.raises(StaleEngineError, match=r"add lqrl\.callbacks\.EngineRefresh to trainer\.callbacks"):
        run(tmp_path, callbacks=[SamplerFeedback()])


def test_an_engine_that_is_refreshed_once_only_is_stale_in_the_second_iteration(tmp_path):
    class Once(EngineRefresh):
        def on_train_batch_end(self, *_):
            pass

    with pytest.raises(StaleEngineError, match="serves policy version 0, the learner is at 1"):
        run(tmp_path, callbacks=[Once(), SamplerFeedback()])


def test_staleness_is_allowed_when_asked_for(tmp_path):
    class Once(EngineRefresh):
        def on_train_batch_end(self, *_):
            pass

    module = run(tmp_path, callbacks=[Once(), SamplerFeedback()], max_staleness=2)
    assert (module.policy_version, module.engine.policy_version) == (3, 0)


def test_a_forgotten_sampler_feedback_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"add lqrl\.callbacks\.SamplerFeedback"):
        run(tmp_path, callbacks=[EngineRefresh()])


def test_a_group_of_one_has_no_baseline(tmp_path):
    with pytest.raises(ValueError, match="group"):
        run(tmp_path, budget=UniformBudget(1))


def test_a_loss_that_corrects_the_mismatch_itself_is_not_corrected_twice():
    with pytest.raises(ValueError, match="NoCorrection"):
        make_module(loss=TBPOLoss())
    make_module(loss=TBPOLoss(), correction=NoCorrection())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run(tmp_path / "a")
    path = tmp_path / "a" / "x.ckpt"
    trainer = make_trainer(tmp_path / "a", epochs=1, limit_val_batches=0)
    trainer.fit(make_module(), make_data())
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    weight = "policy.model.layers.0.mlp.up_proj.weight"
    checkpoint["state_dict"][weight] = checkpoint["state_dict"][weight][:100]
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match=r"checkpoint is of another model: 1 tensors differ, first .*up_proj"):
        run(tmp_path / "b", epochs=2, resume=path)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1, limit_val_batches=0)
    trainer.fit(make_module(), make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    del checkpoint["lqrl"]
    torch.save(checkpoint, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="not written by lqrl"):
        run(tmp_path / "b", epochs=2, resume=tmp_path / "x.ckpt")


def test_resuming_with_other_prompts_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1, limit_val_batches=0)
    trainer.fit(make_module(), make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="resume with the same training data"):
        run(tmp_path / "b", epochs=2, data=make_data(train=PromptSource(Sort(size=64))), resume=tmp_path / "x.ckpt")


def test_weights_that_are_not_finite_never_reach_the_engine(tmp_path):
    module = make_module()
    make_trainer(tmp_path, epochs=1, limit_val_batches=0).fit(module, make_data())
    with torch.no_grad():
        module.policy.model.layers[1].mlp.down_proj.weight[3, 5] = math.nan
    module.policy_version += 1
    from lqrl.learner.refresh import refresh_engines

    with pytest.raises((RefreshError, ValueError), match=r"layers\.1\.mlp\.down_proj"):
        refresh_engines(module)
    with pytest.raises(StaleEngineError):
        module.collect(make_prompts())


def make_prompts():
    data = make_data()
    data.setup("fit")
    return [data.train_prompts[0]]


def test_the_mismatch_guard_acts_after_its_patience(tmp_path):
    with pytest.warns(UserWarning, match="for 2 iterations"):
        run(tmp_path / "warn", callbacks=[EngineRefresh(), SamplerFeedback(), MismatchGuard(max_k3=-1.0, patience=2)])
    with pytest.raises(MismatchError, match="engine and learner differ"):
        run(
            tmp_path / "raise",
            callbacks=[EngineRefresh(), SamplerFeedback(), MismatchGuard(min_ess=2.0, patience=1, action="raise")],
        )


def test_unknown_format_and_dtype_are_refused_by_name():
    with pytest.raises(ValueError, match="int8_w8a8"):
        make_module(scheme="int7_w7a7")
    with pytest.raises(ValueError, match="bfloat16"):
        make_module(dtype="fp8")


def test_a_model_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="asset:countdown_policy"):
        run(tmp_path, model="./no/such/model")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--model.init_args.groupsize=8", "groupsize"),
        ("--model.init_args.scheme=int7_w7a7", "int7_w7a7"),
        ("--model.init_args.loss=lqrl.algorithms.PPOLoss", "PPOLoss"),
        ("--data.init_args.prompts=3", "prompts"),
    ],
)
def test_the_command_line_refuses_what_it_does_not_know(capsys, argument, message):
    with pytest.raises((SystemExit, ValueError)) as error:
        command(["fit", "--config", "configs/quickstart.yaml", argument])
    assert message in capsys.readouterr().err + str(error.value)
