"""Exact mode in a whole run: on-policy iterations have no mismatch at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_data, make_module, make_trainer

from lqrl.learner import PolicyModule
from lqrl.quant import Lora


class Watched(PolicyModule):
    """Keeps the largest difference of rollout and learner in each iteration, before its step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.differences: list[float] = []

    def optimize(self, batch: Any, **options: Any) -> dict[str, float]:
        with torch.no_grad():
            now = self(batch.input_ids, batch.attention_mask)
        self.differences.append(float((now - batch.behavior_logprobs)[batch.loss_mask].abs().max()))
        return super().optimize(batch, **options)


def run(folder: Path, **options: Any) -> Watched:
    module = make_module(Watched, **options)
    make_trainer(folder, epochs=1, limit_val_batches=1).fit(module, make_data())
    return module


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "int8_w8a8"},
        {"scheme": "int8_w8a8+lm_head+kv_int8", "dtype": "bfloat16"},
        {"scheme": "int4_w4a16_g32", "lora": Lora(r=4, alpha=8)},
        {"scheme": "none", "dtype": "bfloat16"},
    ],
    ids=["int8", "int8-everywhere-bf16", "int4-lora", "bf16"],
)
def test_a_run_has_no_mismatch(tmp_path: Path, options: dict[str, Any]):
    module = run(tmp_path, exact=True, **options)
    assert module.differences == [0.0, 0.0, 0.0]
    assert module.policy_version == 3


def test_the_same_run_has_a_mismatch_otherwise(tmp_path: Path):
    assert min(run(tmp_path, scheme="int8_w8a8").differences) > 0


def test_a_learner_in_full_precision_cannot_be_exact():
    with pytest.raises(ValueError, match="exact: true needs aligned: true"):
        make_module(exact=True, aligned=False)
