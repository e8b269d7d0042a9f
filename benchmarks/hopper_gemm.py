"""Time the cuts of `lqrl.quant.hopper_gemm` for the products of a decode step beside the libraries' and Triton's.

    python benchmarks/hopper_gemm.py [--formats bf16 ...] [--rows 64 128 256] [--models 8B] [--rows-file FILE]

Layers, times and ``=`` as in `decode_gemm.py`; ``now`` is what the embedded engine takes without this kernel.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from decode_gemm import COLD_BYTES, MODELS, WRONG, Layer
from graph_time import graph_time
from options import positive
from side_by_side import card, measured_device
from torch import Tensor

from lqrl.quant import hopper_gemm, triton_fp8, triton_int8
from lqrl.quant.hopper_source import STEP_BYTES, Cut

KINDS = {"bf16": "bf16", "fp8_per_channel": "e4m3", "int8_w8a8": "int8"}
SHARED_BYTES = 227 * 1024
FEWEST_BLOCKS = 60
REPLAYS = 7


def candidates(format: str, m: int, n: int, k: int, splits: tuple[int, ...]) -> list[Cut]:
    """Cuts that fill a good part of the card, each with as many stages as shared memory holds."""
    found = []
    for groups, rows, parts in itertools.product((1, 2, 3), (16, 32, 64, 128, 256), splits):
        if rows // parts % 16 or rows >= 2 * max(m, 16) or rows * 4 < m:
            continue
        blocks = -(-n // (64 * groups)) * parts * -(-m // rows)
        steps = -(-k * (2 if format == "bf16" else 1) // STEP_BYTES) // parts
        stages = min((SHARED_BYTES - 1024 - 256) // ((64 * groups + rows) * STEP_BYTES), steps, 12)
        cut = Cut(groups, rows, parts, stages)
        if blocks >= FEWEST_BLOCKS and stages >= 2 and cut.shared_bytes <= SHARED_BYTES - 256:
            found.append(cut)
    return found


def run(layer: Layer, cut: Cut | None, copy: int) -> Tensor:
    """One product: by this kernel, or as the engine does without it."""
    if cut is None:
        if layer.format == "fp8_per_channel":
            return layer.run(triton_fp8.row_tile_for(layer.m, layer.n), copy)
        if layer.format == "int8_w8a8":
            return layer.run(triton_int8.tile_for(layer.m, layer.n, layer.k), copy)
        return layer.run(None, copy)
    (x, *token), (weight, *scale) = layer.inputs, layer.weights[copy]
    return hopper_gemm.linear(x, weight, cut, *token, *scale)


def label(cut: Cut | None) -> str:
    """Short name of a cut."""
    return "now" if cut is None else f"{cut.outputs}x{cut.rows}/{cut.splits} s{cut.stages}"


def measure(layer: Layer, name: str, splits: tuple[int, ...], rows_file: Path | None) -> None:
    """Time all cuts of one layer and print the fastest."""
    wanted = layer.run(None, 0).float()
    found = []
    for cut in (None, *candidates(layer.format, layer.m, layer.n, layer.k, splits)):
        try:
            got = run(layer, cut, 0).float()
        except Exception as error:
            print(f"  {label(cut)}: {type(error).__name__}: {str(error)[:90]}", flush=True)
            torch.cuda.synchronize()
            continue
        error = float((got - wanted).norm() / wanted.norm())
        if not error <= WRONG:
            print(f"  {label(cut)}: WRONG, off by {error:.1e} of its size", flush=True)
            continue
        us = graph_time([functools.partial(run, layer, cut, c) for c in range(layer.copies)], REPLAYS)
        found.append((us, label(cut), float((got == wanted).float().mean())))
        if rows_file is not None:
            row = {"format": layer.format, "m": layer.m, "n": layer.n, "k": layer.k, "cut": label(cut), "us": us}
            with rows_file.open("a") as out:
                out.write(json.dumps(row) + "\n")
    found.sort()
    shown = [f"{name} {us:.1f}{'=' if share == 1 else f' ({share:.1%})'}" for us, name, share in found]
    now = next((text for text in shown if text.startswith("now")), "now failed")
    print(f"{name} M {layer.m} {layer.format}: {now} | {'; '.join(shown[:6])}", flush=True)


def compile_all(args: argparse.Namespace) -> None:
    """Machine code of every cut, side by side."""
    shapes = {shape for model in args.models for shape in MODELS[model].values()}
    wanted = {
        (KINDS[kind], cut)
        for kind, m, (k, n) in itertools.product(args.formats, args.rows, shapes)
        for cut in candidates(kind, m, n, k, tuple(args.splits))
    }
    start = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda key: hopper_gemm._code(*key, False), wanted))
    print(f"{len(wanted)} kernels compiled in {time.monotonic() - start:.1f} s", flush=True)


def main() -> None:
    """Print the fastest cuts of each product."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=positive, default=[64, 128, 256])
    parser.add_argument("--models", nargs="+", default=["8B"], choices=list(MODELS))
    parser.add_argument("--splits", nargs="+", type=positive, default=[1, 2, 4])
    parser.add_argument("--jobs", type=positive, default=12)
    parser.add_argument("--rows-file", type=Path)
    args = parser.parse_args()
    device = measured_device()
    reason = hopper_gemm.obstacle(device.index)
    if reason is not None:
        raise SystemExit(f"{torch.cuda.get_device_name()} does not run this kernel: {reason}")
    print(card(device))
    compile_all(args)
    for m, kind, model in itertools.product(args.rows, args.formats, args.models):
        for name, (k, n) in MODELS[model].items():
            copies = max(2, -(-COLD_BYTES // (n * k * (2 if kind == "bf16" else 1))))
            layer = Layer(kind, m, k, n, device, copies)
            measure(layer, f"{model} {name}", tuple(args.splits), args.rows_file)


if __name__ == "__main__":
    main()
