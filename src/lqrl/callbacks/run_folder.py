"""Where a run keeps its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


def run_folder(trainer: L.Trainer) -> Path:
    """The logger's folder, or ``default_root_dir`` without a logger; the same on every rank."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def keeps_files(trainer: L.Trainer) -> bool:
    """Whether the run leaves files; a dry run (``fast_dev_run``) leaves none."""
    return not vars(trainer)["fast_dev_run"]


def checkpoint_folder(trainer: L.Trainer) -> Path:
    """Where the run's `ModelCheckpoint` saves, or ``checkpoints`` in the run folder without one."""
    for callback in trainer.checkpoint_callbacks:
        directory = getattr(callback, "dirpath", None)  # Lightning's base class does not declare it
        if directory:
            return Path(directory)
    return run_folder(trainer) / "checkpoints"


def last_checkpoint(trainer: L.Trainer) -> Path | None:
    """The newest file that the run's `ModelCheckpoint`s have saved, if there is one."""
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    names = [name for c in callbacks for name in (c.last_model_path, c.best_model_path) if name]
    saved = [path for path in map(Path, names) if path.exists()]
    return max(saved, key=lambda path: path.stat().st_mtime, default=None)


def resume_command(trainer: L.Trainer, checkpoint: Path) -> str:
    """What resumes from ``checkpoint``: a command when the run folder has a config, a call otherwise."""
    config = run_folder(trainer) / "config.yaml"
    if config.is_file():
        return f"lqrl fit --config {config} --ckpt_path {checkpoint}"
    return f'trainer.fit(module, data, ckpt_path="{checkpoint}")'


def absent_folders(trainer: L.Trainer) -> list[Path]:
    """The run folder and its parents, innermost first, as far as they do not exist."""
    folder = run_folder(trainer)
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove ``folders``, given innermost first, up to the first that holds something."""
    for folder in folders:
        if folder.is_dir():
            if any(folder.iterdir()):
                return
            folder.rmdir()
