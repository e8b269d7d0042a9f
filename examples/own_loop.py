"""The same iteration as an explicit Fabric loop, with a reward and a learner of one's own.

    python examples/own_loop.py                 # 20 iterations on the CPU
    python examples/own_loop.py --iterations 3

Trains the shipped policy on countdown with two changes that no recipe knows: a reward that also pays for short answers,
and a learner that drops the easiest groups. `lqrl.fabric.fit` is the loop; for full control copy its body.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import lightning as L
import torch

from lqrl.data import Countdown, PromptDataModule, PromptSource, Uniform
from lqrl.engines import TorchEngineFactory
from lqrl.fabric import fit
from lqrl.learner import PolicyModule
from lqrl.phases import PhaseClock
from lqrl.rewards import RewardFn, RewardSum, RewardTerm, TaskReward
from lqrl.rollouts import Rollouts
from lqrl.types import Completion, Prompt, SamplingParams, TrainBatch

POLICY = "asset:countdown_policy"


@dataclass(frozen=True)
class Brevity(RewardFn):
    """1 for an empty answer, 0 at ``limit`` characters."""

    limit: int = 12

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """One number for each completion."""
        return [max(0.0, 1.0 - len(c.text) / self.limit) for c in completions]


class HardGroups(PolicyModule):
    """Learns from groups that are solved less than three times in four."""

    def learn_from(self, rollouts: Rollouts) -> tuple[TrainBatch, dict[str, float]]:
        """Drop the rows of easy groups before the learner's forward pass."""
        batch, metrics = super().learn_from(rollouts)
        easy = {g for g, group in enumerate(rollouts.outcomes) if group[1] >= 0.75 * group[2]}
        hard = torch.tensor([int(g) not in easy for g in batch.group_ids], dtype=torch.bool)
        return batch.rows(hard), metrics | {"example/easy_groups": float(len(easy))}


def main() -> None:
    """Train, and print a line an iteration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--checkpoint", help="continue from this file if it is there, and write it at the end")
    arguments = parser.parse_args()

    module = HardGroups(
        model=POLICY,
        scheme="int8_w8a8",
        engine=TorchEngineFactory(max_num_seqs=256),
        reward=RewardSum(
            [RewardTerm(TaskReward(Countdown()), "correct"), RewardTerm(Brevity(), "brevity", weight=0.1)]
        ),
        sampling=SamplingParams(max_tokens=16),
        optimizer=partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.0),
    )
    data = PromptDataModule(
        tokenizer=POLICY,
        train=PromptSource(Countdown(size=4096)),
        sampler=Uniform(),
        prompts_per_iteration=32,
        iterations_per_epoch=10,
    )
    fabric = L.Fabric(accelerator="cpu", devices=1)
    with PhaseClock() as clock:
        fit(
            fabric, module, data, iterations=arguments.iterations, checkpoint=arguments.checkpoint,
            log=lambda i, m: print(
                f"{i:3d} reward {m['rollout/reward']:.3f} correct {m['rollout/accuracy']:.3f} "
                f"easy groups {m['example/easy_groups']:.0f} mismatch {m.get('mismatch/k3', 0.0):.1e} "
                f"seconds {shown(clock.lap())}"
            ),
        )  # fmt: skip


def shown(seconds: dict[str, float]) -> str:
    """The sum, and the phases that took the most of it."""
    largest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:2]
    return f"{sum(seconds.values()):.2f} ({', '.join(f'{name} {seconds[name]:.2f}' for name in largest)})"


if __name__ == "__main__":
    main()
