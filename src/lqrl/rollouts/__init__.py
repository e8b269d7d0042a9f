"""Generate, score, and lay out rollouts."""

from lqrl.rollouts.batching import microbatches, minibatches, pad_rollouts, to_train_batch
from lqrl.rollouts.collect import Refill, Rollouts, check_fresh, collect
from lqrl.rollouts.stats import rollout_metrics, speed_metrics

__all__ = [
    "Refill",
    "Rollouts",
    "check_fresh",
    "collect",
    "microbatches",
    "minibatches",
    "pad_rollouts",
    "rollout_metrics",
    "speed_metrics",
    "to_train_batch",
]
