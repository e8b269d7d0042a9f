"""The side of `iteration.py` that is this library: `PolicyModule` under Lightning's Trainer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from iteration_task import LEARNING_RATE, prompt_texts, reward

from lqrl.callbacks import EngineRefresh, PhaseTimer
from lqrl.data import JsonLines, PromptDataModule, PromptSource, UniformBudget
from lqrl.engines.torch import TorchEngineFactory
from lqrl.learner import PolicyModule
from lqrl.rewards import RewardFn, RewardSum, RewardTerm
from lqrl.types import Completion, Prompt, SamplingParams


class _Reward(RewardFn):
    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        return [reward(completion.token_ids.tolist()) for completion in completions]


class _Laps(L.Callback):
    """Keeps what the phase timer before it logged."""

    def __init__(self, tokens: int) -> None:
        self.iterations: list[dict[str, float]] = []
        self._tokens = tokens

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check that all samples have their length, and note the seconds."""
        assert isinstance(pl_module, PolicyModule)
        assert pl_module.last_rollouts is not None
        lengths = pl_module.last_rollouts.batch.lengths
        if not bool((lengths == self._tokens).all()):
            raise RuntimeError(f"samples have {int(lengths.min())} tokens and more, {self._tokens} were asked for")
        logged = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("time/")}
        self.iterations.append({name.removeprefix("time/"): value for name, value in logged.items()})
        if not batch_idx and pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()


def train(case: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """Seconds of each iteration and of its phases."""
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompt_texts(case["prompts"], case["prompt"])))
    model = PolicyModule(
        model=str(folder),
        reward=RewardSum([RewardTerm(_Reward(), "chance")]),
        engine=TorchEngineFactory(max_num_seqs=case["generation_batch"]),
        scheme=case["learner"],
        dtype=case["dtype"],
        master_dtype=case["master"],
        sampling=SamplingParams(max_tokens=case["tokens"], ignore_eos=True),
        budget=UniformBudget(case["samples"]),
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=case["device"] == "cuda"),
        token_budget=case["token_budget"],
    )
    data = PromptDataModule(
        str(folder),
        PromptSource(JsonLines(str(rows)), answer_field=None),
        prompts_per_iteration=case["prompts"],
        iterations_per_epoch=case["iterations"],
    )
    laps = _Laps(case["tokens"])
    trainer = L.Trainer(
        accelerator="gpu" if case["device"] == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EngineRefresh(), PhaseTimer(), laps],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data)
    return laps.iterations
