"""`RunConfig`: the recipe of a run, beside its results."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback


class RunConfig(SaveConfigCallback):
    """Save ``config.yaml`` in the run folder with the first result, so that a run that has none leaves no folder.

    The first result is a validation or an iteration; a checkpoint is never older than the config that resumes it.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Nothing yet: what is set up after this may still fail."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first validation; before `ModelCheckpoint`, which Lightning runs after all other callbacks."""
        self._save(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The first iteration of a run without a validation before it."""
        self._save(trainer, pl_module)

    def _save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super().setup(trainer, module, str(trainer.state.fn))
