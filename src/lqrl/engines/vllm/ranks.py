"""The ranks of a run that hold one vLLM together, and how they stay in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

Meet = Callable[[Any], list[Any]]
"""Gives a value to all ranks and returns those of all, in the order of the ranks."""


class RankFailed(RuntimeError):
    """Another rank raised before it came to the exchange."""


@dataclass(frozen=True)
class _Failure:
    text: str


class Ranks:
    """All ranks of the process group; they call the methods together, in the same order.

    Args:
        size: how many there are; with one, nothing is sent.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = dist.get_rank() if size > 1 else 0
        # Of its own: objects travel through the host, and must not cross what the trainer sends.
        self._group = dist.new_group(backend="gloo") if size > 1 else None

    @contextmanager
    def meeting(self) -> Iterator[Meet]:
        """A block with one exchange, which every rank reaches: also one that raises before, which tells the others.

        What may follow the exchange are calls of vLLM, in which ranks wait for each other.

        Raises:
            RankFailed: from the exchange, where another rank has raised.
        """
        met = False

        def meet(value: Any) -> list[Any]:
            nonlocal met
            met = True
            values = self._gather(value)
            for rank, each in enumerate(values):
                if isinstance(each, _Failure) and rank != self.rank:
                    raise RankFailed(f"rank {rank} failed: {each.text}")
            return values

        try:
            yield meet
        except BaseException as error:
            if not met:
                self._gather(_Failure(f"{type(error).__name__}: {error}"))
            raise

    def own(self, values: list[Any], counts: list[int]) -> list[Any]:
        """This rank's part of ``values``, of which the ranks have ``counts``."""
        start = sum(counts[: self.rank])
        return values[start : start + counts[self.rank]]

    def _gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values
