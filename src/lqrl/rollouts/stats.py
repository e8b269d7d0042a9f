"""Numbers that describe a batch of rollouts, as sums and counts that add up over ranks."""

from __future__ import annotations

import torch

from lqrl.rollouts.collect import Rollouts
from lqrl.types import Ratio


def rollout_metrics(rollouts: Rollouts) -> dict[str, Ratio]:
    """Reward, its unweighted terms, accuracy, lengths and the cost of generation.

    Returns:
        ``rollout/reward``, ``rollout/accuracy``, ``rollout/reward_<term>`` (each a mean over rows), ``rollout/length``,
        ``rollout/truncated_fraction``, ``rollout/equal_reward_fraction`` (groups generated without a signal),
        ``rollout/rounds`` and, where versions of tokens are known, ``rollout/token_lag``: those between a token and the
        newest of the batch. It is 0 without partial rollouts, and said then too: a logger repeats what was said last.
    """
    batch = rollouts.batch
    mean = lambda x: Ratio(x.double().nansum(), (~x.isnan()).sum().double())  # noqa: E731 - unscored rows do not count
    metrics = {
        "rollout/reward": mean(batch.rewards),
        "rollout/accuracy": mean(batch.accuracy),
        "rollout/length": mean(batch.lengths.float()),
        "rollout/truncated_fraction": mean(batch.truncated.float()),
    }
    if batch.token_versions is not None:
        versions = batch.token_versions[batch.completion_mask]
        metrics["rollout/token_lag"] = mean((versions.max() - versions).float())
    for k, name in enumerate(batch.term_names):
        metrics[f"rollout/reward_{name}"] = mean(batch.reward_terms[:, k])
    judged = [(successes, trials) for _, successes, trials in rollouts.outcomes if trials]
    flat = sum(1 for successes, trials in judged if successes in (0.0, float(trials)))
    groups = torch.tensor(float(len(judged))).double()
    metrics["rollout/equal_reward_fraction"] = Ratio(torch.tensor(float(flat)).double(), groups)
    metrics["rollout/rounds"] = Ratio(torch.tensor(float(rollouts.rounds)).double(), torch.tensor(1.0).double())
    return metrics


def speed_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Seconds, and tokens per second of generation, on this rank."""
    generate = max(rollouts.seconds["generate"], 1e-9)
    return {
        "speed/rollout_tokens_per_second": rollouts.generated_tokens / generate,
        "speed/generate_seconds": rollouts.seconds["generate"],
        "speed/reward_seconds": rollouts.seconds["reward"],
    }
