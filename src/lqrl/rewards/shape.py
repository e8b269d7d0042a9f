"""Rewards that look at the form of a completion: its layout and its length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lqrl.rewards.base import RewardFn
from lqrl.types import Completion, Prompt


@dataclass(frozen=True)
class FormatReward(RewardFn):
    r"""1 where the text has the wanted form, else 0.

    Attributes:
        pattern: regular expression, where ``.`` also matches a line break. A pattern with nested repeats can take very
            long on text that a model wrote.
        full: the whole text must match, apart from outer white space; otherwise a match anywhere is enough.
        max_chars: a longer text scores 0.

    Raises:
        ValueError: when the pattern is not valid.
    """

    pattern: str = r"<think>.*</think>\s*<answer>.*</answer>"
    full: bool = True
    max_chars: int = 100_000

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"FormatReward.pattern is not a regular expression: {error}") from error

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """``[n]`` of 0 and 1."""
        return [float(self._matches(completion.text)) for completion in completions]

    def _matches(self, text: str) -> bool:
        if len(text) > self.max_chars:
            return False
        pattern = re.compile(self.pattern, re.DOTALL)
        return (pattern.fullmatch(text.strip()) if self.full else pattern.search(text)) is not None


@dataclass(frozen=True)
class OverlongPenalty(RewardFn):
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in tokens.

    0 up to ``max_tokens - cache_tokens``, then linear down to ``-factor`` at ``max_tokens``, and ``-factor`` beyond.

    Attributes:
        max_tokens: longest completion, normally ``SamplingParams.max_tokens``.
        cache_tokens: width of the band in which the penalty grows.
        factor: the largest penalty.

    Raises:
        ValueError: when the band is empty or wider than ``max_tokens``, or ``factor`` is negative.
    """

    max_tokens: int = 20480
    cache_tokens: int = 4096
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.cache_tokens <= self.max_tokens:
            raise ValueError(
                f"OverlongPenalty needs 0 < cache_tokens <= max_tokens, got {self.cache_tokens} and {self.max_tokens}"
            )
        if self.factor < 0:
            raise ValueError(f"OverlongPenalty.factor must be >= 0, got {self.factor}; the penalty is its negative")

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """``[n]`` numbers in ``[-factor, 0]``."""
        return [self.penalty(len(completion.token_ids)) for completion in completions]

    def penalty(self, length: int) -> float:
        """The penalty of a completion of ``length`` tokens."""
        over = length - (self.max_tokens - self.cache_tokens)
        return -self.factor * min(max(over / self.cache_tokens, 0.0), 1.0)
