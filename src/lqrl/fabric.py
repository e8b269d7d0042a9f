"""The same iteration as an explicit Fabric loop, for those who want to own the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from lqrl.callbacks.sampler_feedback import feed_back
from lqrl.data import PromptDataModule
from lqrl.engines.base import WeightStage
from lqrl.learner.checkpoint import check_checkpoint, learner_state, restore_learner
from lqrl.learner.frozen import without_frozen
from lqrl.learner.kv_scales import CALIBRATION_PROMPTS
from lqrl.learner.module import PolicyModule
from lqrl.learner.options import check_data, check_precision
from lqrl.learner.refresh import refresh_engines, refresh_metrics
from lqrl.learner.update import step_schedule, sum_ratios
from lqrl.rollouts import rollout_metrics

Log = Callable[[int, dict[str, float]], None]


def fit(
    fabric: L.Fabric,
    module: PolicyModule,
    data: PromptDataModule,
    *,
    iterations: int,
    stages: Sequence[WeightStage] = (),
    log: Log = lambda iteration, metrics: None,
    checkpoint: str | Path | None = None,
) -> PolicyModule:
    """Train for ``iterations`` iterations in all, those of a loaded checkpoint included.

    Args:
        fabric: launched.
        module: the learner; only its ``forward`` goes through Fabric's wrapper.
        data: prompts and sampler.
        iterations: when to stop.
        stages: change the weights on their way to the engine.
        log: called on every rank with the iteration and its metrics.
        checkpoint: a directory or file; loaded first if it exists, written at the end.

    Returns:
        The trained module.

    Raises:
        ValueError: when Fabric would change the forward pass's precision, or minibatches outnumber rows.
    """
    _prepare(fabric, module, data)
    forward, optimizer = fabric.setup(module, module.optimizer(module.trained_parameters()))
    module.build_engines(fabric.device)
    scheduler: Any = None if module.lr_scheduler is None else module.lr_scheduler(optimizer)
    if checkpoint is not None and Path(checkpoint).exists():
        _load(fabric, Path(checkpoint), module, data, optimizer, scheduler)
    _ship_first(module, stages, iterations)
    while module.iteration < iterations:
        for batch in data.train_dataloader():
            rollouts = module.collect(batch.prompts)
            train_batch, credit = module.learn_from(rollouts)
            learned = module.optimize(
                train_batch,
                forward=forward,
                optimizer=optimizer,
                backward=fabric.backward,
                no_sync=lambda: fabric.no_backward_sync(forward),
            )
            module.finish_iteration(rollouts)
            step_schedule(scheduler)
            report = refresh_engines(module, stages, full_precision=False)
            feed_back(data, rollouts.outcomes)
            metrics = {**sum_ratios([rollout_metrics(rollouts)], fabric.device), **credit, **learned}
            if report is not None:
                metrics.update(refresh_metrics(report, module.scheme))
            metrics.update(item for stage in stages for item in stage.metrics.items())
            log(module.iteration - 1, metrics)
            if module.iteration >= iterations:
                break
    if checkpoint is not None:
        _save(fabric, Path(checkpoint), module, data, optimizer, scheduler)
    return module


def _prepare(fabric: L.Fabric, module: PolicyModule, data: PromptDataModule) -> None:
    """What the Trainer's hooks do before a fit."""
    check_precision(fabric.strategy.precision.precision)
    if module.validate_full_precision:
        raise ValueError("fabric.fit never validates: set validate_full_precision=False, or call the engines yourself")
    module.configure_model()
    data.setup("fit")
    check_data(module, data)
    module.beliefs, module.draw_more = data.beliefs, data.refill if module.refill is not None else None
    module.calibration_prompts = data.first_prompts(CALIBRATION_PROMPTS)


def _ship_first(module: PolicyModule, stages: Sequence[WeightStage], iterations: int) -> None:
    for stage in stages:
        stage.begin(iterations)
    refresh_engines(module, stages)


def _state(module: PolicyModule, data: PromptDataModule, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "state_dict": without_frozen(module, module.state_dict()),
        "optimizer": optimizer.state_dict(),
        "lr_schedulers": [] if scheduler is None else [scheduler.state_dict()],
        "data": data.state_dict(),
        "lqrl": learner_state(module),
    }


def _save(fabric: L.Fabric, path: Path, module: PolicyModule, data: PromptDataModule, *rest: Any) -> None:
    fabric.save(path, _state(module, data, *rest))


def _load(
    fabric: L.Fabric, path: Path, module: PolicyModule, data: PromptDataModule, optimizer: Any, scheduler: Any
) -> None:
    state = fabric.load(path)
    learner = check_checkpoint(module, state, resumes=True)
    module.load_state_dict(state["state_dict"])
    optimizer.load_state_dict(state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(state["lr_schedulers"][0])
    data.load_state_dict(state["data"])
    restore_learner(module, learner)
