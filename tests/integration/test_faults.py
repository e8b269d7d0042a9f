"""What goes wrong says so, and names the fix."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import warnings
from dataclasses import dataclass

import pytest
import torch
from rich.console import Console
from runs import make_data, make_module, make_trainer

from lqrl.algorithms import GSPOLoss, NoCorrection, TBPOLoss
from lqrl.callbacks import EngineRefresh, MismatchError, MismatchGuard, RolloutTable, SamplerFeedback
from lqrl.cli import run as command
from lqrl.data import PromptSource, Sort, UniformBudget
from lqrl.engines import RefreshError, StaleEngineError
from lqrl.engines.transaction import model_digest
from lqrl.quant import QuantScheme, TensorFormat
from lqrl.rewards import OverlongPenalty, RewardError, RewardFn, RewardSum, RewardTerm
from lqrl.rollouts import check_fresh
from lqrl.testing import ScriptedEngine
from lqrl.types import SamplingParams


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


@pytest.mark.parametrize(("scheme", "quantizes"), [("none", False), ("none+kv_int8", False), ("int8_w8a8", True)])
def test_codes_are_logged_and_spoken_of_only_where_there_are_some(tmp_path, scheme, quantizes):
    module = make_module(scheme=scheme, optimizer=lambda p: torch.optim.SGD(p, lr=1e-30))
    trainer = make_trainer(tmp_path, epochs=1)
    with pytest.warns(UserWarning, match="changed no element of the engine") as warned:
        trainer.fit(module, make_data(iterations_per_epoch=1))
    assert ("refresh/codes_changed_fraction" in trainer.callback_metrics) == quantizes
    assert float(trainer.callback_metrics["refresh/elements_changed_fraction"]) == 0
    message = next(str(w.message) for w in warned if "changed no element" in str(w.message))
    assert ("UAQ" in message) == quantizes


def test_an_engine_that_is_refreshed_once_only_is_stale_in_the_second_iteration(tmp_path):
    class Once(EngineRefresh):
        def on_train_batch_start(self, *_):
            pass

        def on_train_batch_end(self, *_):
            pass

    with pytest.raises(StaleEngineError, match="serves policy version 0, the learner is at 1"):
        run(tmp_path, callbacks=[Once(), SamplerFeedback()])


def test_staleness_is_allowed_when_asked_for(tmp_path):
    class Once(EngineRefresh):
        def on_train_batch_start(self, *_):
            pass

        def on_train_batch_end(self, *_):
            pass

    module = run(tmp_path, callbacks=[Once(), SamplerFeedback()], max_staleness=2)
    assert (module.policy_version, module.engine.policy_version) == (3, 0)


def test_a_forgotten_sampler_feedback_is_an_error(tmp_path):
    module, trainer = make_module(), make_trainer(tmp_path, epochs=1, callbacks=[EngineRefresh()])
    with pytest.raises(ValueError, match=r"sampler: VADESampler .* add lqrl\.callbacks\.SamplerFeedback"):
        trainer.fit(module, make_data())
    assert "engine" not in vars(module)  # before anything is paid for


def test_a_second_refresh_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="has EngineRefresh 2 times, and the stages of all but the first would have no"
    ):
        run(tmp_path, callbacks=[EngineRefresh(), SamplerFeedback(), EngineRefresh()])


def test_a_promise_of_feedback_ends_with_its_trainer(tmp_path):
    data = make_data(iterations_per_epoch=1)
    make_trainer(tmp_path, epochs=1, limit_val_batches=0).fit(make_module(), data)
    with pytest.raises(ValueError, match=r"add lqrl\.callbacks\.SamplerFeedback"):
        run(tmp_path, callbacks=[EngineRefresh()], data=data)


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


@dataclass(frozen=True)
class PartlyJudged(RewardFn):
    """Cannot judge the first completion of a group; a half where it can."""

    def __call__(self, prompt, completions):
        return [None, *(float(c.text.count("+") > 0) for c in completions[1:])]


def test_completions_that_nobody_can_judge_pass_through_the_whole_loop(tmp_path):
    module = make_module(reward=RewardSum([RewardTerm(PartlyJudged(), "plus")]), val_samples=2)
    trainer = make_trainer(tmp_path, epochs=1, callbacks=[EngineRefresh(), SamplerFeedback(), RolloutTable(0)])
    trainer.fit(module, make_data())
    batch = module.last_rollouts.batch
    judged = batch.accuracy[~batch.accuracy.isnan()]
    assert float(trainer.callback_metrics["rollout/accuracy"]) == pytest.approx(float(judged.mean()))
    assert all(trials == 3 for _, _, trials in module.last_rollouts.outcomes)
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert json.loads(lines[0], parse_constant=lambda name: pytest.fail(name))["reward"] is None


def test_an_accuracy_outside_zero_and_one_is_refused(tmp_path):
    with pytest.raises(RewardError, match="is_accuracy: true"):
        run(tmp_path, reward=RewardSum([RewardTerm(OverlongPenalty(max_tokens=4, cache_tokens=2), "overlong")]))


def test_weights_loaded_under_the_same_version_reach_the_engine(tmp_path):
    module, data = make_module(val_samples=1), make_data()
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.fit(module, data)
    digest = model_digest(module.engine.decoder.model)
    trainer.validate(module, data, verbose=False)
    assert model_digest(module.engine.decoder.model) == digest
    module.load_state_dict({n: t * 0.5 for n, t in module.state_dict().items()})
    trainer.validate(module, data, verbose=False)
    assert model_digest(module.engine.decoder.model) != digest


def test_an_engine_ahead_of_the_learner_is_refused():
    engine = ScriptedEngine(lambda p, i: [1])
    engine.policy_version = 6
    with pytest.raises(StaleEngineError, match="back at 3"):
        check_fresh(engine, 3, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scheme": "none"}, "scheme=int8_w8a8"),
        ({"aligned": False}, "aligned=True"),
        ({"sampling": SamplingParams(max_tokens=12, temperature=0.5)}, "temperature=1.0"),
        ({"lr_scheduler": lambda o: torch.optim.lr_scheduler.ConstantLR(o)}, "lr_scheduler"),
    ],
)
def test_a_run_is_not_continued_under_other_options(tmp_path, changed, message):
    trainer = make_trainer(tmp_path, epochs=1, limit_val_batches=0)
    trainer.fit(make_module(), make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "b", epochs=2, resume=tmp_path / "x.ckpt", **changed)


@pytest.mark.parametrize(
    ("written", "changed", "says"),
    [
        ("int8_w8a8", {"scheme": "fp8_per_channel"}, r"with scheme=fp8_per_channel \(checkpoint: int8_w8a8\)$"),
        ("none", {"scheme": "int8_w8a8"}, r"with scheme=int8_w8a8 \(checkpoint: none\)$"),
        ("int8_w8a8", {"exact": True}, r"with exact=True \(checkpoint: False\)$"),
        ("int8_w8a8", {}, None),
    ],
)
def test_a_validation_under_other_options_says_so(tmp_path, written, changed, says):
    trainer = make_trainer(tmp_path, epochs=1, limit_val_batches=0)
    trainer.fit(make_module(scheme=written), make_data(iterations_per_epoch=1))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    module = make_module(**({"scheme": written} | changed))
    validation = make_trainer(tmp_path / "b", epochs=1, limit_val_batches=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        validation.validate(module, make_data(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    said = [str(w.message) for w in caught if "checkpoint was written" in str(w.message)]
    assert len(said) == (says is not None)
    assert says is None or re.search(says, said[0])
    assert module.policy_version == 1
    assert "val/pass@1" in validation.callback_metrics


def test_a_checkpoint_without_the_scales_of_the_scheme_is_refused_by_that_name(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1, limit_val_batches=0)
    trainer.fit(make_module(), make_data(iterations_per_epoch=1))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"scheme int8_w8a8, the config says int8_w8a8\+kv_fp8_static: one"):
        trainer.validate(make_module(scheme="int8_w8a8+kv_fp8_static"), make_data(), ckpt_path=tmp_path / "x.ckpt")


def test_a_trainer_that_changes_the_precision_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1, precision="bf16-mixed")
    with pytest.raises(ValueError, match="dtype: bfloat16"):
        trainer.fit(make_module(), make_data())


def test_acr_with_a_sequence_loss_is_refused_before_anything_is_sampled():
    with pytest.raises(ValueError, match="SequenceTIS"):
        make_module(loss=GSPOLoss())


def test_a_plateau_schedule_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        run(tmp_path, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_model_output_is_not_read_as_markup(capsys):
    record = {
        "iteration": 0, "prompt_id": 1, "prompt": "[b]", "completion": "[/INST] [red]x", "reward": 1.0,
        "finish_reason": "stop",
    }  # fmt: skip
    Console().print(RolloutTable().table([record], 0))
    assert "[/INST] [red]x" in capsys.readouterr().out


def test_a_copied_module_generates(tmp_path):
    module = make_module()
    make_trainer(tmp_path, epochs=1, limit_val_batches=0).fit(module, make_data())
    prompts = make_prompts()
    copied = copy.deepcopy(module.engine)
    ours = copied.generate(prompts, SamplingParams(max_tokens=8), seed=1)
    theirs = module.engine.generate(prompts, SamplingParams(max_tokens=8), seed=1)
    assert ours[0][0].token_ids.tolist() == theirs[0][0].token_ids.tolist()


CUSTOM = QuantScheme("mine", TensorFormat("int8", "channel"), TensorFormat("int8", "token", dynamic=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": dataclasses.replace(CUSTOM, skip=("*.down_proj",))}, "checkpoint was written with formats="),
        ({"scheme": CUSTOM, "master_dtype": "bfloat16"}, "master_dtype=torch.float32, the config says torch.bfloat16"),
        ({"scheme": CUSTOM, "backward": "dequantized"}, "backward=high_precision, the config says dequantized"),
    ],
)
@pytest.mark.filterwarnings("ignore:master_dtype is bfloat16")
def test_a_run_does_not_resume_as_another(tmp_path, change, message):
    trainer = make_trainer(tmp_path, epochs=1, limit_val_batches=0)
    trainer.fit(make_module(scheme=CUSTOM), make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path / "b", epochs=2, limit_val_batches=0).fit(
            make_module(**change), make_data(), ckpt_path=tmp_path / "x.ckpt"
        )


@pytest.mark.parametrize("options", [{"scheme": "none"}, {"aligned": False}])
def test_an_option_of_aligned_layers_without_such_is_refused(options):
    with pytest.raises(ValueError, match="backward: dequantized belongs to aligned low-bit layers"):
        make_module(backward="dequantized", **options)
