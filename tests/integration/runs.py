"""Small complete runs: the shipped policy on countdown, a few prompts an iteration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lqrl.callbacks import EngineRefresh, SamplerFeedback
from lqrl.data import VADE, Countdown, PromptDataModule, PromptSource, UniformBudget
from lqrl.engines import TorchEngineFactory
from lqrl.learner import PolicyModule
from lqrl.rewards import RewardSum, RewardTerm, TaskReward
from lqrl.types import SamplingParams

POLICY = "asset:countdown_policy"
# The same runs on another device: LQRL_TEST_ACCELERATOR=cuda pytest tests/integration
ACCELERATOR = os.environ.get("LQRL_TEST_ACCELERATOR", "cpu")
DEVICE = torch.device(ACCELERATOR)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.0)


def make_module(cls: type[PolicyModule] = PolicyModule, **options: Any) -> PolicyModule:
    settings: dict[str, Any] = {
        "model": POLICY,
        "reward": RewardSum([RewardTerm(TaskReward(Countdown()), "correct")]),
        "engine": TorchEngineFactory(max_num_seqs=32),
        "sampling": SamplingParams(max_tokens=12),
        "budget": UniformBudget(4),
        "optimizer": adamw,
        "val_samples": 2,
        "seed": 7,
    }
    return cls(**(settings | options))


def make_data(cls: type[PromptDataModule] = PromptDataModule, **options: Any) -> PromptDataModule:
    settings: dict[str, Any] = {
        "tokenizer": POLICY,
        "train": PromptSource(Countdown(size=64)),
        "val": PromptSource(Countdown(size=8, split="validation")),
        "prompts_per_iteration": 8,
        "iterations_per_epoch": 3,
        "sampler": VADE(),
        "seed": 7,
    }
    return cls(**(settings | options))


def make_trainer(folder: Path, *, epochs: int, callbacks: list[L.Callback] | None = None, **options: Any) -> L.Trainer:
    checkpoint = ModelCheckpoint(
        dirpath=folder,
        filename="epoch{epoch}",
        auto_insert_metric_name=False,
        save_on_train_epoch_end=False,
        save_top_k=-1,
    )
    settings: dict[str, Any] = {
        "accelerator": ACCELERATOR,
        "devices": 1,
        "max_epochs": epochs,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "use_distributed_sampler": False,
    }
    ours = [EngineRefresh(), SamplerFeedback()] if callbacks is None else callbacks
    return L.Trainer(callbacks=[*ours, checkpoint], **(settings | options))


def weights(module: PolicyModule) -> dict[str, torch.Tensor]:
    return {n: t.detach().cpu().clone() for n, t in module.state_dict().items()}
