"""`PhaseTimer`: where the wall time of an iteration goes."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch

from lqrl.learner.update import all_max
from lqrl.phases import PhaseClock


class PhaseTimer(L.Callback):
    """Log the wall time of each iteration by phase: ``time/generate`` and so on, see docs/metrics.md.

    An iteration lasts from the end of the one before, so what happens in between counts too: validation, checkpoints,
    data loading. What follows the last iteration is not logged. Put it after `EngineRefresh` in the list of
    callbacks, or a refresh counts for the next iteration.

    On each rank the phases add up to ``time/iteration``. Logged is the maximum over ranks, of each number on its own.

    Args:
        cuda_sync: wait for the GPU at the boundaries of phases, so that a phase is charged with the work it launched.
            Otherwise the phase is charged that happens to wait for it, and nothing is slowed down.
    """

    def __init__(self, cuda_sync: bool = True) -> None:
        self.cuda_sync = cuda_sync
        self._clock = PhaseClock()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first iteration begins."""
        device = pl_module.device
        waits = self.cuda_sync and device.type == "cuda"
        self._clock = PhaseClock(partial(torch.cuda.synchronize, device)) if waits else PhaseClock()
        self._clock.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """An iteration ends, and the next begins."""
        seconds = self._clock.lap()
        seconds["iteration"] = sum(seconds.values())
        slowest = all_max(torch.tensor(list(seconds.values()), dtype=torch.float64, device=pl_module.device))
        named = zip(seconds, slowest.tolist(), strict=True)
        pl_module.log_dict({f"time/{name}": value for name, value in named}, batch_size=1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen no more."""
        self._clock.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """A run that fails has no end of training."""
        self._clock.stop()
