"""Rewards: each a frozen dataclass that scores the whole group of one prompt, and their weighted sum."""

from __future__ import annotations

from lqrl.rewards.base import RewardError, RewardFn, RewardOutput, RewardSum, RewardTerm
from lqrl.rewards.exact import Checker, ExactAnswer, TaskReward, reference_answer
from lqrl.rewards.math import MathReward
from lqrl.rewards.shape import FormatReward, OverlongPenalty

__all__ = [
    "Checker",
    "ExactAnswer",
    "FormatReward",
    "MathReward",
    "OverlongPenalty",
    "RewardError",
    "RewardFn",
    "RewardOutput",
    "RewardSum",
    "RewardTerm",
    "TaskReward",
    "reference_answer",
]
