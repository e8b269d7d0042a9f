"""Rewards for answers that can be compared exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from lqrl.rewards.base import RewardFn, row_of
from lqrl.types import Completion, Prompt

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:/[0-9]{1,40})?")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


class Checker(Protocol):
    """What knows whether a text solves a row; every generated task is one."""

    def check(self, row: Mapping[str, Any], text: str) -> bool:
        """Whether ``text`` solves ``row``."""
        ...


@dataclass(frozen=True)
class TaskReward(RewardFn):
    """1 where the task's own checker accepts the completion, else 0.

    Attributes:
        task: the checker, with the options that the prompts were generated with.
    """

    task: Checker

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """``[n]`` of 0 and 1; the row is the prompt's fields plus ``prompt`` and ``answer``, null ones left out.

        Raises:
            ValueError: when the row lacks a column that the checker reads.
        """
        columns = {**prompt.fields, "prompt": prompt.text, "answer": prompt.answer}
        row = {name: value for name, value in columns.items() if value is not None}
        try:
            return [float(self.task.check(row, completion.text)) for completion in completions]
        except KeyError as error:
            raise ValueError(
                f"{row_of(prompt)}: the checker of {type(self.task).__name__} needs the column {error}, the row has "
                f"{sorted(row)}; give it prompts of its own task, or use lqrl.rewards.ExactAnswer"
            ) from error


@dataclass(frozen=True)
class ExactAnswer(RewardFn):
    r"""1 where the answer taken from the text equals the reference answer, else 0.

    Attributes:
        pattern: regular expression; its last match is the answer (group 1 if it has one). A pattern with nested repeats
            can take very long on text that a model wrote.
        after: marker such as ``####``; the rest of the line after its last occurrence is the answer. With neither
            option the whole text is the answer.
        normalize: compare after dropping outer white space, ``$``, a final full stop and commas between thousands,
            without case, and numbers by value (``0.50`` equals ``1/2``).
        max_chars: only this many last characters are read.

    Raises:
        ValueError: when both ``pattern`` and ``after`` are given, or the pattern is not valid.
    """

    pattern: str = ""  # not None, which a parser would take for "####", a comment
    after: str = ""
    normalize: bool = True
    max_chars: int = 2000

    def __post_init__(self) -> None:
        if self.pattern and self.after:
            raise ValueError("ExactAnswer: give pattern or after, not both")
        if self.pattern:
            _compile(self.pattern, "ExactAnswer.pattern")

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """``[n]`` of 0 and 1.

        Raises:
            ValueError: when the prompt has no reference answer.
        """
        gold = reference_answer(prompt)
        return [float(self._equal(self.extract(completion.text), gold)) for completion in completions]

    def extract(self, text: str) -> str | None:
        """The answer in ``text``, or ``None`` when it has none."""
        text = text[-self.max_chars :]
        if self.pattern:
            found = list(re.finditer(self.pattern, text))
            return found[-1].group(1 if found[-1].re.groups else 0) if found else None
        if self.after:
            _, marker, rest = text.rpartition(self.after)
            lines = rest.splitlines()
            return lines[0].strip() if marker and lines else None
        return text

    def _equal(self, answer: str | None, gold: str) -> bool:
        if answer is None:
            return False
        if not self.normalize:
            return answer == gold
        answer, gold = normalize_answer(answer), normalize_answer(gold)
        if answer == gold:
            return True
        left, right = _fraction(answer), _fraction(gold)
        return left is not None and left == right


def normalize_answer(text: str) -> str:
    """Text without outer white space, ``$``, a final full stop, commas between thousands, and case."""
    text = text.strip().replace("$", "").strip()
    text = text.removesuffix(".").strip()
    return _THOUSANDS.sub("", text).casefold()


def reference_answer(prompt: Prompt) -> str:
    """The prompt's answer; rewards of your own read it here, since ``prompt.answer`` may be ``None``.

    Raises:
        ValueError: when it has none, naming the row.
    """
    if prompt.answer is None:
        raise ValueError(
            f"{row_of(prompt)}: no reference answer; set answer_field of its PromptSource (data.init_args.train or "
            "val) to the column that holds it"
        )
    return prompt.answer


def _fraction(text: str) -> Fraction | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        numerator, _, denominator = text.partition("/")
        return Fraction(numerator) / Fraction(denominator or "1")
    except (ValueError, ZeroDivisionError):
        return None


def _compile(pattern: str, owner: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{owner} is not a regular expression: {error}") from error
