"""Data: rows, generated tasks, prompts, samplers, rollout budgets, and the datamodule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lqrl.data.budget import RolloutBudget, UniformBudget
from lqrl.data.prompts import PromptDataset, PromptSource
from lqrl.data.rows import HubDataset, JsonLines, RowSource
from lqrl.data.samplers import PromptSampler, SamplerFactory, SeededSampler, Uniform, UniformSampler
from lqrl.data.tasks import Arithmetic, Countdown, Sort, Task
from lqrl.data.vade import VADE, VADESampler

if TYPE_CHECKING:
    from lqrl.data.datamodule import PromptDataModule

__all__ = [
    "VADE",
    "Arithmetic",
    "Countdown",
    "HubDataset",
    "JsonLines",
    "PromptDataModule",
    "PromptDataset",
    "PromptSampler",
    "PromptSource",
    "RolloutBudget",
    "RowSource",
    "SamplerFactory",
    "SeededSampler",
    "Sort",
    "Task",
    "Uniform",
    "UniformBudget",
    "UniformSampler",
    "VADESampler",
]


def __getattr__(name: str) -> Any:
    """Import the datamodule when it is asked for: the rest of the package needs no Lightning."""
    if name == "PromptDataModule":
        from lqrl.data.datamodule import PromptDataModule

        return PromptDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
