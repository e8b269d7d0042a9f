"""Time the ways to cut the low-bit products of many rows, and print the fastest: what the kernels' tables are set from.

    python benchmarks/low_bit_gemm.py [--kinds int8 fp8_block quantize] [--rows 512 4096]

Layers of Qwen3-8B; `decode_gemm.py` is for few rows. `int8`: `torch._int_mm` and the epilogue against tiles, for
`triton_int8.TILES`. `fp8_block`: tiles for `triton_fp8.TILES`. `quantize`: the row quantizers, eager and fused. Each
line gives the bf16 product's time, then all candidates from the fastest on, in microseconds. Activations are quantized
beforehand.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from options import at_least, positive
from side_by_side import Timer, card, measured_device

from lqrl.quant import kernels, rows, triton_fp8, triton_int8
from lqrl.quant import numerics as q
from lqrl.quant.triton_tiles import Tile

QWEN3_8B = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24576), "down": (12288, 4096)}
ROWS = [512, 1024, 4096, 16384]
Candidates = dict[str, Callable[[], object]]

PREFILL = [
    Tile(bm, bn, 128, warps, stages, tma)
    for bm, bn, warps, stages in (
        (128, 256, 8, 3),
        (128, 256, 8, 4),
        (256, 128, 8, 3),
        (128, 128, 8, 3),
        (128, 128, 8, 4),
        (128, 128, 4, 3),
        (128, 64, 4, 4),
        (64, 256, 4, 3),
    )
    for tma in (False, True)
]


def label(tile: Tile) -> str:
    return f"{tile.m}x{tile.n}x{tile.k} w{tile.warps} s{tile.stages}{' tma' * tile.tma}"


def int8(m: int, k: int, n: int, device: torch.device) -> Candidates:
    """The exact product with its epilogue."""
    codes, token_scale = rows.quantize_int8_token(torch.randn(m, k, device=device, dtype=torch.bfloat16))
    weight, scale = rows.quantize_int8_channel(torch.randn(n, k, device=device, dtype=torch.bfloat16))
    backend = kernels.TorchBackend()
    packed = backend.pack(weight)

    def library() -> object:
        return triton_int8.epilogue(backend.mm(codes, packed, n), scale, token_scale, None, torch.bfloat16)

    found: Candidates = {"_int_mm + epilogue": library}
    for tile in PREFILL:
        found[label(tile)] = functools.partial(
            triton_int8.gemm, codes, packed, scale, token_scale, None, torch.bfloat16, tile
        )
    return found


def fp8_block(m: int, k: int, n: int, device: torch.device) -> Candidates:
    """The product in blocks."""
    codes, x_scale = rows.quantize_fp8_group(torch.randn(m, k, device=device, dtype=torch.bfloat16))
    weight, scale = rows.quantize_fp8_block(torch.randn(n, k, device=device, dtype=torch.bfloat16))
    run = functools.partial(triton_fp8.block_scaled, codes, x_scale, weight, scale, torch.bfloat16)
    return {label(t): functools.partial(run, t) for t in PREFILL if t.n <= 128}


def quantize(m: int, k: int, n: int, device: torch.device) -> Candidates:
    """Quantizers of the activations, eager and fused; ``n`` is not used."""
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return {
        "int8 eager": lambda: q.quantize_int8_token(x),
        "int8": lambda: rows.quantize_int8_token(x),
        "fp8 eager": lambda: q.quantize_fp8_token(x),
        "fp8": lambda: rows.quantize_fp8_token(x),
        "fp8 group eager": lambda: q.quantize_fp8_group(x),
        "fp8 group": lambda: rows.quantize_fp8_group(x),
        "copy": lambda: x.clone(),
    }


KINDS = {"int8": int8, "fp8_block": fp8_block, "quantize": quantize}


def runs(candidates: Candidates) -> Candidates:
    """Those that the card has the registers and the shared memory for; the others are named."""
    found: Candidates = {}
    for name, run in candidates.items():
        try:
            run()
            found[name] = run
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:100]}")
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rows", type=positive, nargs="+", default=ROWS)
    parser.add_argument("--layers", nargs="+", default=list(QWEN3_8B), choices=list(QWEN3_8B))
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--show", type=at_least(0), default=5, help="candidates a line")
    args = parser.parse_args()
    timer = Timer(measured_device(args.device), args.repeats)
    print(f"{card(timer.device)}; us, median of {args.repeats}, L2 flushed")
    for kind in args.kinds:
        for m in args.rows:
            for layer in args.layers:
                k, n = QWEN3_8B[layer]
                x, weight = (torch.randn(r, k, device=timer.device, dtype=torch.bfloat16) for r in (m, n))
                candidates = runs(KINDS[kind](m, k, n, timer.device))
                times = timer.in_turn({"bf16": lambda x=x, w=weight: F.linear(x, w), **candidates})
                base = times.pop("bf16") * 1e3
                best = sorted(times.items(), key=lambda item: item[1])[: args.show]
                shown = "; ".join(f"{name} {ms * 1e3:.1f}" for name, ms in best)
                library = {f: times[f] for f in ("_int_mm + epilogue",) if f in times}
                rest = "".join(f"; {name} {ms * 1e3:.1f}" for name, ms in library.items() if name not in dict(best))
                print(f"{kind} M {m} {layer} K {k} N {n}: bf16 {base:.1f} | {shown}{rest}", flush=True)


if __name__ == "__main__":
    main()
