"""Mathematical equality of answers, judged by math-verify in processes that can be killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lqrl.rewards.base import RewardFn
from lqrl.rewards.exact import normalize_answer, reference_answer
from lqrl.rewards.workers import WorkerPool
from lqrl.types import Completion, Prompt


@dataclass(frozen=True)
class MathReward(RewardFn):
    r"""1 where the answer equals the reference as mathematics, else 0; ``None`` when the reference cannot be parsed.

    The answer is the content of the last ``\boxed{}`` in the text, or else the end of the text. Equal strings are not
    sent to math-verify. Model text is untrusted: some expressions run for ever inside the parser or the computer
    algebra, so the comparison runs in worker processes that are killed after ``timeout`` seconds; such an answer
    scores 0.

    Attributes:
        workers: processes, started on first use and kept.
        timeout: seconds for one comparison.
        boxed_only: a text without ``\boxed{}`` scores 0.
        max_chars: only this many last characters of the text are read.
        max_answer_chars: a longer boxed answer scores 0; without a box this many last characters are the answer.
        memory_mb: limit of the address space of a worker.
        start_timeout: seconds for a worker to start.

    Raises:
        ValueError: when a number is not positive.
    """

    workers: int = 2
    timeout: float = 5.0
    boxed_only: bool = False
    max_chars: int = 2048
    max_answer_chars: int = 200
    memory_mb: int = 2048
    start_timeout: float = 120.0

    def __post_init__(self) -> None:
        for name, value in (
            ("workers", self.workers),
            ("timeout", self.timeout),
            ("max_chars", self.max_chars),
            ("max_answer_chars", self.max_answer_chars),
            ("memory_mb", self.memory_mb),
            ("start_timeout", self.start_timeout),
        ):
            if value <= 0:
                raise ValueError(f"MathReward.{name} must be positive, got {value}")

    @cached_property
    def pool(self) -> WorkerPool:
        """The worker processes; ``pool.timeouts`` and ``pool.crashes`` count what went wrong."""
        return WorkerPool(
            Path(__file__).with_name("math_worker.py"),
            [str(int(self.timeout) + 10), str(self.memory_mb)],
            workers=self.workers,
            timeout=self.timeout,
            start_timeout=self.start_timeout,
        )

    def __getstate__(self) -> dict[str, Any]:
        # processes belong to the interpreter that started them: a copy starts its own
        return {name: value for name, value in self.__dict__.items() if name != "pool"}

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        """``[n]`` of 0, 1 and ``None``.

        Raises:
            ValueError: when the prompt has no reference answer.
            WorkerStartError: when a worker does not start (math-verify is not installed, for one).
        """
        gold = reference_answer(prompt)
        answers = [self.extract(completion.text) for completion in completions]
        scores: dict[str | None, float | None] = {None: 0.0}
        for answer in answers:
            if answer is not None and normalize_answer(_unbox(answer)) == normalize_answer(_unbox(gold)):
                scores[answer] = 1.0
        unknown = list(dict.fromkeys(answer for answer in answers if answer not in scores))
        if unknown:
            replies = self.pool.map([{"gold": gold, "answer": answer} for answer in unknown])
            for answer, reply in zip(unknown, replies, strict=True):
                scores[answer] = _score(reply)
        return [scores[answer] for answer in answers]

    def extract(self, text: str) -> str | None:
        r"""What is compared: the last ``\boxed{...}``, or the end of the text; ``None`` when there is no answer."""
        text = text[-self.max_chars :]
        start = text.rfind("\\boxed{")
        if start >= 0:
            boxed = _balanced(text, start)
            return boxed if boxed is not None and len(boxed) <= self.max_answer_chars + len("\\boxed{}") else None
        if self.boxed_only or not text.strip():
            return None
        return text.strip()[-self.max_answer_chars :]


def _score(reply: dict[str, Any] | str) -> float | None:
    """A late or crashed comparison is the answer's fault and scores 0; ``None`` says that the reference is unusable."""
    if isinstance(reply, str):
        return 0.0
    return None if reply["equal"] is None else float(reply["equal"])


def _balanced(text: str, start: int) -> str | None:
    r"""The ``\boxed{...}`` that begins at ``start``, up to its closing brace; ``None`` when it never closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if text[i] == "}" and depth == 0:
            return text[start : i + 1]
    return None


def _unbox(text: str) -> str:
    text = text.strip()
    return text[len("\\boxed{") : -1] if text.startswith("\\boxed{") and text.endswith("}") else text
