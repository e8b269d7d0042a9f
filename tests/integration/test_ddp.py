"""Two DDP ranks are one learner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("ddp_run.py")


def launch(folder: Path, *, devices: int, tokens: int = 4096, epochs: int = 1, resume: Path | str | None = None):
    folder.mkdir(parents=True, exist_ok=True)
    words = [folder, devices, tokens, epochs, *([resume] if resume else [])]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "LOCAL_RANK", "WORLD_SIZE"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)], capture_output=True, text=True, timeout=300,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(devices)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    # A small token budget: several micro-batches a rank, of which only the last synchronizes.
    folder = tmp_path_factory.mktemp("two")
    return launch(folder, devices=2, tokens=120, epochs=2), folder / "epoch0.ckpt"


def test_ranks_end_with_equal_weights(two):
    two = two[0]
    assert all(torch.equal(t, two[1]["weights"][n]) for n, t in two[0]["weights"].items())


def test_ranks_share_the_prompts_and_sample_what_one_process_samples(two, tmp_path):
    (one,) = launch(tmp_path, devices=1)
    two = two[0]
    first = {k: v for k, v in one["rows"].items() if k[0] == 0}
    shares = [{k: v for k, v in rank["rows"].items() if k[0] == 0} for rank in two]
    assert not shares[0].keys() & shares[1].keys()
    assert shares[0] | shares[1] == first


def test_two_ranks_resume_bit_for_bit(two, tmp_path):
    whole, checkpoint = two
    resumed = launch(tmp_path, devices=2, tokens=120, epochs=2, resume=checkpoint)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert all(torch.equal(t, theirs["weights"][n]) for n, t in ours["weights"].items())
        assert all(theirs["rows"][k] == v for k, v in ours["rows"].items())
        assert min(k[0] for k in ours["rows"]) == 3


@pytest.mark.parametrize("mode", ["few", "fabric"])
def test_a_rank_without_rows_steps_with_the_others(tmp_path, mode):
    ranks = launch(tmp_path, devices=2, epochs=2, resume=mode)
    # The scenario is there: in some iteration one rank learned from rows and the other had none.
    assert any((a == 0) != (b == 0) for a, b in zip(ranks[0]["learned"], ranks[1]["learned"], strict=True))
    assert all(torch.equal(t, ranks[1]["weights"][n]) for n, t in ranks[0]["weights"].items())
