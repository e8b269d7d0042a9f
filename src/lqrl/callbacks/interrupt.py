"""`InterruptCheckpoint`: Ctrl-C and SIGTERM end a run with a checkpoint that resumes exactly."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from lqrl.callbacks.run_folder import checkpoint_folder, keeps_files, last_checkpoint, resume_command
from lqrl.engines.base import EngineUnavailableError, RefreshError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptCheckpoint(Checkpoint):
    """First Ctrl-C or SIGTERM: finish the iteration, save ``interrupted.ckpt``, stop. Second: stop at once.

    An iteration is saved whole: a checkpoint in the middle of one would have drawn prompts that were never learned.
    A run that is stopped at once says what it can be resumed from, and a dry run (``fast_dev_run``) saves nothing.
    A refresh that fails after an iteration was learned ends the run with that checkpoint, too.
    What resumes is said last, after what Lightning and the progress bar have to say of the interrupt.
    (A `Checkpoint` by class so that Lightning runs it after all other callbacks of the iteration.)
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._told = self._listens = False
        self._last_words = ""
        self._previous: dict[int, Any] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen; only the main thread can."""
        self.received, self._told, self._last_words = None, False, ""
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._receive) for s in _SIGNALS}
            self._listens = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop, on all ranks together, when any rank was told to."""
        if not trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            return
        self._last_words = self._save(trainer)
        raise KeyboardInterrupt

    def _save(self, trainer: L.Trainer, when: str = "Resume with") -> str:
        """What to tell."""
        self._told = True
        if not keeps_files(trainer):
            return "Stopped after a whole iteration of a dry run (fast_dev_run): nothing is saved."
        path = checkpoint_folder(trainer) / "interrupted.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        return f"Stopped after a whole iteration. {when}:\n  {resume_command(trainer, path)}"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A signal after the last iteration: nothing is left to stop, but the promise to save holds."""
        if trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            _tell(self._save(trainer))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop listening."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop listening; after Ctrl-C, say what there is to go on from; after a failed refresh, save it."""
        self._restore()
        failed = isinstance(exception, (RefreshError, EngineUnavailableError))
        # Other ranks may not have failed, and would not take part.
        if failed and not self._told and trainer.world_size == 1 and _has_learned(trainer):
            _tell(self._save(trainer, "The rollout engine has failed; when it is there again, resume with"))
        if isinstance(exception, KeyboardInterrupt) and not self._told:
            self._told = True
            self._last_words = what_is_left(trainer)
        if self._last_words:
            _tell(self._last_words)
            self._last_words = ""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._listens:  # Lightning's teardown puts back the handlers that it found, and this was one
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)
            return
        if self.received is not None:
            self._restore()
            raise KeyboardInterrupt
        self.received = number
        name = signal.Signals(number).name
        print(f"\n{name}: finishing the iteration, then saving. Once more stops at once.", flush=True)

    def _restore(self) -> None:
        if self._listens:
            self._listens = False
            for number, handler in self._previous.items():
                signal.signal(number, handler)


def _tell(text: str) -> None:
    sys.stdout.flush()  # where both are one file, what was printed before stands before
    rank_zero_info(text)


def _has_learned(trainer: L.Trainer) -> bool:
    """Whether an iteration has been learned and has not ended: a checkpoint goes on with the next."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return progress.completed < progress.processed == progress.ready


def what_is_left(trainer: L.Trainer) -> str:
    """What a run that was stopped between two checkpoints can go on from."""
    last = last_checkpoint(trainer)
    if last is not None:
        command = resume_command(trainer, last)
        return f"Stopped before the iteration ended. Resume from the last checkpoint with:\n  {command}"
    if trainer.ckpt_path is not None:
        return f"Stopped before anything new was saved. The same command resumes from {trainer.ckpt_path} again."
    return "Stopped before the first checkpoint: nothing is saved. Start again with the same command."
