"""One whole iteration of reinforcement learning, beside TRL's GRPOTrainer: the same shape, prompts, reward and lengths.

A Qwen3 with random weights answers 64 prompts 8 times with 1024 tokens each, a reward is drawn from the tokens, and one
optimizer step of GRPO without a KL penalty follows. The first iteration is not counted. Phases in seconds: for this
library those of `lqrl.callbacks.PhaseTimer`; for TRL generate is the time inside the model's ``generate`` (or vLLM's),
reward that of the reward function, forward-backward what is left of its own ``step_time``, step what is left of the
iteration: clipping, the optimizer, and what the GPU still owes.

    python benchmarks/iteration.py --trl-path /path/to/site
    python benchmarks/iteration.py --learners trl trl-vllm none fp8_per_channel+kv_fp8 --vllm-path /path/to/vllm
    OMP_NUM_THREADS=1 python benchmarks/iteration.py --model tiny --device cpu --learners none int8_w8a8 \\
        --prompts 2 --samples 2 --prompt 8 --tokens 6

``--trl-path`` is a folder with trl and datasets (``pip install --no-deps --target FOLDER trl datasets dill
multiprocess``), which only TRL's processes see. A learner that fails or takes longer than ``--limit`` costs its row.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from children import Job, Row, add_job_options, failure, run_jobs, searched_first, send, versions, wait_for_turn
from options import at_least, dtype_name, positive, require, scheme_name_or
from rows import Record, Table
from shapes import SHAPES
from side_by_side import measured_device

PEERS = ("trl", "trl-vllm")
PHASES = ("generate", "reward", "score", "forward_backward", "step", "calibrate", "refresh", "other")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
VLLM_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


# ---------------------------------------------------------------- in a child


def measure_case(case: Row) -> None:
    """Train for some iterations with one learner and send the mean of those that count."""
    import torch

    learner = case["learner"]
    if learner in PEERS:
        from iteration_trl import train
    else:
        from iteration_lqrl import train
    wait_for_turn()
    card = torch.cuda.get_device_name() if case["device"] == "cuda" else "CPU"
    row: Row = {"card": card, "versions": versions("torch", "triton", "transformers", "trl", "vllm", "lqrl")}
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_policy(case, Path(folder))
            iterations = train(case, Path(folder))[1:]
        mean = {name: sum(each.get(name, 0.0) for each in iterations) / len(iterations) for name in iterations[0]}
        mean["tokens_per_s"] = case["prompts"] * case["samples"] * case["tokens"] / mean["iteration"]
        send(row | mean | {"peak_bytes": torch.cuda.max_memory_allocated() if case["device"] == "cuda" else None})
    except Exception as error:
        send(row | failure(error))
    os._exit(0)  # vLLM's threads may hang at exit; the folder is gone by now


def save_policy(case: Row, folder: Path) -> None:
    """A model with random weights and its tokenizer, one token a character."""
    import torch
    from transformers import AutoModelForCausalLM

    from lqrl.testing.tokenizer import character_tokenizer

    config = SHAPES[case["model"]].config(case["prompt"] + case["tokens"] + 1)
    torch.manual_seed(0)
    with torch.device(case["device"]):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case["master"]))
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


# ---------------------------------------------------------------- in the parent


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """One a learner, TRL's first, since ratios are to them."""
    names = ("model", "prompts", "samples", "prompt", "tokens", "device", "dtype", "master", "iterations")
    shared = {name: getattr(args, name) for name in (*names, "generation_batch", "token_budget", "trl_rows")}
    jobs = []
    for learner in sorted(args.learners, key=lambda name: (*PEERS, name).index(name)):
        paths = [args.trl_path] if learner in PEERS else []
        paths += [args.vllm_path] if learner == "trl-vllm" else []
        environment = ENVIRONMENT | (VLLM_ENVIRONMENT if learner == "trl-vllm" else {})
        environment |= searched_first(*paths)
        keys = {"learner": learner, "model": args.model}
        jobs.append(Job(__file__, shared | {"learner": learner}, [keys], environment=environment))
    return jobs


def check(args: argparse.Namespace, refuse: Callable[[str], object]) -> None:
    """Refuse sizes that one side could not divide as the other does."""
    rows = args.prompts * args.samples
    for name in ("trl_rows", "generation_batch"):
        value = min(getattr(args, name), rows)
        setattr(args, name, value)
        if rows % value:
            refuse(f"--{name.replace('_', '-')} {value} does not divide the {rows} samples of an iteration")
    if args.generation_batch % args.trl_rows or args.generation_batch % args.samples:
        refuse(
            f"--generation-batch {args.generation_batch} must be a multiple of --trl-rows {args.trl_rows} and of "
            f"--samples {args.samples}"
        )


def with_ratios(row: Row, peers: dict[str, Row]) -> Row:
    """``row`` with its speed over that of each peer before it, which it joins if it is one."""
    if "tokens_per_s" not in row:
        return row
    ratios = {f"x_{name}": row["tokens_per_s"] / peer["tokens_per_s"] for name, peer in peers.items()}
    if row["learner"] in PEERS:
        peers[row["learner"]] = row
    return row | ratios


def show(table: Table, row: Row) -> None:
    """Print a row, or what went wrong with it."""
    peak = row.get("peak_bytes")
    names = ("learner", "iteration", "tokens_per_s", *(f"x_{name}" for name in PEERS), *PHASES)
    table.row(*(row.get(name) for name in names), None if peak is None else peak / 2**30, row.get("error"))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--learners", nargs="+", type=scheme_name_or(*PEERS), help="trl, trl-vllm, or a scheme; none is bf16",
        default=["trl", "none", "int8_w8a8", "fp8_per_channel+kv_fp8"],
    )  # fmt: skip
    parser.add_argument("--model", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--prompts", type=positive, default=64)
    parser.add_argument("--samples", type=positive, default=8, help="of a prompt")
    parser.add_argument("--prompt", type=positive, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=1024, help="new tokens of a sample")
    parser.add_argument("--iterations", type=at_least(2), default=2, help="the first is not counted")
    parser.add_argument("--generation-batch", type=positive, default=256, help="samples that are generated together")
    parser.add_argument(
        "--token-budget", type=positive, default=8192, help="most tokens of a micro-batch of this library"
    )
    parser.add_argument("--trl-rows", type=positive, default=8, help="sequences of a micro-batch of TRL")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="of products")
    parser.add_argument("--master", type=dtype_name, default="float32", help="of parameters and optimizer")
    parser.add_argument("--trl-path", type=Path, help="a folder with trl and datasets")
    parser.add_argument("--vllm-path", type=Path, help="a folder with vLLM, for trl-vllm")
    add_job_options(parser, "one row", limit=240)
    args = parser.parse_args(argv)
    if not args.case:
        check(args, parser.error)
    return args


def main() -> None:
    """Print the table."""
    args = parse()
    if args.case:
        measure_case(args.case)
        return
    measured_device(args.device)
    if set(PEERS) & set(args.learners):
        require("trl", "--trl-path", args.trl_path)
        require("datasets", "--trl-path", args.trl_path)
    if "trl-vllm" in args.learners:
        require("vllm", "--vllm-path", args.vllm_path, args.trl_path)
    record, peers = Record(args.rows, "iteration"), {}
    sizes = f"{args.prompts} prompts of {args.prompt} x {args.samples}, {args.tokens} new tokens"
    print(f"Qwen3 {args.model}, {sizes}, {args.dtype} products, {args.master} masters, {args.device}\n")
    phases = [name.replace("_", "-") for name in PHASES]
    table = Table("learner", "iteration, s", "tokens/s", *(f"x {name}" for name in PEERS), *phases, "peak, GiB", "note")
    for row in run_jobs(make_jobs(args), limit=args.limit, budget=args.budget, ahead=args.device != "cpu"):
        row = with_ratios(row, peers)
        record.add({name: getattr(args, name) for name in ("prompts", "samples", "prompt", "tokens", "master")} | row)
        show(table, row)
    record.end()


if __name__ == "__main__":
    main()
