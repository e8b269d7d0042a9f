"""How many completions each prompt of an iteration gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


class RolloutBudget(ABC):
    """Allocates completions to prompts; group sizes may differ."""

    @abstractmethod
    def __call__(self, prompt_ids: Sequence[int], beliefs: Tensor | Sequence[float] | None) -> list[int]:
        """Completions for each prompt, at least 1.

        Args:
            prompt_ids: stable ids of the prompts.
            beliefs: ``[P]`` the sampler's expected success rates, or ``None`` when it has none.
        """
        ...


@dataclass(frozen=True)
class UniformBudget(RolloutBudget):
    """The same number for every prompt.

    Attributes:
        group_size: completions a prompt.

    Raises:
        ValueError: when ``group_size`` is below 1.
    """

    group_size: int = 8

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"UniformBudget.group_size must be at least 1, got {self.group_size}")

    def __call__(self, prompt_ids: Sequence[int], beliefs: Tensor | Sequence[float] | None) -> list[int]:
        """``group_size`` for each prompt."""
        return [self.group_size] * len(prompt_ids)
