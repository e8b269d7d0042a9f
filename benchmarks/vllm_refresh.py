"""A refresh of a vLLM in the learner's process: vLLM's reload against direct copies, from weights on the same card.

    python benchmarks/vllm_refresh.py --vllm-path /path/to/site                  # Qwen3-8B's shape, several formats
    OMP_NUM_THREADS=1 python benchmarks/vllm_refresh.py --model tiny --layers 2 --device cpu --formats fp8_per_channel

Two sets of random weights lie on the card and take turns, so that every refresh changes everything. ``reload`` and
``direct`` are whole refreshes by `VLLMEngine.update_weights`: checks, NaN, digests, log-probs of the probe, cached
prefixes; wall times, median and range. ``equal``: all have the digests of the first two, which were reloads. The floor
reads what is sent once and writes it once, at the bandwidth of a large copy. ``learn`` is the refresh in which direct
copies are proven. Parts of a direct refresh alone, each with the device idle before and after: ``copies``, ``digests``
of all tensors, ``probe``.

One process measures a format; one that fails or takes longer than ``--limit`` seconds costs its rows. On a CPU vLLM's
oneDNN is switched off: it keeps weights to itself, which no copy reaches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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

    from lqrl.engines.vllm import VLLMEngine

WAYS = ("reload", "direct")
FORMATS = ("fp8_per_channel", "int8_w8a8", "none", "fp8_per_block", "fp8_per_channel+kv_fp8_static", "fp8_per_tensor")
POSITIONS = 512
CACHE_BYTES = 2**29
MEMORY = 0.5  # vLLM's share of the card; what is sent has the rest


# ---------------------------------------------------------------- in a child


def measure_case(case: Row) -> None:
    """Build an engine and send a row for each way."""
    import torch

    if case["device"] == "cpu":
        ops: Any = __import__("vllm._custom_ops", fromlist=["_supports_onednn"])
        ops._supports_onednn = False
    else:
        import vllm  # noqa: F401
    wait_for_turn()
    from side_by_side import bandwidth

    device = torch.device(case["device"])
    shared: Row = {"bandwidth": bandwidth(device), **place(device)}
    started = time.perf_counter()
    engine = build(case, device)
    shared["start_s"] = time.perf_counter() - started
    try:
        measure(engine, case["repeats"], shared)
    finally:
        engine.close()


def build(case: Row, device: torch.device) -> VLLMEngine:
    """An engine without weights."""
    import torch

    from lqrl.engines.base import EngineSpec
    from lqrl.engines.vllm import VLLMEngineFactory
    from lqrl.quant import QuantScheme

    shape = SHAPES[case["model"]]
    shape = replace(shape, layers=case["layers"] or shape.layers)
    eager = {"enforce_eager": True} if case["eager"] else {"compilation_config": {"cudagraph_capture_sizes": [1, 8]}}
    cuda = {"gpu_memory_utilization": MEMORY, "engine_args": eager} if device.type == "cuda" else {}
    factory = VLLMEngineFactory(max_num_seqs=8, kv_cache_bytes=CACHE_BYTES, count_changes=case["count_changes"], **cuda)
    scheme, dtype = QuantScheme.preset(case["format"]), getattr(torch, case["dtype"])
    return factory(EngineSpec(shape.config(POSITIONS), scheme, dtype, device, POSITIONS, ()))


def measure(engine: VLLMEngine, repeats: int, shared: Row) -> None:
    """Rows of both ways."""
    from lqrl.engines.vllm.trial import TrialWeights
    from lqrl.quant.stream import StableTensors

    sets = [dict(TrialWeights(engine.served.tensors, engine.spec.device, seed)) for seed in (11, 12)]
    sent = sum(t.nbytes for t in sets[0].values())
    shared |= {"sent_bytes": sent, "tensors": len(sets[0]), "floor_ms": 2 * sent / shared["bandwidth"] * 1e3}
    versions = iter(range(10**6))

    def refresh(number: int) -> str:
        return engine.update_weights(StableTensors(sets[number].items()), policy_version=next(versions)).digest

    first = refresh(0)
    started = time.perf_counter()
    second = refresh(1)
    learn_s, direct = time.perf_counter() - started, engine._direct
    assert direct is not None
    for way in WAYS:
        if way == "direct" and direct.copies is None:
            send(shared | {"learn_s": learn_s, "error": f"declined: {direct.refusal}"})
            continue
        engine._direct = direct if way == "direct" else None
        try:
            row = times(engine, refresh, repeats, [first, second])
            if way == "direct":
                row |= {"learn_s": learn_s} | parts(engine, sets, repeats)
            send(shared | row)
        except Exception as error:
            send(shared | failure(error))


def times(engine: VLLMEngine, refresh: Callable[[int], str], repeats: int, digests: Sequence[str]) -> Row:
    """Milliseconds of whole refreshes that take turns; the first two are not counted."""
    from side_by_side import Timer

    timer, taken, equal = Timer(engine.spec.device, 1), [], True
    for turn in range(repeats + 2):
        timer.synchronize()
        started = time.perf_counter()
        digest = refresh(turn % 2)
        timer.synchronize()
        if turn >= 2:
            taken.append((time.perf_counter() - started) * 1e3)
        equal &= digest == digests[turn % 2]
    return {"median_ms": statistics.median(taken), "least_ms": min(taken), "most_ms": max(taken), "equal": equal}


def parts(engine: VLLMEngine, sets: Sequence[dict[str, torch.Tensor]], repeats: int) -> Row:
    """Milliseconds of what a direct refresh does, alone."""
    from side_by_side import Timer

    from lqrl.engines.vllm import reload

    assert engine._direct is not None
    copies, timer, turns = engine._direct.copies, Timer(engine.spec.device, repeats), iter(range(10**6))
    assert copies is not None
    return {
        "copies_ms": timer.wall(lambda: copies.write(engine.served.checkpoint_stream(sets[next(turns) % 2]))),
        "digests_ms": timer.wall(lambda: engine._llm.collective_rpc(reload.held_digests)),
        "probe_ms": timer.wall(engine._say),
        "places": sum(len(targets) for targets in copies.targets.values()),
    }


# ---------------------------------------------------------------- in the parent


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """One for each format."""
    environment = vllm_environment(args.vllm_path)
    given = ("model", "layers", "device", "dtype", "repeats", "eager", "count_changes")
    shared = {name: getattr(args, name) for name in given}
    key = {"model": args.model, "layers": args.layers or SHAPES[args.model].layers, "dtype": args.dtype}
    key |= {"eager": args.eager, "count_changes": args.count_changes}
    jobs = []
    for name in args.formats:
        rows = [key | {"format": name, "way": way} for way in WAYS]
        jobs.append(Job(__file__, shared | {"format": name}, rows, args.vllm_python, environment))
    return jobs


def show(table: Table, row: Row, reloads: dict[str, float]) -> None:
    """Print a row, or what went wrong with it; a direct one with its ratio to the reload."""
    ms = row.get("median_ms")
    if ms is not None and row["way"] == "reload":
        reloads[row["format"]] = ms
    faster = reloads[row["format"]] / ms if ms is not None and row["format"] in reloads else None
    spread = f"{row['least_ms']:.1f} to {row['most_ms']:.1f}" if ms is not None else None
    sent = row["sent_bytes"] / 1e9 if "sent_bytes" in row else None
    names = ("copies_ms", "digests_ms", "probe_ms", "learn_s", "error")
    equal = {True: "yes", False: "NO", None: None}[row.get("equal")]
    table.row(
        row["format"], row["way"], ms, spread, faster, sent, row.get("floor_ms"), equal, *map(row.get, names)
    )  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=list(SHAPES))
    parser.add_argument("--layers", type=at_least(0), default=0, help="of the model; 0 is all of the shape's")
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=list(FORMATS), help="presets")
    parser.add_argument("--repeats", type=positive, default=7, help="measured refreshes of each way")
    parser.add_argument("--count-changes", action="store_true", help="count what a refresh changes, as by default")
    parser.add_argument("--eager", action="store_true", help="without vLLM's compiler and captured graphs")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16")
    add_vllm_options(parser)
    add_job_options(parser, "one format", limit=150)
    return parser.parse_args(argv)


def main() -> None:
    """Print the table."""
    args = parse()
    if args.case:
        measure_case(args.case)
        return
    measured_device(args.device)
    require_vllm(args)
    record, reloads = Record(args.rows, "vllm_refresh"), {}
    layers = args.layers or SHAPES[args.model].layers
    print(f"Qwen3 {args.model}, {layers} layers, {args.dtype}, {args.device}; ms, GB and s\n")
    columns = ("format", "way", "median", "range", "x reload", "GB sent", "floor", "equal")
    table = Table(*columns, "copies", "digests", "probe", "learn, s", "note")
    for row in run_jobs(make_jobs(args), limit=args.limit, budget=args.budget, ahead=args.device != "cpu"):
        record.add(row)
        show(table, row, reloads)
    record.end()


if __name__ == "__main__":
    main()
