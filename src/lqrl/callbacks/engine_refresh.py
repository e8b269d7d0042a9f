"""`EngineRefresh`: keep the rollout engine at the learner's policy version."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L

from lqrl.callbacks.run_folder import keeps_files
from lqrl.engines.base import WeightStage
from lqrl.learner.module import PolicyModule
from lqrl.learner.refresh import refresh_engines, refresh_metrics


class EngineRefresh(L.Callback):
    """Ship the learner's weights to its engines before anything is generated with them.

    Refreshes before sanity checking, training, validation and each iteration, and after each iteration, whenever
    version or weights differ from what was shipped. A state that a strategy restores late (``ModelParallelStrategy``
    does, after ``on_fit_start``) is thus seen.

    Logged after each iteration: `lqrl.learner.refresh.refresh_metrics` and the stages' own.

    Args:
        stages: change the exported weights on their way to the rollout engine, in order, such as
            `lqrl.learner.RolloutNoise`.
    """

    def __init__(self, stages: Sequence[WeightStage] = ()) -> None:
        self.stages = list(stages)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a second one, which would find the engine fresh and do nothing.

        Raises:
            ValueError: when the Trainer has several.
        """
        count = sum(isinstance(callback, EngineRefresh) for callback in vars(trainer)["callbacks"])
        if count > 1:
            raise ValueError(
                f"trainer.callbacks has EngineRefresh {count} times, and the stages of all but the first would have no "
                "effect; keep one, with all stages"
            )

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """First weights, before the sanity check generates."""
        self._refresh(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """First weights of a run without sanity check, or those of a restored checkpoint."""
        assert isinstance(pl_module, PolicyModule)
        if keeps_files(trainer):  # a dry run says nothing about the length of the recipe
            for stage in self.stages:
                stage.begin(_iterations(trainer, pl_module))
        self._refresh(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validation engines, and ``trainer.validate`` on its own."""
        self._refresh(pl_module)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Weights that another callback has just swapped in (weight averaging)."""
        self._refresh(pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Weights that changed outside an iteration."""
        self._refresh(pl_module, full_precision=False)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The new version, after each iteration."""
        assert isinstance(pl_module, PolicyModule)
        report = refresh_engines(pl_module, self.stages, full_precision=False)
        if report is None:
            return
        metrics, quantizes = refresh_metrics(report, pl_module.scheme), pl_module.scheme.quantizes
        stepped = trainer.callback_metrics.get("train/skipped_steps", 0.0) == 0.0
        if stepped and report.elements_changed_fraction == 0.0 and report.codes_changed_fraction == 0.0:
            warnings.warn(
                f"refresh to version {report.policy_version} changed no element of the engine: the optimizer's steps "
                "are below the resolution of the exported weights; raise the learning rate"
                + (", or add UAQ to transforms" if quantizes else ""),
                stacklevel=1,
            )
        of_stages = {name: value for stage in self.stages for name, value in stage.metrics.items()}
        pl_module.log_dict(metrics | of_stages, batch_size=1)

    def _refresh(self, module: L.LightningModule, *, full_precision: bool = True) -> None:
        assert isinstance(module, PolicyModule)
        refresh_engines(module, self.stages, full_precision=full_precision)


def _iterations(trainer: L.Trainer, module: PolicyModule) -> float:
    """Of the whole run; ``max_steps`` counts optimizer steps."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    by_epochs = math.inf if epochs is None or epochs < 0 else epochs * float(trainer.num_training_batches)
    by_steps = math.inf if steps < 0 else math.ceil(steps / (module.num_minibatches * module.num_epochs))
    return min(by_epochs, by_steps)
