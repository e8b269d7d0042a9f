"""One of two ranks that hold a vLLM together; writes what its engine said."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from vllm_models import DEVICE, LOW_BIT_DTYPE, build, weights_of

from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, SamplingParams

PROMPTS = [Prompt(id=10 * i + 3, input_ids=tuple(range(4, 6 + 3 * i))) for i in range(4)]
COUNTS = (3, 2, 1, 4)
SEQUENCES = [[5, 9, 4, 30, 2, 8], [7, 7], [9, 3, 3]]
MINE = (slice(0, 3), slice(3, 4))  # of rank 0 and of rank 1


def dtype_of(preset: str) -> torch.dtype:
    return torch.float32 if preset == "none" else LOW_BIT_DTYPE


def said(groups: list[list[Completion]]) -> list[Any]:
    return [(c.prompt_id, c.sample_index, c.token_ids, c.logprobs, c.log_mass) for group in groups for c in group]


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(folder: Path, preset: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if DEVICE.type == "cpu" else "nccl")
    scheme, dtype, found = QuantScheme.preset(preset), dtype_of(preset), {}
    engine = build("qwen2", preset, dtype, tensor_parallel_size=2, record_log_mass=True)

    def refresh(seed: int, version: int, missing: bool = False) -> str:
        weights = list(weights_of("qwen2", scheme, dtype, seed))
        return engine.update_weights(weights[1:] if missing else weights, policy_version=version).digest

    found["digests"] = [refresh(seed, version) for version, seed in enumerate((0, 1, 0))]
    mine = PROMPTS[MINE[rank]]
    params = SamplingParams(n=COUNTS[MINE[rank]], max_tokens=9, temperature=0.8, ignore_eos=True)
    found["completions"] = said(engine.generate(mine, params, seed=1))
    truncated = SamplingParams(n=2, max_tokens=6, top_k=5, ignore_eos=True)
    found["truncated"] = said(engine.generate(mine, truncated, seed=1))
    # Rank 1 has no prompts left.
    found["alone"] = said(engine.generate(PROMPTS[:2] if rank == 0 else [], SamplingParams(max_tokens=3), seed=2))
    found["scores"] = engine.score(SEQUENCES[:1] if rank == 0 else SEQUENCES[1:])
    # One rank fails: nobody waits, and nobody goes on.
    bad = [Prompt(1, (5,))] if rank == 0 else [Prompt(1, (64,))]
    found["bad prompt"] = failure(lambda: engine.generate(bad, SamplingParams(max_tokens=3), seed=2))
    found["bad stream"] = failure(lambda: refresh(1, 3, missing=rank == 1))
    found["after it"] = failure(lambda: engine.generate(mine, params, seed=1))
    found["digests"].append(refresh(0, 4))
    found["version"] = engine.policy_version
    engine.close()
    dist.barrier()  # the run's group outlives the engine
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)
    main(Path(sys.argv[1]), sys.argv[2])
