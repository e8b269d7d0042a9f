"""Forward and backward of the learner on a Qwen3 shape with random weights, beside plain transformers with padding.

64k tokens in sequences of mixed length (`mixed_lengths`) go through `accumulate_gradients`, as an optimizer step does:
packed into micro-batches of at most ``--token-budget`` real tokens, codes quantized anew, log-probs without a tensor
of all logits. Against them transformers: rows in the order they come, as many in a micro-batch as would fit if all were
as long as the longest, padded to the longest among them, sdpa attention, the logits of all tokens in fp32, and
`torch.nn.functional.cross_entropy`. tokens/s counts real tokens. Then the log-prob part alone, forward and backward
from given hidden states, against full logits: its memory is the peak less its operands and their gradients.

    python benchmarks/learner.py
    python benchmarks/learner.py --models 4B --learners transformers none fp8_per_channel --rows results.jsonl
    python benchmarks/learner.py --models 0.6B --learners none int8_w8a8 --token-budget 32768 --compile --limit 300
    OMP_NUM_THREADS=1 python benchmarks/learner.py --models tiny --device cpu --total 512 --longest 64 --repeats 1

``--compile`` measures every learner of this library a second time, with the layers of transformers under
``torch.compile`` (dynamic shapes) in place of the fused kernels; attention and aligned products stay as they are.

Each learner runs in a process of its own; one that fails or takes longer than ``--limit`` seconds costs one row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from children import Job, Row, add_job_options, failure, run_jobs, send, versions, wait_for_turn
from kernel_times import kernel_lines
from options import at_least, dtype_name, positive, scheme_name_or
from rows import Record, Table
from shapes import SHAPES
from side_by_side import measured_device

if TYPE_CHECKING:
    from torch import Tensor

    from lqrl.types import TrainBatch

PEER = "transformers"
HEADS = ("full logits", "chunked log-probs")
BUDGETS = {"tiny": 128, "0.6B": 8192, "4B": 4096, "8B": 4096, "32B": 2048}  # most tokens of a micro-batch


def mixed_lengths(total: int, longest: int, seed: int = 0) -> list[tuple[int, int]]:
    """Prompt and completion lengths that add up to ``total``, or to one less; the last sequence is cut.

    Prompts are evenly spread up to an eighth of ``longest``. Completions are log-normal around a fifth of it: many
    short ones, a long tail, a few percent at the limit.
    """
    import torch

    generator, made, left = torch.Generator().manual_seed(seed), [], total
    while left > 1:
        prompt = int(torch.randint(longest // 16, longest // 8 + 1, (1,), generator=generator))
        drawn = float(torch.randn(1, generator=generator).mul(0.8).exp()) * longest / 5
        prompt = min(max(prompt, 1), left - 1)
        made.append((prompt, min(max(round(drawn), 1), longest - prompt, left - prompt)))
        left -= sum(made[-1])
    return made


def padded_tokens(lengths: Sequence[int], rows: int) -> int:
    """Tokens that are computed when ``rows`` sequences at a time are padded to the longest among them."""
    parts = [lengths[i : i + rows] for i in range(0, len(lengths), rows)]
    return sum(len(part) * max(part) for part in parts)


# ---------------------------------------------------------------- in a child


def measure_case(case: Row) -> None:
    """Measure one learner, or one way to log-probs, and send its row."""
    import torch

    from lqrl.modeling.precision import parse_dtype

    device, dtype, learner = torch.device(case["device"]), parse_dtype(case["dtype"]), case["learner"]
    lengths = [(int(p), int(c)) for p, c in case["lengths"]]
    wait_for_turn()
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    shared: Row = {"card": card, "versions": versions("torch", "triton", "transformers", "lqrl")}
    try:
        if learner in HEADS:
            run, before, needed = head_step(case["model"], learner, case["budget"], device, dtype)
            tokens = case["budget"]
        else:
            build = transformers_step if learner == PEER else policy_step
            run, before = build(case, make_batch(case["model"], lengths).to(device), device, dtype)
            tokens, needed = sum(map(sum, lengths)), 0
        seconds, peak = measure(run, before, case["repeats"], device)
        peak = None if peak is None else peak - needed
        if case["kernels"] and device.type == "cuda":
            before()
            shared["kernels"] = kernel_lines(run, case["kernels"], "an optimizer step's gradients")
        if case["host"]:
            before()
            shared["host"] = host_lines(run, case["host"])
        send(shared | {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds, "peak_bytes": peak})
    except Exception as error:
        send(shared | failure(error))


def measure(run: Callable[[], object], before: Callable[[], object], repeats: int, device: Any) -> tuple[Any, Any]:
    """Median seconds of ``run``, and on a GPU the peak of allocated bytes; a first run is not measured."""
    import torch

    cuda, times = device.type == "cuda", []
    for turn in range(repeats + 1):
        before()
        if cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        if turn:
            times.append(time.perf_counter() - started)
    return statistics.median(times), torch.cuda.max_memory_allocated(device) if cuda else None


def host_lines(run: Callable[[], object], count: int) -> list[str]:
    """Where the host's time goes in ``run``, by functions; that of backward passes on a GPU is another thread's."""
    import cProfile
    import io
    import pstats

    text = io.StringIO()
    with cProfile.Profile() as profile:
        run()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(count)
    return [line for line in text.getvalue().splitlines() if line.strip()]


def make_batch(model: str, lengths: Sequence[tuple[int, int]]) -> TrainBatch:
    """Random tokens, advantages and log-probs of the engine."""
    import torch

    from lqrl.types import TrainBatch

    generator, width = torch.Generator().manual_seed(1), max(map(sum, lengths))
    shape = (len(lengths), width)
    prompts, ends = torch.tensor([p for p, _ in lengths])[:, None], torch.tensor([p + c for p, c in lengths])[:, None]
    columns = torch.arange(width)
    trained = (columns >= prompts) & (columns < ends)
    return TrainBatch(
        input_ids=torch.randint(SHAPES[model].vocabulary, shape, generator=generator),
        attention_mask=columns < ends,
        loss_mask=trained,
        advantages=torch.randn(shape, generator=generator) * trained,
        rollout_logprobs=-torch.rand(shape, generator=generator) * trained,
        rollout_log_mass=torch.zeros(shape),
        group_ids=torch.arange(len(lengths)),
    )


Step = tuple[Callable[[], object], Callable[[], object]]


def policy_step(case: Row, batch: TrainBatch, device: Any, dtype: Any) -> Step:
    """The gradients of one optimizer step as `PolicyModule` makes them, and what comes before each."""
    import torch

    from lqrl.algorithms import ClippedLoss, TokenTIS
    from lqrl.learner.scorer import Scorer
    from lqrl.learner.update import Objective, accumulate_gradients
    from lqrl.modeling.backbone import load_model
    from lqrl.modeling.fused import fuse_layers_
    from lqrl.modeling.trial import kernels_work
    from lqrl.quant import QuantScheme, prepare_
    from lqrl.types import ClipRange

    policy = load_model(SHAPES[case["model"]].config(batch.input_ids.shape[1]), dtype=dtype, device=device)
    randomize_(policy)
    scheme = QuantScheme.preset(case["learner"])
    if scheme.quantizes:
        prepare_(policy, scheme, export_dtype=dtype)
    policy.train()
    if case["compiled"]:
        compile_layers_(policy)
    elif kernels_work(device):
        fuse_layers_(policy)
    scorer = Scorer(policy, 1.0, dtype)

    def step() -> None:
        accumulate_gradients(
            scorer.score,
            batch,
            Objective(ClippedLoss(), TokenTIS()),
            clip_range=ClipRange(),
            token_budget=case["budget"],
            backward=lambda loss: loss.backward(),
            anchor=lambda: torch.zeros((), device=device),
        )

    def before() -> None:
        policy.zero_grad(set_to_none=True)
        for parameter in policy.parameters():  # as an optimizer step does, so that codes are made anew
            torch.autograd.graph.increment_version(parameter)

    return step, before


def compile_layers_(policy: Any) -> None:
    """Compile each decoder layer for any number of tokens.

    Attention knows its lengths and its layer as numbers of the host, each of which would be compiled anew, and an
    aligned product runs this library's kernels: both are left out, and part a layer's graph.
    """
    import torch
    from transformers import AttentionInterface
    from transformers.modeling_layers import GradientCheckpointingLayer

    from lqrl.modeling.attention import ATTENTION_NAME, lqrl_attention
    from lqrl.quant.linear import AlignedLinear

    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(lqrl_attention))
    for module in policy.modules():
        if isinstance(module, AlignedLinear):
            module.forward = torch.compiler.disable(module.forward)
        elif isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)


def transformers_step(case: Row, batch: TrainBatch, device: Any, dtype: Any) -> Step:
    """The gradients of the plain policy gradient with padding and full logits."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    config = SHAPES[case["model"]].config(batch.input_ids.shape[1])
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    lengths = batch.attention_mask.sum(1).tolist()
    rows, trained = max(1, case["budget"] // max(lengths)), batch.loss_mask.sum()

    def step() -> None:
        for start in range(0, len(lengths), rows):
            some = slice(start, start + rows)
            width = max(lengths[some])
            ids, mask = batch.input_ids[some, :width], batch.attention_mask[some, :width]
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
            (losses * batch.advantages[some, 1:width]).sum().div(trained).backward()

    return step, lambda: model.zero_grad(set_to_none=True)


def head_step(model: str, way: str, tokens: int, device: Any, dtype: Any) -> tuple[Any, Any, int]:
    """Log-probs of ``tokens`` hidden states and their gradients; the bytes of operands and gradients come third."""
    import torch
    from torch.nn.functional import cross_entropy, linear

    from lqrl.algorithms.logprobs import chunked_logprobs
    from lqrl.modeling.head import head_kernels

    shape, fused = SHAPES[model], head_kernels(device, exact=False)._asdict()
    hidden = torch.randn(tokens, shape.hidden, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype) * 0.02).requires_grad_()
    targets = torch.randint(shape.vocabulary, (tokens,), device=device)

    def full() -> Tensor:
        return -cross_entropy(linear(hidden, weight).float(), targets, reduction="none")

    def step() -> None:
        (full() if way == HEADS[0] else chunked_logprobs(hidden, weight, targets, **fused)).sum().backward()

    def before() -> None:
        hidden.grad = weight.grad = None

    return step, before, 2 * (hidden.nbytes + weight.nbytes) + targets.nbytes


def randomize_(policy: Any) -> None:
    """Draw the weights where they lie; norms are 1."""
    import torch

    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)


# ---------------------------------------------------------------- in the parent


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """One a row; what a ratio is to comes first."""
    lengths, jobs = mixed_lengths(args.total, args.longest), []
    first = (PEER, "none")
    for model in args.models:
        learners = sorted(args.learners, key=lambda name: (name not in first, name != PEER))
        for learner, budget in learners_and_budgets(args, model, learners):
            case = {"model": model, "learner": learner, "lengths": lengths, "budget": budget, "repeats": args.repeats}
            case |= {"device": args.device, "dtype": args.dtype}
            case |= {"kernels": args.kernels, "host": args.host}
            for compiled in (False, True) if args.compile and learner not in (PEER, *HEADS) else (False,):
                name = f"{learner}, compiled" if compiled else learner
                row = {"model": model, "learner": name, "budget": budget}
                jobs.append(Job(__file__, case | {"compiled": compiled}, [row]))
    return jobs


def learners_and_budgets(args: argparse.Namespace, model: str, learners: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Every learner with its micro-batches; log-probs alone with the smallest."""
    budgets = args.token_budget or [BUDGETS[model]]
    for learner in learners:
        yield from ((learner, n) for n in (args.peer_token_budget or budgets if learner == PEER else budgets))
    yield from ((way, min(budgets)) for way in HEADS)


class Ratios:
    """Rows so far, by model, learner and micro-batch."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, int], Row] = {}

    def add(self, row: Row) -> Row:
        """``row`` with its speed over bf16's with the same micro-batch, and its speed and memory over another's.

        That is transformers with the micro-batch that suits it best, or full logits of as many tokens.
        """
        if "tokens_per_s" not in row:
            return row
        model, learner, budget = row["model"], row["learner"], row["budget"]
        self._rows[model, learner, budget] = row
        peers = [r for (m, name, _), r in self._rows.items() if m == model and name == PEER]
        peer = max(peers, key=lambda r: r["tokens_per_s"], default=None)
        if learner in HEADS:
            peer = self._rows.get((model, HEADS[0], budget))
        plain = self._rows.get((model, "none", budget)) if learner not in (*HEADS, PEER) else None
        if peer is not None and learner not in (PEER, HEADS[0]):
            row = row | {"x_peer": row["tokens_per_s"] / peer["tokens_per_s"]}
            if row["peak_bytes"] is not None and peer["peak_bytes"]:
                row["memory_x_peer"] = row["peak_bytes"] / peer["peak_bytes"]
        if plain is not None and learner != "none":
            row = row | {"x_bf16": row["tokens_per_s"] / plain["tokens_per_s"]}
        return row


def show(table: Table, row: Row) -> None:
    """Print a row, or what went wrong with it."""
    peak = row.get("peak_bytes")
    memory = (None if peak is None else peak / 2**30, row.get("memory_x_peer"))
    ratios = (row.get("tokens_per_s"), row.get("x_peer"), row.get("x_bf16"))
    table.row(row["model"], row["learner"], row["budget"], row.get("seconds"), *ratios, *memory, row.get("error"))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6B", "4B"], choices=list(SHAPES))
    parser.add_argument(
        "--learners", nargs="+", type=scheme_name_or(PEER), default=[PEER, "none", "fp8_per_channel", "int8_w8a8"],
        help=f"{PEER}, or a scheme that the learner is aligned with; none is bf16",
    )  # fmt: skip
    parser.add_argument("--total", type=at_least(2), default=65536, help="tokens of an optimizer step")
    parser.add_argument("--longest", type=at_least(2), default=2048, help="tokens of the longest sequence")
    parser.add_argument(
        "--token-budget", type=positive, nargs="+", help="most tokens of a micro-batch; the default goes by the model"
    )
    parser.add_argument("--peer-token-budget", type=positive, nargs="+", help=f"the same for {PEER}, if it is another")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="of parameters and products")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--compile", action="store_true", help="every learner under torch.compile too")
    parser.add_argument("--kernels", type=at_least(0), default=0, help="list so many kernels of each learner, on a GPU")
    parser.add_argument("--host", type=at_least(0), default=0, help="so many functions of each, by the host's time")
    add_job_options(parser, "one row", limit=120)
    return parser.parse_args(argv)


def main() -> None:
    """Print the table."""
    args = parse()
    if args.case:
        measure_case(args.case)
        return
    measured_device(args.device)
    record, ratios, jobs = Record(args.rows, "learner"), Ratios(), make_jobs(args)
    lengths = [sum(pair) for pair in mixed_lengths(args.total, args.longest)]
    print(f"{args.dtype}, {args.device}, {sum(lengths)} tokens in {len(lengths)} sequences of up to {max(lengths)}")
    for model in args.models:
        for budget in args.peer_token_budget or args.token_budget or [BUDGETS[model]]:
            rows = max(1, budget // max(lengths))
            share = 1 - sum(lengths) / padded_tokens(lengths, rows)
            print(f"{model}: {rows} rows at a time are padded by {share:.0%} in {PEER}")
    print()
    ratio_columns = ("x transformers or full logits", "x bf16", "peak, GiB", "of transformers or full logits")
    table = Table("model", "learner", "micro-batch", "s", "tokens/s", *ratio_columns, "note")
    for row in run_jobs(jobs, limit=args.limit, budget=args.budget, ahead=args.device != "cpu"):
        row = ratios.add(row)
        record.add(row | {"total": args.total, "longest": args.longest})
        show(table, row)
        for line in (*row.get("kernels", ()), *row.get("host", ())):
            print(line)
    record.end()


if __name__ == "__main__":
    main()
