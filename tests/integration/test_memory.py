"""Engine and learner give their memory back and forth: the same run, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from runs import ACCELERATOR, DEVICE, make_data, make_module, make_trainer, weights

from lqrl.callbacks import EngineRefresh, OptimizerOffload, PhaseTimer, SamplerFeedback
from lqrl.engines import RolloutEngine, TorchEngine, TorchEngineFactory
from lqrl.learner import PolicyModule
from lqrl.rollouts import Rollouts
from lqrl.types import TrainBatch

# What is tested here of the CPU is that nothing changes.
pytestmark = pytest.mark.filterwarnings("ignore:OptimizerOffload. the policy trains on the CPU")
SLEEPY = TorchEngineFactory(max_num_seqs=32, sleep_level=1)


class Watched(PolicyModule):
    """Notes what engine and optimizer hold when learning begins."""

    cache_bytes: tuple[int, ...] = ()
    states: tuple[int, ...] = ()

    def learn_from(self, rollouts: Rollouts) -> tuple[TrainBatch, dict[str, float]]:
        learned = super().learn_from(rollouts)
        engines = [e for e in (self.engine, self.full_engine) if isinstance(e, TorchEngine)]
        self.cache_bytes += tuple(engine.cache_bytes for engine in engines)
        held = [t for s in self.trainer.optimizers[0].state.values() for t in s.values() if t.dim()]
        self.states += (len({t.untyped_storage().data_ptr() for t in held}),)
        return learned


def fitted(folder: Path, epochs: int, ours: bool, checkpoint: str | None = None, **options: Any) -> Watched:
    callbacks: list[L.Callback] = [*([OptimizerOffload()] if ours else []), EngineRefresh(), SamplerFeedback()]
    module = make_module(Watched, **({"engine": SLEEPY} if ours else {}), num_minibatches=2, **options)
    assert isinstance(module, Watched)
    trainer = make_trainer(folder, epochs=epochs, callbacks=[*callbacks, PhaseTimer()])
    trainer.fit(module, make_data(), ckpt_path=checkpoint)
    return module


def tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {name: t for key, inner in items for name, t in tensors(inner, f"{path}/{key}").items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    assert not [name for name, t in ours.items() if not torch.equal(t.cpu(), theirs[name].cpu())]


@pytest.mark.skipif(ACCELERATOR != "cpu", reason="a GPU may sum gradients in another order each time")
@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
def test_a_run_that_gives_memory_away_is_the_same_run(tmp_path: Path, exact: bool) -> None:
    plain = fitted(tmp_path / "plain", 2, False, exact=exact)
    ours = fitted(tmp_path / "ours", 2, True, exact=exact)
    assert_same(weights(ours), weights(plain))
    assert ours.cache_bytes == (0,) * 6
    assert min(plain.cache_bytes) > 0
    # Before the first step there is no state; then all of it lies in one piece.
    assert ours.states == (0, 1, 1, 1, 1, 1)
    metrics = ours.trainer.callback_metrics
    optimizer = ours.trainer.optimizers[0]
    moved = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert float(metrics["memory/optimizer_bytes"]) == moved > 0
    assert float(metrics["time/memory"]) > 0
    assert float(plain.trainer.callback_metrics["time/memory"]) == 0
    # Saved while the state is in main memory, and resumed from there.
    files = [tmp_path / name / "epoch0.ckpt" for name in ("ours", "plain")]
    saved = [torch.load(file, weights_only=True)["optimizer_states"] for file in files]
    assert_same(*map(tensors, saved))
    resumed = fitted(tmp_path / "resumed", 2, True, str(files[0]), exact=exact)
    assert_same(weights(resumed), weights(plain))
    assert resumed.states == (1, 1, 1)


def test_an_engine_of_validation_gives_its_cache_away_too(tmp_path: Path) -> None:
    module = fitted(tmp_path, 1, True, validate_full_precision=True)
    assert module.cache_bytes == (0,) * 6
    assert module.validation.history
    assert set(module.validation.history[-1][1]) >= {"val/pass@1", "val_full/pass@1"}


def test_an_engine_that_sleeps_is_woken_for_rollouts(tmp_path: Path) -> None:
    module = fitted(tmp_path, 1, True)
    engine: RolloutEngine = module.engine
    engine.sleep()
    data = make_data()
    data.setup("fit")
    assert data.train_prompts is not None
    rollouts = module.collect([data.train_prompts[i] for i in range(2)])
    assert rollouts.generated_tokens > 0


@pytest.mark.skipif(ACCELERATOR != "cpu", reason="is about the CPU")
def test_on_the_cpu_it_says_that_nothing_has_to_move(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, epochs=1, callbacks=[OptimizerOffload(), EngineRefresh(), SamplerFeedback()])
    with pytest.warns(UserWarning, match="is in main memory already") as warned:
        trainer.fit(make_module(), make_data())
    assert len([w for w in warned if "OptimizerOffload" in str(w.message)]) == 1


def test_a_run_that_fails_leaves_a_state_that_can_be_saved(tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("on purpose")

    offload, module = OptimizerOffload(), make_module(optimizer=partial(torch.optim.AdamW, lr=3e-4))
    trainer = make_trainer(tmp_path, epochs=1, callbacks=[offload, EngineRefresh(), SamplerFeedback(), Fails()])
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, make_data())
    states = trainer.optimizers[0].state_dict()["state"]
    assert len(states) > 10
    assert all(bool(t.isfinite().all()) for state in states.values() for t in state.values())
    assert module.policy.device.type in ("cpu", DEVICE.type)
