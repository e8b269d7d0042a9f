"""Scores of one validation, of each engine that is validated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from lqrl.metrics import PassAtK
from lqrl.types import RolloutBatch


class Validation(nn.Module):
    """pass@1 and pass@n of the engines, reduced over ranks.

    Args:
        kinds: names of the engines; the metrics are ``<kind>/pass@<k>``.
        samples: completions of each prompt, n.

    Attributes:
        history: ``(policy version, scores)`` of each finished validation.
    """

    def __init__(self, kinds: Sequence[str], samples: int) -> None:
        super().__init__()
        self.ks = sorted({1, samples})
        self.names = {(kind, k): f"{kind}/pass@{k}" for kind in kinds for k in self.ks}
        self.metrics = nn.ModuleDict({f"{kind}_{k}": PassAtK(k) for kind, k in self.names})
        self.history: list[tuple[int, dict[str, float]]] = []

    def update(self, kind: str, batch: RolloutBatch) -> dict[str, PassAtK]:
        """Add an engine's scored completions; returns its metrics by name, to log.

        A completion passes when its accuracy is 1. Completions that no reward could judge are left out; a prompt with
        fewer than k judged ones does not count for pass@k.
        """
        judged, size = ~batch.accuracy.isnan(), int(batch.group_ids.max()) + 1
        passed = torch.zeros(size).index_add(0, batch.group_ids, ((batch.accuracy >= 1) & judged).float())
        trials = torch.zeros(size).index_add(0, batch.group_ids, judged.float())
        updated = {k: cast(PassAtK, self.metrics[f"{kind}_{k}"]) for k in self.ks}
        for k, metric in updated.items():
            enough = trials >= k
            metric.update(passed[enough].to(metric.device), trials[enough].to(metric.device))
        return {self.names[kind, k]: metric for k, metric in updated.items()}

    def finish(self, policy_version: int) -> dict[str, float]:
        """The scores of this validation, also noted in ``history``; collective, every rank calls it."""
        metrics = {name: cast(PassAtK, self.metrics[f"{kind}_{k}"]) for (kind, k), name in self.names.items()}
        scores = {name: float(metric.compute()) for name, metric in metrics.items() if metric.update_called}
        if scores:
            self.history.append((policy_version, scores))
        return scores
