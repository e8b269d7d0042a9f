"""The learner."""

from lqrl.learner.module import PolicyModule

__all__ = ["PolicyModule"]
