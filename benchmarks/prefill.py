"""The first token of many prompts from the embedded engine on a Qwen3 shape with random weights: its time, its kernels.

Prompts are of ``--prompt`` random tokens and run in prefills of at most ``--tokens``. ``--kernels N`` lists the N
kernels that take most of a call. The rate of arithmetic counts the layers' products alone.

    python benchmarks/prefill.py --formats none fp8_per_channel+kv_fp8_static --tokens 8192 16384 --kernels 16
    OMP_NUM_THREADS=1 python benchmarks/prefill.py --model tiny --device cpu --batch 2 --prompt 8
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence

import torch
from kernel_times import kernel_lines
from options import at_least, dtype_name, positive, scheme_name
from rollout_engines import random_weights
from rows import Table
from shapes import SHAPES
from side_by_side import card, measured_device

from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.precision import parse_dtype
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams


def build(scheme: QuantScheme, tokens: int | None, args: argparse.Namespace) -> TorchEngine:
    length = args.prompt + 1
    config, dtype = SHAPES[args.model].config(length), parse_dtype(args.dtype)
    spec = EngineSpec(config, scheme, dtype, torch.device(args.device), length, ())
    engine = TorchEngineFactory(max_num_seqs=args.batch, max_num_batched_tokens=tokens)(spec)
    engine.update_weights(random_weights(engine.decoder.model, scheme), policy_version=0)
    return engine


def measure(scheme: QuantScheme, tokens: int | None, table: Table, args: argparse.Namespace) -> None:
    engine, shape, generator = build(scheme, tokens, args), SHAPES[args.model], torch.Generator().manual_seed(0)
    drawn = torch.randint(3, shape.vocabulary, (args.batch, args.prompt), generator=generator).tolist()
    prompts = [Prompt(i, tuple(ids)) for i, ids in enumerate(drawn)]

    def call() -> None:
        engine.generate(prompts, SamplingParams(n=1, max_tokens=1, ignore_eos=True), seed=0)
        if args.device != "cpu":
            torch.cuda.synchronize()

    call()  # compiles
    times = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    seconds, count = statistics.median(times), args.batch * args.prompt
    rate = 2 * count * shape.linear_weights / seconds / 1e12
    table.row(scheme.name, tokens, args.batch, args.prompt, seconds * 1e3, max(times) * 1e3, count / seconds, rate)
    if args.kernels and args.device != "cpu":
        print("", *kernel_lines(call, args.kernels, "a call"), "", sep="\n", flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=list(SHAPES))
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=["none", "fp8_per_channel+kv_fp8_static"])
    parser.add_argument("--tokens", nargs="+", type=positive, default=[None], help="of a prefill")
    parser.add_argument("--batch", type=positive, default=256, help="prompts")
    parser.add_argument("--prompt", type=positive, default=256, help="tokens of a prompt")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--kernels", type=at_least(0), default=0, help="how many kernels to list")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args(argv)


def main() -> None:
    """Print the table."""
    args = parse()
    print(f"Qwen3 {args.model}, {args.dtype}, {card(measured_device(args.device))}\n")
    table = Table("format", "tokens", "batch", "prompt", "ms", "longest, ms", "tokens/s", "TFLOP/s")
    for name in args.formats:
        for tokens in args.tokens:
            measure(QuantScheme.preset(name), tokens, table, args)
            gc.collect()
            if args.device != "cpu":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
