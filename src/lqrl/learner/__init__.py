"""The learner."""

from lqrl.learner.module import PolicyModule
from lqrl.learner.noise import RolloutNoise

__all__ = ["PolicyModule", "RolloutNoise"]
