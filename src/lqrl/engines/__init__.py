"""Rollout engines: the seam, and what stands behind it."""

from lqrl.engines.base import (
    EngineFactory,
    EngineSpec,
    EngineUnavailableError,
    RefreshError,
    RolloutEngine,
    StaleEngineError,
    WeightStage,
)
from lqrl.engines.torch import EngineStats, TorchEngine, TorchEngineFactory

__all__ = [
    "EngineFactory",
    "EngineSpec",
    "EngineStats",
    "EngineUnavailableError",
    "RefreshError",
    "RolloutEngine",
    "StaleEngineError",
    "TorchEngine",
    "TorchEngineFactory",
    "WeightStage",
]
