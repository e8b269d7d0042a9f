"""The quickstart with vLLM in the engine's place, and nothing else changed."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("vllm")
from vllm_models import DEVICE, KV_BYTES, LOW_BIT_DTYPE

from lqrl.cli import run
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.modeling.sources import resolve_source

pytestmark = pytest.mark.vllm

POLICY = "asset:countdown_policy"


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped policy for vLLM's CPU attention, which has no heads of 16."""
    folder = tmp_path_factory.mktemp("policy")
    subprocess.run([sys.executable, "examples/widen_policy.py", str(folder)], check=True)
    policy, wide = (load_model(resolve_source(path), dtype=torch.float32).eval() for path in (POLICY, str(folder)))
    ids = torch.arange(4, 30)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        a, b = (Scorer(model, 1.0, torch.float32).score(ids, mask) for model in (policy, wide))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-3)
    return str(folder)


def config_of(model: str, folder: Path, engine: dict[str, Any], **changes: Any) -> Path:
    """The quickstart, three iterations long."""
    config = yaml.safe_load(Path("configs/quickstart.yaml").read_text())
    config["trainer"] |= {
        "accelerator": DEVICE.type,
        "max_epochs": 1,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 1,
    }
    config["trainer"]["logger"]["init_args"]["save_dir"] = str(folder / "runs")
    options = config["model"]["init_args"]
    options |= {"model": model, "engine": engine, "val_samples": 2} | changes
    config["data"]["init_args"] |= {"prompts_per_iteration": 8, "iterations_per_epoch": 3}
    for source in ("train", "val"):
        config["data"]["init_args"][source]["limit"] = 24
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def quickstart(model: str, folder: Path, engine: dict[str, Any], **changes: Any) -> list[dict[str, str]]:
    """Three iterations; the rows of metrics.csv."""
    if changes.get("scheme") != "none":
        changes = {"dtype": str(LOW_BIT_DTYPE).removeprefix("torch.")} | changes
    cli = run(["fit", "--config", str(config_of(model, folder, engine, **changes))])
    with (Path(cli.trainer.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


VLLM: dict[str, Any] = {
    "class_path": "lqrl.engines.vllm.VLLMEngineFactory",
    "init_args": {
        "max_num_seqs": 64,
        "kv_cache_bytes": KV_BYTES,
        "engine_args": {"block_size": 32, "enforce_eager": True},
    },
}
# In fp32 the aligned learner says what vLLM sampled with; an activation may go to the next code, which is far in fp8.
MOST_K3 = {"none": 1e-8, "int8_w8a8": 1e-6, "fp8_per_channel": 1e-3}
if DEVICE.type != "cpu":
    VLLM["init_args"]["gpu_memory_utilization"] = 0.05
    MOST_K3 = {"none": 1e-7, "int8_w8a8": 0.01, "fp8_per_channel": 0.01}  # low bits in bf16


@pytest.mark.parametrize("scheme", ["int8_w8a8", "fp8_per_channel", "none"])
def test_the_quickstart_trains_on_vllm_rollouts(wider: str, tmp_path: Path, scheme: str) -> None:
    rows = quickstart(wider, tmp_path, VLLM, scheme=scheme, validate_full_precision=scheme == "int8_w8a8")
    assert len(column(rows, "rollout/length")) == 3
    assert max(column(rows, "mismatch/k3")) < MOST_K3[scheme]
    # Every iteration moved the engine, and left most codes as they were.
    assert all(0 < moved <= 1 for moved in column(rows, "refresh/elements_changed_fraction"))
    assert all(0 < moved < 0.9 for moved in column(rows, "refresh/codes_changed_fraction")) or scheme == "none"
    assert len(column(rows, "val/pass@1")) >= 1
    assert bool(column(rows, "val_full/pass@1")) == (scheme == "int8_w8a8")


def test_adapters_train_on_vllm_rollouts(wider: str, tmp_path: Path) -> None:
    lora = {"r": 4, "alpha": 8.0, "train_norms": True, "refresh": "adapter"}
    rows = quickstart(wider, tmp_path, VLLM, scheme="fp8_per_channel", lora=lora)
    assert max(column(rows, "mismatch/k3")) < MOST_K3["fp8_per_channel"]
    # The base came before the first iteration.
    moved = column(rows, "refresh/elements_changed_fraction")
    assert min(moved) > 0
    assert max(moved) < 1
    assert column(rows, "refresh/codes_changed_fraction") == [0.0] * 3


def test_vllm_quantizes_what_a_run_ships(wider: str, tmp_path: Path) -> None:
    engine = VLLM | {"init_args": VLLM["init_args"] | {"online": True}}
    rows = quickstart(wider, tmp_path, engine, scheme="fp8_per_channel", dtype="bfloat16")
    assert len(column(rows, "rollout/length")) == 3
    assert max(column(rows, "mismatch/k3")) < 0.01
    assert all(0 < moved <= 1 for moved in column(rows, "refresh/elements_changed_fraction"))


@pytest.mark.skipif(DEVICE.type == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_train_on_rollouts_of_an_engine_that_they_hold_together(wider: str, tmp_path: Path) -> None:
    engine = VLLM | {"init_args": VLLM["init_args"] | {"tensor_parallel_size": 2}}
    path = config_of(wider, tmp_path, engine, scheme="none")
    config = yaml.safe_load(path.read_text())
    config["trainer"] |= {"devices": 2, "strategy": "ddp"}
    path.write_text(yaml.safe_dump(config))
    words = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "lqrl",
        "fit",
        "--config",
        str(path),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    done = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    (metrics,) = (tmp_path / "runs").rglob("metrics.csv")
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    assert len(column(rows, "rollout/length")) == 3
    assert max(column(rows, "mismatch/k3")) < MOST_K3["none"]
    assert all(0 < moved <= 1 for moved in column(rows, "refresh/elements_changed_fraction"))
    assert len(column(rows, "val/pass@1")) >= 1
