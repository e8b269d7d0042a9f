"""For tests of code that uses lqrl: tiny models, and engines whose rollouts are known."""

from lqrl.testing.engines import BernoulliEngine, ScriptedEngine
from lqrl.testing.models import FAMILIES, tiny_config, tiny_moe_config

__all__ = ["FAMILIES", "BernoulliEngine", "ScriptedEngine", "tiny_config", "tiny_moe_config"]
