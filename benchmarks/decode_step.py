"""One decode step of the embedded engine on a Qwen3 shape with random weights: its time, its floor and its kernels.

Every slot holds ``--context`` tokens. A step is what the engine replays for each token, sampling and log-probs
included; the floor is the bytes that it cannot avoid reading (`Shape.step_bytes`) at the bandwidth of a large copy.
``--kernels N`` lists the N kernels that take most of a step; ``plain`` rows run PyTorch's attention and layers; with
``--exact`` each row has one in exact mode beside it.

    python benchmarks/decode_step.py --model 8B --batch 8 64 256 --kernels 12
    OMP_NUM_THREADS=1 python benchmarks/decode_step.py --model tiny --device cpu --batch 2 --context 8
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from functools import partial

import torch
from kernel_times import kernel_lines
from options import at_least, dtype_name, positive, scheme_name
from rollout_engines import random_weights
from rows import Table
from shapes import SHAPES
from side_by_side import bandwidth, card, measured_device

from lqrl.engines.base import EngineSpec
from lqrl.engines.slots import SlotCache
from lqrl.engines.stepper import Stepper
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.precision import parse_dtype
from lqrl.quant.scheme import QuantScheme
from lqrl.types import SamplingParams

STEPS = 8  # of one run, as many as the engine takes between two looks of the host


def build(scheme: QuantScheme, fused: bool, exact: bool, args: argparse.Namespace) -> TorchEngine:
    device, length = torch.device(args.device), args.context + STEPS * (args.repeats + 4)
    config, dtype = SHAPES[args.model].config(length), parse_dtype(args.dtype)
    spec = EngineSpec(config, scheme, dtype, device, length, (), exact=exact)
    engine = TorchEngineFactory(max_num_seqs=max(args.batch), fused=fused)(spec)
    engine.update_weights(random_weights(engine.decoder.model, scheme), policy_version=0)
    return engine


def stepper_of(engine: TorchEngine, batch: int, context: int) -> Stepper:
    """The engine's steps, with every slot at ``context`` tokens."""
    stepper = Stepper(engine.decoder, engine._cache, STEPS, engine.options.cuda_graphs)
    stepper.reserve(batch, engine.spec.max_model_len, SamplingParams())
    fill(engine._cache)
    stepper.tokens.random_(engine.decoder.vocabulary)
    stepper.uniforms.uniform_()
    stepper.positions.fill_(context)
    stepper.start(batch, context + 1)
    return stepper


def fill(cache: SlotCache) -> None:
    """Small numbers, codes and scales everywhere."""
    for flat in (flat for layer in cache._storage for flat in layer):
        if flat.is_floating_point() and flat.itemsize > 1:
            flat.fill_(0.05)
        else:
            flat.view(torch.uint8).random_(0x70)


def milliseconds(stepper: Stepper, device: torch.device, repeats: int) -> float:
    """Median of a step; the first runs compile and capture."""
    times = []
    for turn in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        stepper.run(STEPS)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 2:
            times.append((time.perf_counter() - started) / STEPS * 1e3)
    return statistics.median(times)


@torch.no_grad()
def measure(scheme: QuantScheme, fused: bool, exact: bool, rate: float, table: Table, args: argparse.Namespace) -> None:
    engine = build(scheme, fused, exact, args)
    device, shape = engine.spec.device, SHAPES[args.model]
    way = type(engine.decoder.lean).__name__ if engine.decoder.lean is not None else "transformers"
    for batch in args.batch:
        row = (scheme.name, f"{way}, exact" if exact else way, batch, args.context)
        try:
            stepper = stepper_of(engine, batch, args.context)
            step = milliseconds(stepper, device, args.repeats)
            floor = shape.step_bytes(scheme, batch, args.context, 8 * engine.spec.dtype.itemsize) / rate * 1e3
            floors = (floor, floor / step) if device.type == "cuda" else (None, None)  # of a CPU's caches there is none
            table.row(*row, step, *floors, batch / step * 1e3, None)
            if args.kernels and device.type == "cuda":
                lines = kernel_lines(partial(stepper.run, STEPS), args.kernels, "a step", STEPS)
                print("", *lines, "", sep="\n", flush=True)
        except (RuntimeError, NotImplementedError) as error:
            table.row(*row, None, None, None, None, f"{type(error).__name__}: {error}"[:200])
        engine._cache.release()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=list(SHAPES))
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=["none", "none+kv_fp8", "none+kv_int8"])
    parser.add_argument("--plain", action="store_true", help="also without fused kernels")
    parser.add_argument("--exact", action="store_true", help="also in exact mode")
    parser.add_argument("--batch", nargs="+", type=positive, default=[8, 64, 256])
    parser.add_argument("--context", type=positive, default=512, help="tokens that every slot holds")
    parser.add_argument("--repeats", type=positive, default=5, help=f"measured runs of {STEPS} steps")
    parser.add_argument("--kernels", type=at_least(0), default=0, help="how many kernels to list")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = measured_device(args.device)
    rate = bandwidth(device)
    print(f"Qwen3 {args.model}, {args.dtype}, {card(device)}, a copy moves {rate / 1e12:.2f} TB/s\n")
    table = Table("format", "layers", "batch", "context", "ms", "floor, ms", "of floor", "tokens/s", "note")
    for name in args.formats:
        ways = itertools.product((True, False) if args.plain else (True,), (False, True) if args.exact else (False,))
        for fused, exact in ways:
            measure(QuantScheme.preset(name), fused, exact, rate, table, args)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
