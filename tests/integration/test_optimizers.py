"""Optimizers of other packages, by one line of a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import weights

from lqrl.cli import run


def recipe(folder: Path, optimizer: dict[str, Any], epochs: int, **model: Any) -> Path:
    """The quickstart with few prompts, another optimizer, and a checkpoint an epoch in ``folder``."""
    config = yaml.safe_load(Path("configs/quickstart.yaml").read_text(encoding="utf-8"))
    checkpoint = {"dirpath": str(folder), "filename": "epoch{epoch}", "auto_insert_metric_name": False}
    checkpoint |= {"save_on_train_epoch_end": False, "save_top_k": -1}
    config["trainer"] |= {
        "max_epochs": epochs,
        "num_sanity_val_steps": 0,
        "logger": False,
        "default_root_dir": str(folder),
    }
    config["trainer"]["callbacks"] = [
        {"class_path": "lqrl.callbacks.EngineRefresh"},
        {"class_path": "lqrl.callbacks.SamplerFeedback"},
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": checkpoint},
    ]
    settings, data = config["model"]["init_args"], config["data"]["init_args"]
    settings |= {"sampling": {"max_tokens": 8}, "val_samples": 1, "optimizer": optimizer} | model
    data |= {"prompts_per_iteration": 16, "iterations_per_epoch": 2}
    data["train"]["rows"]["init_args"]["size"] = data["val"]["rows"]["init_args"]["size"] = 32
    folder.mkdir()
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_bitsandbytes_eight_bit_adamw_trains_and_resumes_exactly(tmp_path: Path, monkeypatch, master: str):
    pytest.importorskip("bitsandbytes", minversion="0.50", reason="needs bitsandbytes with optimizers for CPUs")
    monkeypatch.setattr(sys, "argv", ["lqrl"])
    optimizer = {"class_path": "bitsandbytes.optim.AdamW8bit", "init_args": {"lr": 3e-4, "weight_decay": 0.0}}

    def fitted(name: str, epochs: int, *words: str) -> Any:
        path = recipe(tmp_path / name, optimizer, epochs, master_dtype=master, dtype=master)
        return run(["fit", "--config", str(path), *words])

    whole, first = fitted("whole", 2), fitted("first", 1)
    rest = fitted("rest", 2, "--ckpt_path", str(tmp_path / "first" / "epoch0.ckpt"))
    assert (first.model.iteration, rest.model.iteration) == (2, 4)
    moments = [s["state1"] for s in rest.trainer.optimizers[0].state.values()]
    assert {m.dtype for m in moments} == {torch.uint8, torch.float32}  # tensors below 4096 elements keep fp32
    assert {p.dtype for p in rest.model.policy.parameters()} == {getattr(torch, master)}
    assert float(rest.trainer.callback_metrics["refresh/codes_changed_fraction"]) > 0
    expected, ours, before = weights(whole.model), weights(rest.model), weights(first.model)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert any(not torch.equal(ours[name], before[name]) for name in before)
