"""`SamplerFeedback`: tell the prompt sampler how its prompts went."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch.distributed as dist

from lqrl.data.datamodule import PromptDataModule, prompt_data
from lqrl.learner.module import PolicyModule
from lqrl.learner.update import world_size


class SamplerFeedback(L.Callback):
    """Give the outcomes of all ranks to ``sampler.observe`` after each iteration, in the order of prompt ids.

    Every rank gives its sampler the same outcomes in the same order, so that all of them draw the same prompts next.
    Logs what the sampler reports about itself.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Promise it, since a sampler that needs outcomes is refused without."""
        if stage == "fit":
            prompt_data(trainer).hears_outcomes = True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The next Trainer may have no feedback."""
        if stage == "fit":
            prompt_data(trainer).hears_outcomes = False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Observe the iteration's outcomes, given-up groups included."""
        assert isinstance(pl_module, PolicyModule)
        assert pl_module.last_rollouts is not None
        datamodule = prompt_data(trainer)
        feed_back(datamodule, pl_module.last_rollouts.outcomes)
        pl_module.log_dict(datamodule.sampler_metrics(), batch_size=1)


def feed_back(data: PromptDataModule, outcomes: list[tuple[int, float, int]]) -> None:
    """Give the outcomes of all ranks, one of each prompt in the order of ids, to ``data``'s sampler; collective.

    A prompt can come twice: a group cut by a refresh may end beside the prompt's next draw. Its outcomes add up.
    """
    if world_size() > 1:
        gathered: list[list[tuple[int, float, int]]] = [[] for _ in range(world_size())]
        dist.all_gather_object(gathered, outcomes)
        outcomes = [o for part in gathered for o in part]
    sums: dict[int, tuple[float, int]] = {}
    for prompt_id, successes, trials in sorted(outcomes):  # sorted: float sums are the same on every rank
        won, tried = sums.get(prompt_id, (0.0, 0))
        sums[prompt_id] = (won + successes, tried + trials)
    data.observe(list(sums), [won for won, _ in sums.values()], [tried for _, tried in sums.values()])
