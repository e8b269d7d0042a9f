"""`SignalWatch`: a run that learned nothing says so at its end."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L


class SignalWatch(L.Callback):
    """Warn after the last iteration when none of them took an optimizer step: the policy is the one it began with.

    A group whose rewards are all equal has no advantage, and an iteration of such groups alone has no row to learn from
    (``train/rows`` 0). ``lqrl fit`` adds the callback by itself.
    """

    def __init__(self) -> None:
        self._iterations = self._stepped = self._with_rows = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count anew; what a resumed run did before is not known."""
        self._iterations = self._stepped = self._with_rows = 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the iteration."""
        metrics = trainer.callback_metrics
        self._iterations += 1
        self._with_rows += float(metrics.get("train/rows", 1.0)) > 0
        self._stepped += float(metrics.get("train/grad_norm", 1.0)) > 0  # 0 where every step was skipped

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say it once."""
        if self._stepped or not self._iterations:
            return
        why = "no gradient was finite and above 0; lower the learning rate, or check the loss"
        if not self._with_rows:
            why = (
                "the rewards of every group were all equal (train/rows 0); look at rollout/accuracy and "
                "rollout/truncated_fraction, then raise model.init_args.sampling.max_tokens, take easier or harder "
                "prompts, or draw more samples of each (model.init_args.budget)"
            )
        warnings.warn(
            f"nothing was learned: none of the {self._iterations} iterations took an optimizer step, because {why}",
            stacklevel=1,
        )
