"""Generated tasks: seeded problems with exact checkers that parse model text and never evaluate it as code.

Row ``i`` of a task is a function of the task's options, its seed and ``i`` alone, on any machine and Python version.
A problem belongs to the training or to the validation split by the hash of what is asked, so the splits share no
problem, whatever their sizes and seeds.
"""

from __future__ import annotations

import hashlib
import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from lqrl.data.expression import ExpressionError, parse_expression
from lqrl.data.rows import Row, RowSource

Split = Literal["train", "validation"]

_MAX_DRAWS = 10_000
_INTEGER = re.compile(r"(?<![\w.])(?<![0-9],)-?[0-9]{1,18}(?![\w]|[.,][0-9])")


class Task(RowSource):
    """A seeded source of rows with an exact checker.

    Subclasses are frozen dataclasses with the fields below and a few of their own.

    Attributes:
        seed: another seed gives other rows (of the same split).
        size: number of rows, or ``None`` for an endless source, which is indexable but has no length.
        split: ``train`` or ``validation``; disjoint by construction.
        validation_fraction: share of all problems that belong to validation.
    """

    name: ClassVar[str]
    seed: int
    size: int | None
    split: Split
    validation_fraction: float

    @abstractmethod
    def _draw(self, rng: random.Random) -> Row | None:
        """One problem as a row with ``prompt``, ``answer`` and ``key``, or ``None`` to draw again."""

    @abstractmethod
    def check(self, row: Mapping[str, Any], text: str) -> bool:
        """Whether ``text`` (model output, untrusted) solves ``row``."""

    @abstractmethod
    def _signature(self) -> str:
        """The options that shape a problem, as part of the row's random key."""

    def identity(self) -> str:
        """Name, options, seed and split: all that rows depend on, apart from the template."""
        return f"{self.name}({self._signature()}, seed={self.seed}, validation={self.validation_fraction})|{self.split}"

    def where(self, index: int) -> str:
        """Task, split and row number."""
        return f"task {self.name}, split {self.split}, row {index}"

    def _validate(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(
                f"{type(self).__name__}.size must be at least 1, got {self.size}; use null for endless rows"
            )
        if self.split not in ("train", "validation"):
            raise ValueError(f"{type(self).__name__}.split must be 'train' or 'validation', got {self.split!r}")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"{type(self).__name__}.validation_fraction must be in (0, 1), got {self.validation_fraction}"
            )

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError(f"{type(self).__name__} is endless; set size to use it as a data set")
        return self.size

    def __iter__(self) -> Iterator[Row]:
        index = 0
        while self.size is None or index < self.size:
            yield self[index]
            index += 1

    def __getitem__(self, index: int) -> Row:
        """Row ``index``: ``prompt``, ``answer`` and the task's own fields.

        Raises:
            IndexError: when ``index`` is negative or not below ``size``.
            ValueError: when the options leave no problem for this split.
        """
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"row {index} of {type(self).__name__} with size {self.size}")
        # a str seed goes through SHA-512; hash() would differ from process to process
        rng = random.Random(f"{self.name}|{self._signature()}|{self.seed}|{index}")
        for _ in range(_MAX_DRAWS):
            row = self._draw(rng)
            if row is not None and self._split_of(row.pop("key")) == self.split:
                return row
        raise ValueError(
            f"{self} has no problem for split {self.split!r}: widen its range or change validation_fraction"
        )

    def _split_of(self, key: str) -> Split:
        digest = hashlib.sha256(f"{self.name}|{key}".encode()).digest()
        share = int.from_bytes(digest[:6], "big") / 2**48
        return "validation" if share < self.validation_fraction else "train"


@dataclass(frozen=True)
class Countdown(Task):
    """Reach a target with every given number used exactly once; any valid expression counts.

    Rows: ``prompt`` ("3 7 24=45:" with the default template), ``answer`` (the target), ``numbers``, ``target`` and
    ``solution``, one expression that reaches it ("3*7+24"), for supervised training.

    Attributes:
        numbers: how many numbers.
        max_number: numbers are drawn from 1 to this.
        max_target: targets are drawn from 1 to this.
        operators: a subset of ``+-*/``.
        template: python format string with ``{numbers}`` (joined by spaces) and ``{target}``.
    """

    numbers: int = 3
    max_number: int = 20
    max_target: int = 100
    operators: str = "+-*"
    template: str = "{numbers}={target}:"
    seed: int = 0
    size: int | None = None
    split: Split = "train"
    validation_fraction: float = 0.1

    name: ClassVar[str] = "countdown"

    def __post_init__(self) -> None:
        self._validate()
        if self.numbers < 2:
            raise ValueError(f"Countdown.numbers must be at least 2, got {self.numbers}")
        if self.max_number < 1 or self.max_target < 1:
            raise ValueError(
                f"Countdown needs max_number and max_target >= 1, got {self.max_number}, {self.max_target}"
            )
        _check_operators(self.operators, "+-*/", "Countdown")

    def _signature(self) -> str:
        return f"{self.numbers},{self.max_number},{self.max_target},{self.operators}"

    def _draw(self, rng: random.Random) -> Row | None:
        numbers = [rng.randint(1, self.max_number) for _ in range(self.numbers)]
        # leaves of a random binary tree, merged pair by pair: (value, text, how tightly the text binds)
        leaves = [(Fraction(n), str(n), 3) for n in numbers]
        while len(leaves) > 1:
            left = leaves.pop(rng.randrange(len(leaves)))
            right = leaves.pop(rng.randrange(len(leaves)))
            joined = _join(left, right, rng.choice(self.operators))
            if joined is None:
                return None
            leaves.append(joined)
        value, solution, _ = leaves[0]
        if value.denominator != 1 or not 1 <= value <= self.max_target:
            return None
        target = int(value)
        joined_numbers = " ".join(map(str, numbers))
        return {
            "prompt": self.template.format(numbers=joined_numbers, target=target),
            "answer": str(target),
            "numbers": tuple(numbers),
            "target": target,
            "solution": solution,
            # without the order of the numbers: a permuted problem stays in its split
            "key": f"{sorted(numbers)}={target}",
        }

    def check(self, row: Mapping[str, Any], text: str) -> bool:
        """Whether ``text`` is one expression over exactly ``row["numbers"]`` that equals ``row["target"]``."""
        target, numbers = row["target"], sorted(row["numbers"])  # first: a row without them is no wrong answer
        try:
            value, used = parse_expression(text.strip(), operators=self.operators)
        except ExpressionError:
            return False
        return value == target and sorted(used) == numbers


@dataclass(frozen=True)
class Sort(Task):
    """Sort a few numbers in ascending order.

    Rows: ``prompt`` ("31 4 15:" with the default template), ``answer`` ("4 15 31"), ``items`` and ``solution``.

    Attributes:
        min_items, max_items: how many numbers.
        max_number: numbers are drawn from 0 to this.
        template: python format string with ``{items}``.
    """

    min_items: int = 3
    max_items: int = 5
    max_number: int = 99
    template: str = "{items}:"
    seed: int = 0
    size: int | None = None
    split: Split = "train"
    validation_fraction: float = 0.1

    name: ClassVar[str] = "sort"

    def __post_init__(self) -> None:
        self._validate()
        if not 1 <= self.min_items <= self.max_items:
            raise ValueError(f"Sort needs 1 <= min_items <= max_items, got {self.min_items} and {self.max_items}")
        if self.max_number < 0:
            raise ValueError(f"Sort.max_number must be >= 0, got {self.max_number}")

    def _signature(self) -> str:
        return f"{self.min_items},{self.max_items},{self.max_number}"

    def _draw(self, rng: random.Random) -> Row | None:
        items = [rng.randint(0, self.max_number) for _ in range(rng.randint(self.min_items, self.max_items))]
        answer = " ".join(map(str, sorted(items)))
        return {
            "prompt": self.template.format(items=" ".join(map(str, items))),
            "answer": answer,
            "items": tuple(items),
            "solution": answer,
            "key": answer,
        }

    def check(self, row: Mapping[str, Any], text: str) -> bool:
        """Whether ``text`` is the sorted list, separated by white space."""
        return text.split() == str(row["answer"]).split()


@dataclass(frozen=True)
class Arithmetic(Task):
    """One operation on two integers, for chat models.

    There are few small problems (300 with the defaults), so rows of a large ``size`` repeat.

    Rows: ``prompt``, ``answer``, ``left``, ``operator``, ``right`` and ``solution``.

    Attributes:
        digits: operands have at most this many digits.
        operators: a subset of ``+-*``.
        template: python format string with ``{left}``, ``{operator}`` and ``{right}``.
        last_number: take the last integer of the text as its answer; otherwise the whole text must be the integer.
    """

    digits: int = 1
    operators: str = "+-*"
    template: str = "What is {left} {operator} {right}? Answer with the number only."
    last_number: bool = True
    seed: int = 0
    size: int | None = None
    split: Split = "train"
    validation_fraction: float = 0.1

    name: ClassVar[str] = "arithmetic"

    def __post_init__(self) -> None:
        self._validate()
        if not 1 <= self.digits <= 9:
            raise ValueError(f"Arithmetic.digits must be in 1..9, got {self.digits}")
        _check_operators(self.operators, "+-*", "Arithmetic")

    def _signature(self) -> str:
        return f"{self.digits},{self.operators}"

    def _draw(self, rng: random.Random) -> Row | None:
        left, right = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
        operator = rng.choice(self.operators)
        answer = {"+": left + right, "-": left - right, "*": left * right}[operator]
        return {
            "prompt": self.template.format(left=left, operator=operator, right=right),
            "answer": str(answer),
            "left": left,
            "operator": operator,
            "right": right,
            "solution": str(answer),
            "key": f"{left}{operator}{right}",
        }

    def check(self, row: Mapping[str, Any], text: str) -> bool:
        """Whether the integer that ``text`` answers with is ``row["answer"]``; only the last 2000 characters count."""
        text, answer = text[-2000:].strip(), row["answer"]
        if not self.last_number:
            return text == str(answer)
        found = _INTEGER.findall(text)
        return bool(found) and int(found[-1]) == int(answer)


def _check_operators(operators: str, accepted: str, owner: str) -> None:
    if not operators or set(operators) - set(accepted):
        raise ValueError(f"{owner}.operators must be a non-empty subset of {accepted!r}, got {operators!r}")


def _join(
    left: tuple[Fraction, str, int], right: tuple[Fraction, str, int], operator: str
) -> tuple[Fraction, str, int] | None:
    """``left operator right`` with parentheses only where the text would otherwise mean something else."""
    (a, a_text, a_binds), (b, b_text, b_binds) = left, right
    binds = 1 if operator in "+-" else 2
    if a_binds < binds:
        a_text = f"({a_text})"
    if b_binds < binds or (b_binds == binds and operator in "-/"):
        b_text = f"({b_text})"
    if operator == "/":
        if b == 0:
            return None
        value = a / b
    else:
        value = {"+": a + b, "-": a - b, "*": a * b}[operator]
    return value, f"{a_text}{operator}{b_text}", binds
