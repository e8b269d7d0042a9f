"""`PhaseTimer`: a run's wall time, iteration by iteration and phase by phase."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from runs import make_data, make_module, make_trainer

from lqrl import phases
from lqrl.algorithms import KLPenalty
from lqrl.callbacks import EngineRefresh, PhaseTimer, SamplerFeedback
from lqrl.engines import TorchEngineFactory
from lqrl.fabric import fit
from lqrl.learner.update import all_max
from lqrl.phases import PHASES, PhaseClock

NAMES = [f"time/{name}" for name in (*PHASES, "other")]


class Read(L.Callback):
    """What was logged after each iteration, and the wall time up to there."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.lines: list[dict[str, float]] = []
        self.started = self.ended = 0.0
        self.stop_at = stop_at

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.ended = time.perf_counter()
        self.lines.append({n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("time/")})
        if len(self.lines) == self.stop_at:
            raise RuntimeError("enough")


def test_a_run_is_accounted_for(tmp_path: Path):
    read = Read()
    engine = TorchEngineFactory(max_num_seqs=32, sleep_level=1)
    module = make_module(
        num_minibatches=2, kl=KLPenalty(1e-2), validate_full_precision=True, engine=engine, scheme="none+kv_fp8_static"
    )
    make_trainer(tmp_path, epochs=2, callbacks=[EngineRefresh(), SamplerFeedback(), PhaseTimer(), read]).fit(
        module, make_data()
    )
    assert len(read.lines) == 6
    for i, line in enumerate(read.lines):
        assert list(line) == [*NAMES, "time/iteration"]
        assert line["time/iteration"] == pytest.approx(sum(line[name] for name in NAMES), rel=1e-4)
        # An epoch has three iterations, and its validation counts for the one that follows.
        assert all((line[name] > 0) == (name != "time/validate" or i == 3) for name in NAMES), (i, line)
    total = sum(line["time/iteration"] for line in read.lines)
    assert total == pytest.approx(read.ended - read.started, rel=0.05, abs=0.05)
    assert not phases._running


def test_a_run_that_fails_leaves_no_clock_behind(tmp_path: Path):
    with pytest.raises(RuntimeError, match="enough"):
        make_trainer(
            tmp_path, epochs=1, callbacks=[EngineRefresh(), SamplerFeedback(), PhaseTimer(), Read(stop_at=1)]
        ).fit(make_module(), make_data())
    assert not phases._running


def test_an_explicit_loop_reads_the_clock_itself():
    laps: list[dict[str, float]] = []
    with PhaseClock() as clock:
        fabric = L.Fabric(accelerator="cpu", devices=1)
        fit(fabric, make_module(), make_data(), iterations=2, log=lambda i, metrics: laps.append(clock.lap()))
    worked = {"generate", "reward", "forward_backward", "step", "refresh", "other"}
    assert [{name for name, seconds in lap.items() if seconds > 0} for lap in laps] == [worked, worked]


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(all_max(torch.tensor([1.0 + rank, 2.0 - rank])), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_log_the_maximum_of_each_number(tmp_path: Path):
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    assert [torch.load(tmp_path / f"{rank}.pt").tolist() for rank in range(2)] == [[2.0, 2.0], [2.0, 2.0]]
