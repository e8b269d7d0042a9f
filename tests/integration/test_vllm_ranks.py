"""A real vLLM that two ranks hold together says what one of a single rank says, and they stay in step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm_models import DEVICE, EOS, build, config_of, weights_of
from vllm_ranks_run import COUNTS, PROMPTS, SEQUENCES, dtype_of, said

from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm import VLLMEngineFactory
from lqrl.quant.lora import Lora
from lqrl.quant.scheme import QuantScheme
from lqrl.types import SamplingParams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(DEVICE.type == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
FP32 = torch.float32


@pytest.fixture(scope="module", params=["none", "fp8_per_channel"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("vllm_ranks_run.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
         str(folder), request.param],
        capture_output=True, text=True, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return request.param, [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(2)]


def same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a[:2] == b[:2]
        assert torch.equal(a[2], b[2])
        torch.testing.assert_close(a[3], b[3], rtol=0, atol=2e-3 if DEVICE.type == "cuda" else 1e-4)
        torch.testing.assert_close(a[4], b[4], rtol=0, atol=2e-3 if DEVICE.type == "cuda" else 1e-4)


def test_each_rank_gets_what_a_single_one_says(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    preset, (first, second) = ranks
    dtype = dtype_of(preset)
    engine = build("qwen2", preset, dtype, record_log_mass=True)
    engine.update_weights(weights_of("qwen2", QuantScheme.preset(preset), dtype), policy_version=0)
    scores = zip(first["scores"] + second["scores"], engine.score(SEQUENCES), strict=True)
    gaps = torch.cat([(ours - theirs).abs() for ours, theirs in scores])
    if preset == "none":
        params = SamplingParams(n=COUNTS, max_tokens=9, temperature=0.8, ignore_eos=True)
        same(first["completions"] + second["completions"], said(engine.generate(PROMPTS, params, seed=1)))
        truncated = SamplingParams(n=2, max_tokens=6, top_k=5, ignore_eos=True)
        same(first["truncated"] + second["truncated"], said(engine.generate(PROMPTS, truncated, seed=1)))
        same(first["alone"], said(engine.generate(PROMPTS[:2], SamplingParams(max_tokens=3), seed=2)))
    engine.close()
    assert second["alone"] == []
    # In low bits each rank has a scale of its own for its part of a token; in bf16 they round their sums apart too.
    low_bit = 0.3 if dtype == FP32 else 1.0
    assert gaps.max() < (low_bit if preset != "none" else 1e-4 if DEVICE.type == "cpu" else 2e-3)


def test_a_refresh_is_one_of_all_ranks(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    first, second = ranks[1]
    assert first["digests"] == second["digests"]
    there, other, back, again = first["digests"]
    assert there == back == again != other
    assert first["version"] == second["version"] == 4


def test_what_fails_on_one_rank_fails_on_all(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    first, second = ranks[1]
    assert (
        second["bad prompt"].startswith("ValueError: prompt 1 has token ids outside")
        or "vocabulary" in second["bad prompt"]
    )
    assert first["bad prompt"].startswith("RankFailed: rank 1 failed: ValueError")
    assert second["bad stream"].startswith("RefreshError: ")
    assert "missing: model.embed_tokens.weight" in second["bad stream"]
    assert first["bad stream"].startswith("RefreshError: rank 1 failed: RefreshError: ")
    for each in (first, second):
        assert "StaleEngineError: the engine refuses to generate: its last refresh failed" in each["after it"]


def spec(preset: str = "none", lora: Lora | None = None) -> EngineSpec:
    return EngineSpec(config_of("qwen2"), QuantScheme.preset(preset), FP32, DEVICE, 128, EOS, lora)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "tensor_parallel_size=2: all ranks of the run hold one engine together, and there are 1"),
        ({"online": True}, "online: not with tensor_parallel_size"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
    ],
    ids=lambda _: None,
)
def test_ranks_that_are_not_there_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMEngineFactory(**({"tensor_parallel_size": 2} | options))(spec())
