"""What it costs, and saves, that engine and learner give each other memory: the cache, and the optimizer's state.

Iterations of a Qwen3 shape with random weights in one process: rollouts (samples of few tokens after a long prompt, so
that the cache is large and the rows are soon there), the gradients and the step of an aligned learner, a refresh. Three
times: everything is kept; the engine's cache is released while the learner learns (``sleep_level: 1``); and besides
the optimizer's state lies in main memory while nobody steps (`StateOffload`).

Times are medians of all iterations but the first, whose memory and graphs are new. Peaks are of what PyTorch has
allocated, and of the cache where it is not PyTorch's. The optimizer is KahanAdamW (8 bytes a parameter) where that
fits on one card, else SGD with momentum, whose 2 bytes are those of 8-bit AdamW.

    python benchmarks/memory.py
    OMP_NUM_THREADS=1 python benchmarks/memory.py --models tiny --device cpu --prompts 2 --prompt 8 --total 96 \\
        --longest 32

Each way runs in a process of its own; one that fails or takes longer than ``--limit`` seconds costs one row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

from children import Job, Row, add_job_options, failure, run_jobs, send, versions, wait_for_turn
from learner import BUDGETS, make_batch, mixed_lengths, randomize_
from options import at_least, positive, scheme_name
from rows import Record, Table
from shapes import SHAPES
from side_by_side import measured_device

WAYS: dict[str, tuple[Literal[0, 1], bool]] = {
    "kept": (0, False),
    "cache released": (1, False),
    "cache and state": (1, True),
}
SMALL_STATES = ("8B", "32B")  # moments of 6 bytes and more fit beside nothing of these
MICRO_BATCHES = BUDGETS | {"8B": 1024}  # beside gradients and state


# ---------------------------------------------------------------- in a child


class Iterations:
    """Engine, learner and optimizer on one device."""

    def __init__(self, case: Row) -> None:
        import torch

        from lqrl.engines.base import EngineSpec
        from lqrl.engines.torch import TorchEngineFactory
        from lqrl.learner import KahanAdamW
        from lqrl.learner.offload import StateOffload
        from lqrl.learner.scorer import Scorer
        from lqrl.modeling.backbone import load_model
        from lqrl.quant import QuantScheme, prepare_
        from lqrl.types import Prompt, SamplingParams

        self.case, self.device, self.dtype = case, torch.device(case["device"]), torch.bfloat16
        self.scheme, (level, offloads) = QuantScheme.preset(case["format"]), WAYS[case["way"]]
        length, vocabulary = case["prompt"] + case["tokens"], SHAPES[case["model"]].vocabulary
        config = SHAPES[case["model"]].config(max(length, case["longest"]))
        self.policy = load_model(config, dtype=self.dtype, device=self.device)
        randomize_(self.policy)
        if self.scheme.quantizes:
            prepare_(self.policy, self.scheme, export_dtype=self.dtype)
        self.policy.train()
        self.scorer = Scorer(self.policy, 1.0, self.dtype)
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.policy.parameters(), lr=1e-6, momentum=0.9)
            if case["model"] in SMALL_STATES
            else KahanAdamW(self.policy.parameters(), lr=1e-6)
        )
        self.offload = StateOffload(self.optimizer) if offloads else None
        lengths = [(int(p), int(c)) for p, c in case["lengths"]]
        self.batch = make_batch(case["model"], lengths).to(self.device)
        drawn = torch.randint(vocabulary, (case["prompts"], case["prompt"]), generator=torch.Generator().manual_seed(0))
        self.prompts = [Prompt(id=i, input_ids=tuple(ids)) for i, ids in enumerate(drawn.tolist())]
        self.params = SamplingParams(n=case["samples"], max_tokens=case["tokens"], ignore_eos=True)
        spec = EngineSpec(config, self.scheme, self.dtype, self.device, length, ())
        factory = TorchEngineFactory(max_num_seqs=case["prompts"] * case["samples"], sleep_level=level)
        self.engine = factory(spec)
        self.version = 0

    def refresh(self) -> None:
        """The policy's weights to the engine."""
        from lqrl.quant import export_weights

        weights = export_weights(self.policy, self.scheme, export_dtype=self.dtype)
        self.engine.wake()
        self.engine.update_weights(weights, policy_version=self.version)
        self.version += 1

    def learn(self) -> None:
        """Gradients of the batch, and a step."""
        import torch

        from lqrl.algorithms import ClippedLoss, TokenTIS
        from lqrl.learner.update import Objective, accumulate_gradients
        from lqrl.types import ClipRange

        accumulate_gradients(
            self.scorer.score,
            self.batch,
            Objective(ClippedLoss(), TokenTIS()),
            clip_range=ClipRange(),
            token_budget=self.case["budget"],
            backward=lambda loss: loss.backward(),
            anchor=lambda: torch.zeros((), device=self.device),
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, clock: Any) -> Row:
        """One iteration; seconds and bytes."""
        started = time.perf_counter()
        clock.lap()
        self._forget_peak()
        self.engine.generate(self.prompts, self.params, seed=self.version)
        row: Row = {"cache_bytes": self.engine.cache_bytes, "peak_generate": self._peak()}
        row |= {"restore_s": clock.lap()["memory"]}
        self.engine.sleep()
        row |= {"release_s": clock.lap()["memory"]}
        self._forget_peak()
        self.learn()
        row |= {"state_in_s": clock.lap()["memory"], "peak_learn": self._peak()}
        row |= {"state_bytes": 0 if self.offload is None else self.offload.offload()}
        row |= {"state_out_s": clock.lap()["memory"]}
        self.refresh()
        clock.lap()
        return row | {"iteration_s": time.perf_counter() - started}

    def _forget_peak(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self) -> int | None:
        """Most bytes since the last look, with those that PyTorch does not count."""
        import torch

        if self.device.type != "cuda":
            return None
        apart = self.engine.cache_bytes if self.engine.options.sleep_level else 0
        return torch.cuda.max_memory_allocated(self.device) + apart


def measure_case(case: Row) -> None:
    """Measure one way and send its row."""
    import torch

    from lqrl.phases import PhaseClock

    wait_for_turn()
    cuda = case["device"] == "cuda"
    card = torch.cuda.get_device_name() if cuda else "CPU"
    shared: Row = {"card": card, "versions": versions("torch", "triton", "transformers", "lqrl")}
    try:
        iterations = Iterations(case)
        iterations.refresh()
        with PhaseClock(torch.cuda.synchronize) if cuda else PhaseClock() as clock:
            rows = [iterations.run(clock) for _ in range(case["repeats"] + 1)][1:]
        row: Row = {name: statistics.median(r[name] for r in rows) for name in rows[0] if name.endswith("_s")}
        row |= {name: rows[-1][name] for name in ("cache_bytes", "state_bytes")}
        for name in ("peak_generate", "peak_learn"):
            row[name] = max(r[name] for r in rows) if cuda else None
        send(shared | row)
    except Exception as error:
        send(shared | failure(error))


# ---------------------------------------------------------------- in the parent


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """One a row."""
    names = ("device", "format", "prompts", "samples", "prompt", "tokens", "longest", "repeats")
    shared: Row = {name: getattr(args, name) for name in names}
    shared["lengths"] = mixed_lengths(args.total, args.longest)
    jobs = []
    for model in args.models:
        for way in args.ways:
            case = shared | {"model": model, "way": way, "budget": args.token_budget or MICRO_BATCHES[model]}
            jobs.append(Job(__file__, case, [{"model": model, "way": way}]))
    return jobs


def show(table: Table, row: Row) -> None:
    """Print a row, or what went wrong with it."""
    sizes = [None if row.get(f"{name}_bytes") is None else row[f"{name}_bytes"] / 2**30 for name in ("cache", "state")]
    times = [
        None if row.get(f"{name}_s") is None else row[f"{name}_s"] * 1e3
        for name in ("release", "restore", "state_out", "state_in")
    ]
    peaks = [None if row.get(name) is None else row[name] / 2**30 for name in ("peak_generate", "peak_learn")]
    table.row(row["model"], row["way"], *sizes, *times, *peaks, row.get("iteration_s"), row.get("error"))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6B", "8B"], choices=list(SHAPES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--format", type=scheme_name, default="int8_w8a8", help="of the engine and the aligned learner")
    parser.add_argument("--prompts", type=positive, default=12)
    parser.add_argument("--samples", type=positive, default=16, help="of a prompt; all run together")
    parser.add_argument("--prompt", type=positive, default=384, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=16, help="new tokens of a sample")
    parser.add_argument("--total", type=at_least(2), default=16384, help="tokens of an optimizer step")
    parser.add_argument(
        "--longest", type=at_least(2), default=2048, help="tokens of the longest sequence that is learned from"
    )
    parser.add_argument(
        "--token-budget", type=positive, help="most tokens of a micro-batch; the default goes by the model"
    )
    parser.add_argument("--repeats", type=positive, default=3)
    add_job_options(parser, "one row", limit=120)
    return parser.parse_args(argv)


def main() -> None:
    """Print the table."""
    args = parse()
    if args.case:
        measure_case(args.case)
        return
    measured_device(args.device)
    record = Record(args.rows, "memory")
    samples = f"{args.prompts * args.samples} samples of {args.prompt + args.tokens} tokens"
    print(f"{args.format}, {args.device}, {samples}, {args.total} tokens learned from\n")
    titles = (
        "model",
        "way",
        "cache, GiB",
        "state moved, GiB",
        "release, ms",
        "restore, ms",
        "state out, ms",
        "state in, ms",
    )
    table = Table(*titles, "peak generating, GiB", "peak learning, GiB", "iteration, s", "note")
    for row in run_jobs(make_jobs(args), limit=args.limit, budget=args.budget, ahead=args.device != "cpu"):
        record.add(row | {"total": args.total, "format": args.format})
        show(table, row)
    record.end()


if __name__ == "__main__":
    main()
