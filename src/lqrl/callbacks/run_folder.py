"""Where a run keeps its files."""

from __future__ import annotations

from pathlib import Path

import lightning as L


def run_folder(trainer: L.Trainer) -> Path:
    """The logger's folder, or ``default_root_dir`` without a logger; the same on every rank."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def checkpoint_folder(trainer: L.Trainer) -> Path:
    """Where the run's `ModelCheckpoint` saves, or ``checkpoints`` in the run folder without one."""
    for callback in trainer.checkpoint_callbacks:
        directory = getattr(callback, "dirpath", None)  # Lightning's base class does not declare it
        if directory:
            return Path(directory)
    return run_folder(trainer) / "checkpoints"
