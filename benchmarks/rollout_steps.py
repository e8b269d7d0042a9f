"""A rollout of the embedded engine step by step: what its steps take, what lies between them, and the GPU's clock.

Every sample is generated to its full length, all at once. Times are the GPU's, of as many steps as lie between two
looks of the host; a line for each share of the rollout gives their mean, the gaps between them, and the clock of the
multiprocessors and the power that nvidia-smi saw meanwhile. Then the whole call: prefill, decoding, the rest. Before
the rollout the same steps run for a short time after a pause, as `decode_step.py` measures them: the difference is the
clock's, where the power limit of the card lowers it.

    python benchmarks/rollout_steps.py --formats none fp8_per_channel+kv_fp8_static
    OMP_NUM_THREADS=1 python benchmarks/rollout_steps.py --model tiny --device cpu --batch 2 --prompt 8 --tokens 64
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from options import dtype_name, positive, scheme_name
from rollout_engines import Setting, random_weights
from rows import Table
from shapes import SHAPES
from side_by_side import card, measured_device

from lqrl.engines.stepper import Stepper
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams

INTERVAL = 8
_QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "-lms", "50"]


@dataclass
class Steps:
    """What a rollout's runs of `INTERVAL` steps or fewer took.

    Attributes:
        marks: beginning, end and steps of each run.
    """

    cuda: bool
    marks: list[tuple[Any, Any, int]] = field(default_factory=list)

    def mark(self) -> Any:
        """A point in the stream, or in time without one."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, a: Any, b: Any) -> float:
        """Milliseconds from one mark to another."""
        return a.elapsed_time(b) if self.cuda else (b - a) * 1e3

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Note every run that begins in here."""
        run = Stepper.run

        def marked(stepper: Stepper, steps: int) -> Any:
            begin = self.mark()
            drawn = run(stepper, steps)
            self.marks.append((begin, self.mark(), steps))
            return drawn

        Stepper.run = marked  # type: ignore[method-assign]
        try:
            yield
        finally:
            Stepper.run = run  # type: ignore[method-assign]

    def share(self, part: slice) -> tuple[float, float]:
        """Milliseconds of a step, and of what lies between two runs, in some of the runs."""
        some = self.marks[part]
        gaps = [self.between(a[1], b[0]) for a, b in pairwise(some)]
        step = sum(self.between(a, b) for a, b, _ in some) / sum(steps for *_, steps in some)
        return step, statistics.mean(gaps) if gaps else 0.0


class Clock:
    """The GPU's clock in MHz and its power in watts, while this is entered; nothing without nvidia-smi."""

    def __init__(self, active: bool) -> None:
        self._active = active
        self.seen: list[tuple[float, float]] = []

    def __enter__(self) -> Clock:
        self._log = tempfile.TemporaryFile("w+")
        self._process: subprocess.Popen[str] | None = None
        if self._active:
            with contextlib.suppress(OSError):
                # Its own numbers of cards are not torch's where CUDA_VISIBLE_DEVICES is set.
                query = [*_QUERY, "-i", f"GPU-{torch.cuda.get_device_properties().uuid}"]
                self._process = subprocess.Popen(query, stdout=self._log, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(5)
        self._log.seek(0)
        for line in self._log.read().splitlines():
            with contextlib.suppress(ValueError):
                clock, power = line.split(",")
                self.seen.append((float(clock), float(power)))
        self._log.close()

    def share(self, first: float, last: float) -> tuple[float | None, float | None]:
        """Means of what was seen between two shares of the time."""
        some = self.seen[int(first * len(self.seen)) : max(1, int(last * len(self.seen)))]
        if not some:
            return None, None
        clocks, powers = zip(*some, strict=True)
        return statistics.mean(clocks), statistics.mean(powers)


def build(name: str, args: argparse.Namespace) -> TorchEngine:
    """The engine, with its steps captured."""
    weights, _, cache = name.partition("+kv_")
    setting = Setting(
        engine="torch",
        model=args.model,
        format=weights,
        kv=cache or "none",
        batch=args.batch,
        positions=args.prompt + args.tokens + 1,
        device=args.device,
        dtype=args.dtype,
        graphs=(args.batch,),
    )
    engine = TorchEngineFactory(max_num_seqs=args.batch, host_interval=INTERVAL)(setting.spec(QuantScheme.preset(name)))
    engine.update_weights(random_weights(engine.decoder.model, setting.scheme), policy_version=0)
    generate(engine, args, args.prompt + args.tokens - 2 * INTERVAL, 2 * INTERVAL)
    return engine


def generate(engine: TorchEngine, args: argparse.Namespace, longest: int, tokens: int) -> float:
    """Seconds of a call; one prompt has ``longest`` tokens."""
    vocabulary = SHAPES[args.model].vocabulary
    lengths = [longest] + [args.prompt] * (args.batch - 1)
    prompts = [Prompt(i, tuple(torch.randint(3, vocabulary, (n,)).tolist())) for i, n in enumerate(lengths)]
    synchronize(engine)
    started = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), seed=0)
    synchronize(engine)
    return time.perf_counter() - started


def synchronize(engine: TorchEngine) -> None:
    """Wait for the engine's device."""
    if engine.spec.device.type == "cuda":
        torch.cuda.synchronize(engine.spec.device)


@torch.no_grad()
def rested(engine: TorchEngine, args: argparse.Namespace, context: int) -> float:
    """Milliseconds of a step at ``context`` tokens in a short run after a pause."""
    stepper, times = engine._stepper, []
    stepper.reserve(args.batch, args.prompt + args.tokens, SamplingParams())
    stepper.tokens.random_(SHAPES[args.model].vocabulary)
    stepper.uniforms.uniform_()
    time.sleep(args.pause)
    for _ in range(3):
        stepper.positions.fill_(context)
        stepper.start(args.batch, context + 1)
        synchronize(engine)
        started = time.perf_counter()
        stepper.run(INTERVAL)
        synchronize(engine)
        times.append((time.perf_counter() - started) / INTERVAL * 1e3)
    return min(times)


def measure(name: str, table: Table, args: argparse.Namespace) -> None:
    """Print the lines of a format."""
    engine = build(name, args)
    cuda = engine.spec.device.type == "cuda"
    middle = args.prompt + args.tokens // 2 - INTERVAL // 2
    short = rested(engine, args, middle)
    first = generate(engine, args, args.prompt, 1)
    steps, clock = Steps(cuda), Clock(cuda)
    with steps.recorded(), clock:
        whole = generate(engine, args, args.prompt, args.tokens)
    parts, runs = args.parts, len(steps.marks)
    for part in range(parts):
        some = slice(runs * part // parts, max(runs * part // parts + 1, runs * (part + 1) // parts))
        step, gap = steps.share(some)
        context = args.prompt + INTERVAL * (some.start + some.stop) // 2
        begin = first / whole
        seen = clock.share(begin + (1 - begin) * part / parts, begin + (1 - begin) * (part + 1) / parts)
        table.row(name, f"rollout, {part + 1} of {parts}", args.batch, context, step, gap, *seen)
    table.row(name, "rollout, all", args.batch, middle, *steps.share(slice(None)), *clock.share(first / whole, 1))
    table.row(name, "after a pause", args.batch, middle, short, None, None, None)
    span = steps.between(steps.marks[0][0], steps.marks[-1][1]) / 1e3
    print(f"\nwhole call {whole:.3f} s; one token {first:.3f}; decoding {span:.3f}; rest {whole - first - span:.3f}\n")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=list(SHAPES))
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=["none", "fp8_per_channel+kv_fp8_static"])
    parser.add_argument("--batch", type=positive, default=256)
    parser.add_argument("--prompt", type=positive, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=positive, default=512, help="new tokens of a sample")
    parser.add_argument("--parts", type=positive, default=4, help="lines of a rollout")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds before the short run")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.tokens < 4 * INTERVAL:
        parser.error(f"--tokens must be at least {4 * INTERVAL}")
    device = measured_device(args.device)
    print(f"Qwen3 {args.model}, {args.dtype}, {card(device)}\n")
    table = Table("format", "steps", "batch", "context", "ms a step", "gap, ms", "MHz", "W")
    for name in args.formats:
        measure(name, table, args)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
