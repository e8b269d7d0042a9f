"""A run of twelve iterations that waits for a signal in the second; prints each iteration, writes what it sampled."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from runs import make_data, make_module, make_trainer

from lqrl.callbacks import EngineRefresh, InterruptCheckpoint, SamplerFeedback
from lqrl.learner import PolicyModule
from lqrl.rollouts import Rollouts


class Announced(PolicyModule):
    """Says when an iteration ends."""

    prompts: list[list[int]] = []  # noqa: RUF012
    interrupt = InterruptCheckpoint()

    def finish_iteration(self, rollouts: Rollouts) -> None:
        self.prompts.append(rollouts.batch.prompt_ids.tolist())
        Path(sys.argv[1], "trace.json").write_text(json.dumps(self.prompts))
        print(f"iteration {self.iteration}", flush=True)
        while self.iteration == 1 and self.interrupt.received is None:
            time.sleep(0.001)
        super().finish_iteration(rollouts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    trainer = make_trainer(folder, epochs=4, callbacks=[EngineRefresh(), SamplerFeedback(), Announced.interrupt])
    trainer.fit(make_module(Announced), make_data())
