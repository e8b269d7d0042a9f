"""What both learners of `iteration.py` are given: the prompts of an iteration, and a reward."""

from __future__ import annotations

import random
import string
from collections.abc import Iterable
from zlib import crc32

LEARNING_RATE = 1e-6


def prompt_texts(count: int, length: int) -> list[str]:
    """Random letters, a token each."""
    generator = random.Random(0)
    return ["".join(generator.choices(string.ascii_letters, k=length)) for _ in range(count)]


def reward(token_ids: Iterable[int]) -> float:
    """Between 0 and 1 by the tokens, as if by chance: no group is without a signal, which one side would leave out."""
    return crc32(str(list(token_ids)).encode()) / 2**32
