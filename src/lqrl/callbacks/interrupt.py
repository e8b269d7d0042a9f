"""`InterruptCheckpoint`: Ctrl-C and SIGTERM end a run with a checkpoint that resumes exactly."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from lqrl.callbacks.run_folder import checkpoint_folder, run_folder

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptCheckpoint(Checkpoint):
    """First Ctrl-C or SIGTERM: finish the iteration, save ``interrupted.ckpt``, stop. Second: stop at once.

    An iteration is saved whole: a checkpoint in the middle of one would have drawn prompts that were never learned.
    (A `Checkpoint` by class so that Lightning runs it after all other callbacks of the iteration.)
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen; only the main thread can."""
        self.received = None
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._receive) for s in _SIGNALS}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop, on all ranks together, when any rank was told to."""
        if not trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            return
        self._save(trainer)
        raise KeyboardInterrupt

    def _save(self, trainer: L.Trainer) -> None:
        path = checkpoint_folder(trainer) / "interrupted.ckpt"
        trainer.save_checkpoint(path)
        folder = run_folder(trainer)
        rank_zero_info(
            f"Stopped after a whole iteration. Resume with:\n"
            f"  lqrl fit --config {folder}/config.yaml --ckpt_path {path}"
        )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A signal after the last iteration: nothing is left to stop, but the promise to save holds."""
        if trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            self._save(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop listening."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop listening."""
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._restore()
            raise KeyboardInterrupt
        self.received = number
        name = signal.Signals(number).name
        print(f"\n{name}: finishing the iteration, then saving. Once more stops at once.", flush=True)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
