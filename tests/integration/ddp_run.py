"""One rank of a short run under DDP on gloo; writes the trained weights and what was sampled."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import lightning as L
import torch
from runs import make_data, make_module, make_trainer

from lqrl.data import UniformBudget
from lqrl.fabric import fit
from lqrl.learner import PolicyModule
from lqrl.rollouts import Rollouts
from lqrl.types import TrainBatch


class Traced(PolicyModule):
    """Keeps what this rank sampled: rows by (iteration, prompt, sample)."""

    rows: dict[tuple[int, int, int], list[int]] = {}  # noqa: RUF012
    learned: list[int] = []  # noqa: RUF012

    def learn_from(self, rollouts: Rollouts) -> tuple[TrainBatch, dict[str, float]]:
        batch, metrics = super().learn_from(rollouts)
        self.learned.append(len(batch))
        return batch, metrics

    def finish_iteration(self, rollouts: Rollouts) -> None:
        for group in rollouts.groups:
            for c in group:
                self.rows[self.iteration, c.prompt_id, c.sample_index] = c.token_ids.tolist()
        super().finish_iteration(rollouts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, devices, tokens, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    resume = sys.argv[5] if len(sys.argv) > 5 else None
    strategy = "ddp" if devices > 1 else "auto"
    mode = resume if resume in ("few", "fabric") else None
    if mode:  # two prompts, two samples each: a rank whose group has equal rewards has no rows
        module, data = make_module(Traced, budget=UniformBudget(2)), make_data(prompts_per_iteration=2)
    else:
        module, data = make_module(Traced, token_budget=tokens, num_minibatches=2), make_data()
    if mode == "fabric":
        fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
        fabric.launch()
        fit(fabric, module, data, iterations=6, checkpoint=folder / "fabric.ckpt")
        rank = fabric.global_rank
    else:
        trainer = make_trainer(folder, epochs=epochs, devices=devices, strategy=strategy)
        trainer.fit(module, data, ckpt_path=None if mode else resume)
        rank = trainer.global_rank
    state = {n: t.detach() for n, t in module.state_dict().items()}
    torch.save({"rows": module.rows, "weights": state, "learned": module.learned}, folder / f"rank{rank}.pt")
