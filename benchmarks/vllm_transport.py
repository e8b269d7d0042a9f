"""A refresh of a vLLM server on the learner's machine: weights through files against memory of the learner's GPU.

    python benchmarks/vllm_transport.py --vllm-path /path/to/site                # Qwen3-8B's shape, one card for both
    OMP_NUM_THREADS=1 python benchmarks/vllm_transport.py --model tiny --device cpu --dtype float32 --formats int8_w8a8

Two sets of random weights lie on the learner's card and take turns, so that every refresh changes everything. Times are
those of `VLLMServerEngine.update_weights`: checks, vLLM's reload, digests and probe included; median and range. ``layer
by layer`` is with ``stream_refresh``. ``equal``: all ways give the digests of the first one. Files go to
``--directory``; without it to /dev/shm where there is room for a whole set, else to the directory for temporary files.

One process measures a format, with one server for all ways; one that fails or takes longer than ``--limit`` seconds
costs the rows that it has not sent. On a CPU there are files alone.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from children import Job, Row, add_job_options, failure, run_jobs, send, wait_for_turn
from options import at_least, dtype_name, positive, scheme_name
from rollout import place
from rows import Record, Table
from shapes import SHAPES
from side_by_side import measured_device
from vllm_children import add_vllm_options, require_vllm, vllm_environment

if TYPE_CHECKING:
    import torch

    from lqrl.engines.base import EngineSpec
    from lqrl.engines.vllm import VLLMServerEngine

WAYS: dict[str, dict[str, Any]] = {
    "cuda_ipc": {"transport": "cuda_ipc"},
    "files": {"transport": "files"},
    "cuda_ipc, layer by layer": {"transport": "cuda_ipc", "stream_refresh": True},
    "files, layer by layer": {"transport": "files", "stream_refresh": True},
}
FORMATS = ("fp8_per_channel", "none")
POSITIONS = 512
CACHE_BYTES = 2**29
SHARED = Path("/dev/shm")


# ---------------------------------------------------------------- in a child


def measure_case(case: Row) -> None:
    """Start a server and send a row for each way."""
    from lqrl.engines.vllm.trial import TrialWeights

    wait_for_turn()
    spec = spec_of(case)
    started = time.perf_counter()
    with served(case, spec) as first:
        shared: Row = {"start_s": time.perf_counter() - started, **place(spec.device)}
        sets = [dict(TrialWeights(first.served.tensors, spec.device, seed)) for seed in (11, 12)]
        size = sum(tensor.nbytes for tensor in sets[0].values())
        directory = case["directory"] or room_for(size)
        shared |= {"sent_bytes": size, "tensors": len(sets[0]), "directory": directory}
        digests: list[str] = []
        for options in WAYS.values():
            try:
                row = times(first.serving, spec, options, directory, sets, case["repeats"], case["limit"] / 3, digests)
            except Exception as error:  # the other ways are still worth a row
                row = failure(error)
            send(shared | row)


def spec_of(case: Row) -> EngineSpec:
    """What is served."""
    import torch

    from lqrl.engines.base import EngineSpec
    from lqrl.quant import QuantScheme

    shape = SHAPES[case["model"]]
    shape = replace(shape, layers=case["layers"] or shape.layers)
    device, dtype = torch.device(case["device"]), getattr(torch, case["dtype"])
    return EngineSpec(shape.config(POSITIONS), QuantScheme.preset(case["format"]), dtype, device, POSITIONS, ())


@contextmanager
def served(case: Row, spec: EngineSpec) -> Iterator[VLLMServerEngine]:
    """An engine whose server runs until the end of the block."""
    from lqrl.engines.vllm import VLLMServerEngineFactory

    memory = {"gpu_memory_utilization": case["memory"]} if spec.device.type == "cuda" else {}
    engine = VLLMServerEngineFactory(
        max_num_seqs=8, kv_cache_bytes=CACHE_BYTES, engine_args={"enforce_eager": True}, count_changes=False,
        cards=[case["card"]] if case["card"] else [], start_timeout_s=case["limit"], **memory,
    )(spec)  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


def room_for(size: int) -> str:
    """Where a set of ``size`` bytes is put."""
    fits = SHARED.is_dir() and shutil.disk_usage(SHARED).free > 1.2 * size
    return str(SHARED) if fits else tempfile.gettempdir()


def times(
    urls: Sequence[str], spec: EngineSpec, options: dict[str, Any], directory: str,
    sets: Sequence[dict[str, torch.Tensor]], repeats: int, patience_s: float, digests: list[str],
) -> Row:  # fmt: skip
    """Milliseconds of refreshes that take turns between two sets; the first of each is not counted.

    Args:
        urls: of the server.
        spec: what it serves.
        options: of the way.
        directory: for files.
        sets: weights.
        repeats: measured refreshes.
        patience_s: until one has failed.
        digests: of the two sets; filled by the first way.
    """
    from lqrl.engines.vllm import VLLMServerEngineFactory
    from lqrl.quant.stream import StableTensors

    options = {"transfer_directory": directory, "count_changes": False, "timeout_s": patience_s, **options}
    engine = VLLMServerEngineFactory(urls=list(urls), **options)(spec)
    taken, found = [], []
    for turn in range(repeats + 2):
        started = time.perf_counter()
        report = engine.update_weights(StableTensors(sets[turn % 2].items()), policy_version=turn)
        taken.append((time.perf_counter() - started) * 1e3)
        found.append(report.digest)
    digests[:] = digests or found[:2]
    equal = all(digest == digests[turn % 2] for turn, digest in enumerate(found)) and digests[0] != digests[1]
    taken = taken[2:]
    return {"median_ms": statistics.median(taken), "least_ms": min(taken), "most_ms": max(taken), "equal": equal}


# ---------------------------------------------------------------- in the parent


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """One for each format."""
    environment = vllm_environment(args.vllm_path)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # of engines in the child
    given = ("model", "layers", "device", "dtype", "repeats", "directory", "memory", "card", "limit")
    shared = {name: getattr(args, name) for name in given}
    key = {"model": args.model, "layers": args.layers or SHAPES[args.model].layers, "dtype": args.dtype}
    key |= {"card_of_server": args.card}
    return [
        Job(__file__, shared | {"format": name}, [key | {"format": name, "way": way} for way in WAYS],
            args.vllm_python, environment)
        for name in args.formats
    ]  # fmt: skip


def show(table: Table, row: Row, medians: dict[tuple[str, str], float]) -> None:
    """Print a row, or what went wrong with it; one of files with its ratio to the other transport."""
    ms, sent = row.get("median_ms"), row["sent_bytes"] / 1e9 if "sent_bytes" in row else None
    slower = spread = rate = None
    if ms is not None and sent is not None:
        medians[row["format"], row["way"]] = ms
        other = medians.get((row["format"], row["way"].replace("files", "cuda_ipc")))
        slower = ms / other if other is not None else None
        spread, rate = f"{row['least_ms']:.0f} to {row['most_ms']:.0f}", sent / ms * 1e3
    equal = {True: "yes", False: "NO", None: None}[row.get("equal")]
    table.row(
        row["format"], row["way"], ms, spread, slower, sent, rate, equal, row.get("error") or row.get("directory")
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=list(SHAPES))
    parser.add_argument("--layers", type=at_least(0), default=0, help="of the model; 0 is all of the shape's")
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=list(FORMATS), help="presets")
    parser.add_argument("--repeats", type=positive, default=3, help="measured refreshes of each way")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16")
    parser.add_argument("--directory", help="where files are put")
    parser.add_argument("--memory", type=float, default=0.4, help="the server's share of the card")
    parser.add_argument("--card", help="CUDA_VISIBLE_DEVICES of the server; the learner's card by default")
    add_vllm_options(parser)
    add_job_options(parser, "one format", limit=270)
    return parser.parse_args(argv)


def main() -> None:
    """Print the table."""
    args = parse()
    if args.case:
        measure_case(args.case)
        return
    measured_device(args.device)
    require_vllm(args)
    record, medians = Record(args.rows, "vllm_transport"), dict[tuple[str, str], float]()
    layers = args.layers or SHAPES[args.model].layers
    print(f"Qwen3 {args.model}, {layers} layers, {args.dtype}, {args.device}; ms and GB\n")
    table = Table(
        "format", "way", "median", "range", "x cuda_ipc", "GB sent", "GB/s", "equal", "files in, or what failed"
    )
    for row in run_jobs(make_jobs(args), limit=args.limit, budget=args.budget, ahead=False):
        record.add(row)
        show(table, row, medians)
    record.end()


if __name__ == "__main__":
    main()
