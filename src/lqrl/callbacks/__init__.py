"""What happens at the boundaries of an iteration."""

from lqrl.callbacks.clip_range import ClipRangeScheduler
from lqrl.callbacks.engine_refresh import EngineRefresh
from lqrl.callbacks.hf_export import HFExport
from lqrl.callbacks.interrupt import InterruptCheckpoint
from lqrl.callbacks.mismatch_guard import MismatchError, MismatchGuard
from lqrl.callbacks.optimizer_offload import OptimizerOffload
from lqrl.callbacks.phase_timer import PhaseTimer
from lqrl.callbacks.rollout_table import RolloutTable
from lqrl.callbacks.sampler_feedback import SamplerFeedback
from lqrl.callbacks.signal_watch import SignalWatch

__all__ = [
    "ClipRangeScheduler",
    "EngineRefresh",
    "HFExport",
    "InterruptCheckpoint",
    "MismatchError",
    "MismatchGuard",
    "OptimizerOffload",
    "PhaseTimer",
    "RolloutTable",
    "SamplerFeedback",
    "SignalWatch",
]
