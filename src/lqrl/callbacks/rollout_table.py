"""`RolloutTable`: read what the policy writes."""

from __future__ import annotations

import json
import math
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lqrl.callbacks.run_folder import keeps_files, run_folder
from lqrl.learner.module import PolicyModule
from lqrl.rollouts import Rollouts


class RolloutTable(L.Callback):
    """Print sampled texts with their rewards, and append every rollout to ``rollouts.jsonl`` in the run folder.

    Args:
        every_n_iterations: how often the table is printed; 0 never.
        rows: texts of one table; the best and the worst of the iteration.
        width: most characters shown of a text.
        save: write ``rollouts.jsonl`` (rank 0's rollouts; each line one completion); a dry run writes none.
    """

    def __init__(self, every_n_iterations: int = 10, rows: int = 4, width: int = 60, save: bool = True) -> None:
        self.every_n_iterations, self.rows, self.width, self.save = every_n_iterations, rows, width, save

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The iteration's rollouts."""
        assert isinstance(pl_module, PolicyModule)
        rollouts, folder = pl_module.last_rollouts, run_folder(trainer)  # a collective: before the gate
        if rollouts is None or not trainer.is_global_zero:
            return
        iteration = pl_module.iteration - 1
        records = rollout_records(rollouts, iteration)
        if self.save and keeps_files(trainer):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "rollouts.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
        if self.every_n_iterations and iteration % self.every_n_iterations == 0:
            Console().print(self.table(records, iteration))

    def table(self, records: list[dict[str, Any]], iteration: int) -> Table:
        """The best and the worst rollouts of an iteration."""
        ranked = sorted(records, key=lambda r: -math.inf if r["reward"] is None else r["reward"], reverse=True)
        best = {r["prompt_id"]: r for r in reversed(ranked)}  # one text a prompt: its best, and below its worst
        worst = {r["prompt_id"]: r for r in ranked}
        half = self.rows // 2
        top = sorted(best.values(), key=ranked.index)[: self.rows - half]
        bottom = sorted(worst.values(), key=ranked.index)[-half:] if half else []
        shown = top + [r for r in bottom if r not in top]
        table = Table(title=f"iteration {iteration}: best and worst of different prompts")
        for column in ("reward", "prompt", "completion", "end"):
            table.add_column(column, overflow="fold")
        for r in shown:
            texts = (Text(r[key][-self.width :]) for key in ("prompt", "completion"))  # model output is no markup
            table.add_row("-" if r["reward"] is None else f"{r['reward']:.2f}", *texts, r["finish_reason"])
        return table


def rollout_records(rollouts: Rollouts, iteration: int) -> list[dict[str, Any]]:
    """One plain record a completion, in the order of the batch."""
    batch = rollouts.batch
    pairs = [(p, c) for p, group in zip(rollouts.prompts, rollouts.groups, strict=True) for c in group]
    return [
        {
            "iteration": iteration,
            "policy_version": c.policy_version,
            "prompt_id": p.id,
            "sample_index": c.sample_index,
            "prompt": p.text,
            "completion": c.text,
            "reward": _plain(float(batch.rewards[i])),
            "terms": dict(zip(batch.term_names, map(_plain, batch.reward_terms[i].tolist()), strict=True)),
            "tokens": len(c.token_ids),
            "finish_reason": c.finish_reason,
        }
        for i, (p, c) in enumerate(pairs)
    ]


def _plain(value: float) -> float | None:
    """JSON has no NaN: an unscored completion is null."""
    return None if math.isnan(value) else round(value, 6)
