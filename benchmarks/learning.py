"""Does it matter? The quickstart task, trained with each format and each way to live with its mismatch.

Every run is ``lqrl fit --config configs/quickstart.yaml`` with a few options changed, in a process of its own; runs go
side by side, one thread each. Ways:

* ``naive``: quantized rollouts, a plain learner, no correction;
* ``tis``: with token-level truncated importance sampling; ``acr``: and the Adaptive Clipping Range; ``uaq``: and UAQ;
* ``aligned``: the aligned learner, TIS and ACR; ``tbpo``: the aligned learner and TBPO.

    python benchmarks/learning.py --formats int8_w8a8 int4_w4a4 --seeds 1 2 3 --jobs 2
    python benchmarks/learning.py --epochs 3 --jobs 16 --minibatches 2
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FORMATS = ("int8_w8a8", "fp8_per_channel", "int4_w4a16_g32", "int4_w4a4", "int3_w3a16_g32")
MODEL = "--model.init_args."
PLAIN = [f"{MODEL}aligned", "false"]
WAYS: dict[str, list[str]] = {
    "naive": [*PLAIN, f"{MODEL}correction", "lqrl.algorithms.NoCorrection"],
    "tis": [*PLAIN, f"{MODEL}correction.init_args.acr", "false"],
    "acr": PLAIN,
    "uaq": [*PLAIN, f"{MODEL}transforms", "[{class_path: lqrl.quant.UpdateAwareScaling}]"],
    "aligned": [],
    "tbpo": [f"{MODEL}correction", "lqrl.algorithms.NoCorrection", f"{MODEL}loss", "lqrl.algorithms.TBPOLoss"],
}


def run(format_: str, way: str, seed: int, args: argparse.Namespace, root: Path) -> dict:
    """One training run; its row of the table, or why there is none."""
    folder = root / f"{format_}-{way}-{seed}"
    command = [
        sys.executable, "-m", "lqrl", "fit", "--config", "configs/quickstart.yaml", "--seed_everything", str(seed),
        "--trainer.max_epochs", str(args.epochs), "--trainer.logger.init_args.save_dir", str(folder),
        f"{MODEL}scheme", format_, f"{MODEL}num_minibatches", str(args.minibatches),
        f"{MODEL}lr_scheduler.init_args.total_iters", str(50 * args.epochs), *WAYS[way],
    ]  # fmt: skip
    started = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    row = {"format": format_, "way": way, "seed": seed, "seconds": time.perf_counter() - started}
    if done.returncode:
        return {**row, "error": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else "no output"}
    with next(folder.glob("quickstart/version_0/metrics.csv")).open() as file:
        lines = list(csv.DictReader(file))

    def values(name: str) -> list[float]:
        return [float(line[name]) for line in lines if line.get(name)]

    return {
        **row,
        "pass_at_1": values("val/pass@1"),
        "pass_at_8": values("val/pass@8"),
        "k3": statistics.mean(values("mismatch/k3")[-20:]),
        "k3_max": max(values("mismatch/k3")),
        "ess": statistics.mean(values("mismatch/ess")[-20:]),
    }


def summary(rows: list[dict]) -> str:
    """Final pass@1 of each seed, its mean, pass@8 and the mismatch of one format and way."""
    good = [row for row in rows if "error" not in row]
    if not good:
        return rows[0]["error"]
    finals = sorted(row["pass_at_1"][-1] for row in good)
    means = [statistics.mean(row[key] for row in good) for key in ("k3", "ess")]
    last8 = statistics.mean(row["pass_at_8"][-1] for row in good)
    failed = f", {len(rows) - len(good)} failed: {rows[-1].get('error', '')}" if len(good) < len(rows) else ""
    seeds = " ".join(f"{value:.3f}" for value in finals)
    return f"{statistics.mean(finals):.3f} ({seeds})  {last8:.3f}  {means[0]:.1e} {means[1]:.3f}{failed}"


def main() -> None:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=6, help="of 50 iterations each")
    parser.add_argument("--minibatches", type=int, default=2, help="optimizer steps an iteration")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rows", type=Path, help="also write one JSON object a run to this file")
    args = parser.parse_args()
    cases = [(f, w, s) for s in args.seeds for f in args.formats for w in args.ways]
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run, *case, args, Path(root)) for case in cases]
        rows = []
        for future in futures:
            rows.append(future.result())
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            print(f"{len(rows)}/{len(cases)}", end="\r", file=sys.stderr, flush=True)
    print(f"{50 * args.epochs} iterations, {args.minibatches} optimizer steps each, seeds {args.seeds}")
    print(f"{'format':18} {'way':8} pass@1 (seeds)  pass@8  k3 ESS")
    for format_ in args.formats:
        for way in args.ways:
            chosen = [row for row in rows if (row["format"], row["way"]) == (format_, way)]
            print(f"{format_:18} {way:8} {summary(chosen)}")


if __name__ == "__main__":
    main()
