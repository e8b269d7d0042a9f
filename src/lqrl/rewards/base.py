"""What a reward is, and the weighted sum that scores the rollouts of an iteration."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lqrl.types import Completion, Prompt

RewardValues = Sequence[float | None]


class RewardError(RuntimeError):
    """A reward raised, or returned something that cannot be a reward."""


class RewardFn(ABC):
    """Scores the whole group of one prompt, so that rewards which compare completions fit too.

    A class path in YAML names a subclass. A reward that cannot judge a completion
    returns ``None`` in its place (not NaN, which is taken for a mistake).
    """

    @abstractmethod
    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> RewardValues:
        """One number for each completion, in order."""
        ...


@dataclass(frozen=True)
class RewardTerm:
    """One reward of a sum.

    Attributes:
        fn: the reward.
        name: column name and log key.
        weight: factor in the sum; 0 scores and logs the term without training on it.
        is_accuracy: this term is the raw success signal that samplers and dynamic sampling read. Without any such term
            the first one is.

    Raises:
        ValueError: when the weight is not finite or the name is empty.
    """

    fn: RewardFn
    name: str
    weight: float = 1.0
    is_accuracy: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"RewardTerm {self.name!r}: weight must be finite, got {self.weight}")
        if not self.name:
            raise ValueError("RewardTerm.name must not be empty; it names the term's column and log key")


@dataclass
class RewardOutput:
    """Scores of all completions, groups flattened in order, on the host.

    Attributes:
        rewards: ``[B]`` float32, the weighted sum; NaN where a term of non-zero weight could not be scored.
        terms: ``[B, K]`` float32, unweighted; NaN where a reward returned ``None``.
        accuracy: ``[B]`` float32, the accuracy term.
        names: names of the K columns.
    """

    rewards: Tensor
    terms: Tensor
    accuracy: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class RewardSum:
    """Weighted sum of rewards; every term is kept for logging.

    Attributes:
        terms: at least one, with distinct names.

    Raises:
        ValueError: when there is no term, a name occurs twice, or several terms claim to be the accuracy.
    """

    terms: list[RewardTerm]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("RewardSum needs at least one term")
        names = [term.name for term in self.terms]
        if len(set(names)) != len(names):
            raise ValueError(f"RewardSum: term names must differ, got {names}; set RewardTerm.name")
        if sum(term.is_accuracy for term in self.terms) > 1:
            raise ValueError("RewardSum: at most one term can have is_accuracy: true")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms, in order."""
        return tuple(term.name for term in self.terms)

    @property
    def accuracy_index(self) -> int:
        """Column of the accuracy term."""
        return next((k for k, term in enumerate(self.terms) if term.is_accuracy), 0)

    def score(self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> RewardOutput:
        """Score ``groups[i]``, the completions of ``prompts[i]``.

        Raises:
            RewardError: when a reward raises, returns another number of values than completions, or NaN or infinity, or
                when the accuracy term leaves [0, 1].
            ValueError: when there is not one group for each prompt.
        """
        if len(prompts) != len(groups):
            raise ValueError(f"{len(groups)} groups of completions for {len(prompts)} prompts")
        columns = [
            [value for prompt, group in zip(prompts, groups, strict=True) for value in _call(term, prompt, group)]
            for term in self.terms
        ]
        terms = torch.tensor(columns, dtype=torch.float32).reshape(len(columns), -1).T.contiguous()
        rewards = torch.zeros(terms.shape[0], dtype=torch.float32)
        for k, term in enumerate(self.terms):
            if term.weight:  # a term of weight 0 must not spread its NaN
                rewards = rewards + term.weight * terms[:, k]
        accuracy = terms[:, self.accuracy_index].clone()
        odd = accuracy[(accuracy < 0) | (accuracy > 1)]
        if len(odd):
            raise RewardError(
                f"term {self.names[self.accuracy_index]!r} is the accuracy that samplers and pass@k read, but has the "
                f"value {float(odd[0]):g}; mark a term with values in [0, 1] with is_accuracy: true "
                "(weight 0 only logs it)"
            )
        return RewardOutput(rewards, terms, accuracy, self.names)


def row_of(prompt: Prompt) -> str:
    """What a message calls the prompt's row: its file and line, or the prompt's id."""
    return prompt.where or f"prompt {prompt.id}"


def _call(term: RewardTerm, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
    """Values of one term for one group, checked; ``None`` becomes NaN."""
    where = f"reward {term.name!r} ({type(term.fn).__name__}) on {row_of(prompt)}"
    try:
        values = list(term.fn(prompt, completions))
    except Exception as error:
        raise RewardError(
            f"{where} raised {type(error).__name__}: {error}. Fix the reward, or return None for a completion that it "
            "cannot judge."
        ) from error
    if len(values) != len(completions):
        raise RewardError(
            f"{where} returned {len(values)} values for {len(completions)} completions; return one for each, in order"
        )
    return [math.nan if value is None else _number(value, where, i) for i, value in enumerate(values)]


def _number(value: object, where: str, index: int) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{where} returned {value!r} for completion {index}; return a number or None") from error
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise RewardError(
            f"{where} returned {number} for completion {index}; return a finite number, or None if it cannot be judged"
        )
    return number
