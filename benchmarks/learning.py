"""Does it matter? One task, trained with each format and each way to live with its mismatch.

Every run is ``lqrl fit --config FILE`` with a few options changed, in a process of its own; runs go side by side, one
thread each. Ways of a format that quantizes:

* ``naive``: quantized rollouts, a plain learner, no correction;
* ``tis``: with token-level truncated importance sampling; ``acr``: and the Adaptive Clipping Range; ``uaq``: and UAQ;
* ``aligned``: the aligned learner, TIS and ACR; ``tbpo``: the aligned learner and TBPO;
* ``exact``: the aligned learner in exact mode, where there is no mismatch to correct.

Ways of the format ``none``, to compare with: ``fp32``, ``bf16`` (the compute dtype), and ``exact``.

    python benchmarks/learning.py --formats none int8_w8a8 int4_w4a4 --seeds 1 2 3 --jobs 2
    python benchmarks/learning.py --epochs 3 --jobs 13 --rows rows.jsonl
    python benchmarks/learning.py --config configs/recipes/smollm2_arithmetic_int8.yaml --iterations 10 --epochs 3 \\
        --device cuda --set model.init_args.dtype=bfloat16 --formats none int8_w8a8 --ways bf16 acr exact

With ``--rows`` each finished run is appended to the file at once, and runs that the file holds are not repeated: the
same command goes on where it was interrupted, and prints the table of a complete file without training.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from options import positive, scheme_name

from lqrl.quant import QuantScheme

FORMATS = ("none", "int8_w8a8", "fp8_per_channel", "int4_w4a16_g32", "int4_w4a4", "int3_w3a16_g32")
MODEL = "--model.init_args."
PLAIN = [f"{MODEL}aligned", "false"]
NO_CORRECTION = [f"{MODEL}correction", "lqrl.algorithms.NoCorrection"]
QUANTIZED: dict[str, list[str]] = {
    "naive": [*PLAIN, *NO_CORRECTION],
    "tis": [*PLAIN, f"{MODEL}correction.init_args.acr", "false"],
    "acr": PLAIN,
    "uaq": [*PLAIN, f"{MODEL}transforms", "[{class_path: lqrl.quant.UpdateAwareScaling}]"],
    "aligned": [],
    "tbpo": [*NO_CORRECTION, f"{MODEL}loss", "lqrl.algorithms.TBPOLoss"],
}
FULL: dict[str, list[str]] = {"fp32": [], "bf16": [f"{MODEL}dtype", "bfloat16"]}
WAYS = {**FULL, **QUANTIZED, "exact": [f"{MODEL}exact", "true"]}
KEPT = [  # of the callbacks: checkpoints of many runs would fill the disk
    "--trainer.callbacks",
    str([{"class_path": f"lqrl.callbacks.{name}"} for name in ("EngineRefresh", "SamplerFeedback", "MismatchGuard")]),
]
LAST = 20  # iterations that a number of the end is the mean of
COLUMNS = ["rollouts", "way", "pass@1", "seeds", "pass@8", "k3", "ESS", "log-ratio max", "clip", "collapsed", "s"]
QUICKSTART = "configs/quickstart.yaml"
USUAL = {"config": QUICKSTART, "device": "cpu", "set": {}}  # not written into rows
Case = tuple[str, str, int]


def ways_of(format_: str, asked: Sequence[str]) -> list[str]:
    """The ways that make sense for a format."""
    return [way for way in asked if way not in (FULL if QuantScheme.preset(format_).quantizes else QUANTIZED)]


def run(format_: str, way: str, seed: int, args: argparse.Namespace, root: Path) -> dict:
    """One training run; its row of the table, or why there is none."""
    folder = root / f"{format_}-{way}-{seed}"
    schedule = [f"{MODEL}lr_scheduler.init_args.total_iters", str(args.iterations * args.epochs)]
    command = [
        sys.executable, "-m", "lqrl", "fit", "--config", args.config, "--seed_everything", str(seed),
        "--trainer.max_epochs", str(args.epochs), "--trainer.logger.init_args.save_dir", str(folder),
        "--trainer.accelerator", args.device, f"{MODEL}scheme", format_,
        f"{MODEL}num_minibatches", str(args.minibatches), *(schedule if args.config == QUICKSTART else ()),
        "--data.init_args.iterations_per_epoch", str(args.iterations), *KEPT,
        *itertools.chain.from_iterable((f"--{key}", value) for key, value in args.set), *WAYS[way],
    ]  # fmt: skip
    started = time.perf_counter()
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    env = {**os.environ, "OMP_NUM_THREADS": "1", **hidden}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    row = {"format": format_, "way": way, "seed": seed, **settings(args), "seconds": time.perf_counter() - started}
    if done.returncode:
        return {**row, "error": f"exit {done.returncode}: {error_of(done.stderr)}"}
    with next(folder.glob("*/version_0/metrics.csv")).open() as file:
        lines = list(csv.DictReader(file))
    validations = sum(bool(line.get("val/pass@1")) for line in lines)
    if validations != args.epochs + 1:  # a signal ends a run in good order
        return {**row, "error": f"stopped after {validations - 1} of {args.epochs} epochs"}
    if not any(line.get("mismatch/k3") for line in lines):
        return {**row, "error": "no iteration had anything to learn from"}
    return {**row, **numbers(lines)}


def settings(args: argparse.Namespace) -> dict:
    """What a row must share with the runs of this call to be one of them."""
    given = {"config": args.config, "device": args.device, "set": dict(args.set)}
    counts = {"epochs": args.epochs, "minibatches": args.minibatches, "iterations": args.iterations}
    return counts | {key: value for key, value in given.items() if value != USUAL[key]}


def error_of(stderr: str) -> str:
    """The line that says what went wrong; behind it there may be advice in brackets."""
    lines = [line for line in stderr.strip().splitlines() if line.strip() and not line.startswith("(")]
    return lines[-1][:300] if lines else "no output"


def numbers(lines: Sequence[dict[str, str]]) -> dict:
    """What is kept of a run's logged lines: scores of each validation, the rest over iterations.

    ``k3``, ``ess`` and ``log_ratio_max`` (the largest of all iterations) speak of learner and engine before the step;
    ``clip`` is the share of trained tokens that the loss cuts: clipped, or in a sequence that TBPO drops.
    """

    def values(name: str) -> list[float]:
        return [float(line[name]) for line in lines if line.get(name)]

    def last(name: str) -> float:
        return statistics.mean(values(name)[-LAST:] or [0.0])

    cuts = ("policy/clip_low_fraction", "policy/clip_high_fraction", "tbpo/dropped_fraction")
    return {
        "pass_at_1": values("val/pass@1"),
        "pass_at_8": values("val/pass@8"),
        "k3": last("mismatch/k3"),
        "k3_max": max(values("mismatch/k3")),
        "ess": last("mismatch/ess"),
        "log_ratio_max": max(values("mismatch/log_ratio_max")),
        "clip": sum(last(name) for name in cuts),
        "truncated": last("correction/truncated_high_fraction"),
    }


def collapsed(row: dict) -> bool:
    """Whether the policy ended with less than half of the pass@1 that it once had."""
    return row["pass_at_1"][-1] < max(row["pass_at_1"]) / 2


def read(path: Path | None, args: argparse.Namespace) -> dict[Case, dict]:
    """Runs of an earlier call under the same settings; those that failed are not among them.

    A row without settings is of a file from before they were written down: it is taken for one of this call's if it has
    as many validations.
    """
    if path is None or not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            print(f"{path}:{number} is no row (cut off?) and is left out", file=sys.stderr)
            continue
        if "error" in row:
            continue
        unwritten = {"epochs": len(row["pass_at_1"]) - 1, "minibatches": args.minibatches, "iterations": 50}
        mine = USUAL | settings(args)
        if {key: value for key, value in (USUAL | unwritten | row).items() if key in mine} == mine:
            found[row["format"], row["way"], row["seed"]] = row
    return found


def append(path: Path | None, row: dict) -> None:
    """One more line, on disk before the next run ends; a line that was cut off is left behind."""
    if path is None:
        return
    cut = path.exists() and path.read_text()[-1:] not in ("", "\n")
    with path.open("a") as file:
        file.write("\n" * cut + json.dumps(row) + "\n")


def train(cases: Sequence[Case], args: argparse.Namespace, rows: dict[Case, dict]) -> None:
    """Run ``cases`` side by side into ``rows``; each is kept as soon as it ends."""
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(run, *case, args, Path(root)): case for case in cases}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                rows[futures[future]] = row = future.result()
                append(args.rows, row)
                name = " ".join(map(str, futures[future]))
                print(f"{done}/{len(cases)} {name} {row.get('error', '')}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def summary(rows: Sequence[dict]) -> list[str]:
    """The columns of one format and way; a column that an older file does not know is left empty."""
    good = [row for row in rows if "error" not in row]
    if not good:
        return [rows[0]["error"]]

    def over(reduce: Callable[[list[float]], float], key: str, form: str) -> str:
        known = [row[key] for row in good if key in row]
        return format(reduce(known), form) if known else ""

    finals = sorted(row["pass_at_1"][-1] for row in good)
    failed = f", {len(rows) - len(good)} failed" if len(good) < len(rows) else ""
    return [
        f"{statistics.mean(finals):.3f}",
        " ".join(f"{value:.3f}" for value in finals) + failed,
        f"{statistics.mean(row['pass_at_8'][-1] for row in good):.3f}",
        over(statistics.mean, "k3", ".1e"),
        over(statistics.mean, "ess", ".3f"),
        over(max, "log_ratio_max", ".1e"),
        over(statistics.mean, "clip", ".4f"),
        f"{sum(map(collapsed, good))} of {len(good)}",
        over(statistics.mean, "seconds", ".0f"),
    ]


def pair(text: str) -> tuple[str, str]:
    """``KEY=VALUE`` as both."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=list(FORMATS), help="presets of QuantScheme")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=positive, default=6)
    parser.add_argument("--iterations", type=positive, default=50, help="of an epoch")
    parser.add_argument("--minibatches", type=positive, default=2, help="optimizer steps an iteration")
    parser.add_argument("--config", default=QUICKSTART, help="of the task")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="jobs on cuda share one card")
    parser.add_argument(
        "--set", nargs="*", default=[], type=pair, metavar="KEY=VALUE", help="more options of every run"
    )
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--rows", type=Path, help="one JSON object a run; runs that are there are not repeated")
    args = parser.parse_args()
    cases = [(f, w, s) for s in args.seeds for f in args.formats for w in ways_of(f, args.ways)]
    rows = read(args.rows, args)
    train([case for case in cases if case not in rows], args, rows)
    print(f"{args.iterations * args.epochs} iterations, {args.minibatches} optimizer steps each, seeds {args.seeds}")
    for columns in (COLUMNS, ["---"] * len(COLUMNS)):
        print(f"| {' | '.join(columns)} |")
    for format_ in args.formats:
        for way in ways_of(format_, args.ways):
            columns = [format_, way, *summary([rows[format_, way, seed] for seed in args.seeds])]
            print(f"| {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
