"""N iterations equal k, stop, resume, N - k: bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from runs import make_data, make_module, make_trainer, weights

from lqrl.callbacks import EngineRefresh, InterruptCheckpoint, MismatchGuard, RolloutTable, SamplerFeedback
from lqrl.data import PromptDataModule
from lqrl.engines.base import EngineSpec, EngineUnavailableError, RefreshReport
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.learner import PolicyModule
from lqrl.quant import SmoothQuant, UpdateAwareScaling
from lqrl.rollouts import Rollouts


class Traced(PolicyModule):
    """Keeps what every iteration sampled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trace: list[tuple[int, list[int], torch.Tensor, torch.Tensor]] = []

    def finish_iteration(self, rollouts: Rollouts) -> None:
        batch = rollouts.batch
        self.trace.append((self.iteration, batch.prompt_ids.tolist(), batch.input_ids, batch.rollout_logprobs))
        super().finish_iteration(rollouts)


class OtherData(PromptDataModule):
    """A subclass: Lightning keys the state of a datamodule by class name."""


class OtherFeedback(SamplerFeedback):
    """A subclass of a callback."""


class OtherGuard(MismatchGuard):
    """A subclass of a callback with state."""


def fit(
    folder: Path, epochs: int, *, resume: Path | None = None, data: type[PromptDataModule] = PromptDataModule,
    callbacks: list[L.Callback] | None = None, **options: Any,
) -> Traced:  # fmt: skip
    module = make_module(Traced, **options)
    assert isinstance(module, Traced)
    make_trainer(folder, epochs=epochs, callbacks=callbacks).fit(module, make_data(data), ckpt_path=resume)
    return module


def assert_same_run(whole: Traced, *parts: Traced) -> None:
    pieces = [entry for part in parts for entry in part.trace]
    assert [e[0] for e in pieces] == [e[0] for e in whole.trace]
    for ours, theirs in zip(pieces, whole.trace, strict=True):
        assert ours[1] == theirs[1], f"other prompts in iteration {ours[0]}"
        assert torch.equal(ours[2], theirs[2]), f"other tokens in iteration {ours[0]}"
        assert torch.equal(ours[3], theirs[3]), f"other rollout log-probs in iteration {ours[0]}"
    last, expected = weights(parts[-1]), weights(whole)
    assert all(torch.equal(last[n], expected[n]) for n in expected)


ALGORITHMS = {
    "on_policy": {},
    "four_steps_with_schedule": {
        "num_minibatches": 2,
        "num_epochs": 2,
        "lr_scheduler": lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=8),
    },
    "calibrated_cache_after_smoothing": {"scheme": "fp8_per_channel+kv_fp8_static", "transforms": [SmoothQuant()]},
    "uaq_full_precision_learner": {"transforms": [UpdateAwareScaling(1.5)], "aligned": False},
}


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_six_iterations_equal_three_and_three(tmp_path, algorithm):
    options = ALGORITHMS[algorithm]
    whole = fit(tmp_path / "whole", 2, **options)
    first = fit(tmp_path / "first", 1, **options)
    second = fit(tmp_path / "second", 2, resume=tmp_path / "first" / "epoch0.ckpt", **options)
    assert len(whole.trace) == 6
    assert_same_run(whole, first, second)


def test_a_second_resume_is_as_exact_as_the_first(tmp_path):
    whole = fit(tmp_path / "whole", 3)
    first = fit(tmp_path / "a", 1)
    second = fit(tmp_path / "b", 2, resume=tmp_path / "a" / "epoch0.ckpt")
    third = fit(tmp_path / "c", 3, resume=tmp_path / "b" / "epoch1.ckpt")
    assert_same_run(whole, first, second, third)


def test_subclasses_restore_too(tmp_path):
    def callbacks() -> list[L.Callback]:
        return [EngineRefresh(), OtherFeedback(), OtherGuard(), RolloutTable(every_n_iterations=0, save=False)]

    whole = fit(tmp_path / "whole", 2, data=OtherData, callbacks=callbacks())
    first = fit(tmp_path / "first", 1, data=OtherData, callbacks=callbacks())
    checkpoint = tmp_path / "first" / "epoch0.ckpt"
    second = fit(tmp_path / "second", 2, resume=checkpoint, data=OtherData, callbacks=callbacks())
    assert_same_run(whole, first, second)


def test_a_run_continues_under_another_class_of_datamodule(tmp_path):
    # Lightning itself would restore nothing here, silently.
    whole = fit(tmp_path / "whole", 2)
    first = fit(tmp_path / "first", 1)
    second = fit(tmp_path / "second", 2, resume=tmp_path / "first" / "epoch0.ckpt", data=OtherData)
    assert_same_run(whole, first, second)


def test_a_checkpoint_in_the_middle_of_an_epoch_resumes_exactly(tmp_path):
    class StopAfterTwo(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if pl_iteration(trainer) == 2:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole = fit(tmp_path / "whole", 2, callbacks=[EngineRefresh(), SamplerFeedback(), StopAfterTwo()])
    rest = fit(tmp_path / "rest", 2, resume=tmp_path / "middle.ckpt")
    assert [e[0] for e in rest.trace] == [2, 3, 4, 5]
    head = make_module(Traced)
    head.trace = whole.trace[:2]
    assert_same_run(whole, head, rest)


def pl_iteration(trainer: L.Trainer) -> int:
    module = trainer.lightning_module
    assert isinstance(module, PolicyModule)
    return module.iteration


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_a_checkpoint_that_resumes_exactly(tmp_path, number):
    script = Path(__file__).with_name("interrupted_run.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("iteration 1"):
            break
    process.send_signal(number)
    rest = process.stdout.read()
    process.wait(timeout=120)
    assert process.returncode != 0
    checkpoint = tmp_path / "interrupted.ckpt"
    assert checkpoint.is_file(), rest
    assert str(checkpoint) in rest

    stopped = json.loads((tmp_path / "trace.json").read_text())
    resumed = fit(tmp_path / "resumed", 4, resume=checkpoint)
    whole = fit(tmp_path / "whole", 4)
    assert len(stopped) == 2
    assert resumed.trace[0][0] == len(stopped)
    assert [e[1] for e in whole.trace[: len(stopped)]] == stopped
    head = make_module(Traced)
    head.trace = whole.trace[: len(stopped)]
    assert_same_run(whole, head, resumed)


class Leaving(TorchEngine):
    """Is gone when the weights of the second iteration come, as a server may be."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], **options: Any) -> RefreshReport:
        if options["policy_version"] == 2:
            raise EngineUnavailableError("no server answers")
        return super().update_weights(weights, **options)


class LeavingFactory(TorchEngineFactory):
    """Builds one."""

    def __call__(self, spec: EngineSpec) -> Leaving:
        return Leaving(spec, self)


def test_an_engine_that_is_gone_after_an_iteration_leaves_a_checkpoint_that_resumes_exactly(tmp_path):
    module = make_module(Traced, engine=LeavingFactory(max_num_seqs=32))
    assert isinstance(module, Traced)
    trainer = make_trainer(tmp_path, epochs=4, callbacks=[SamplerFeedback(), EngineRefresh(), InterruptCheckpoint()])
    with pytest.raises(EngineUnavailableError):
        trainer.fit(module, make_data())
    resumed = fit(tmp_path / "resumed", 4, resume=tmp_path / "interrupted.ckpt")
    whole = fit(tmp_path / "whole", 4)
    assert (len(module.trace), resumed.trace[0][0]) == (2, 2)
    assert_same_run(whole, module, resumed)
