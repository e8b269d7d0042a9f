"""Time what stands between the products of a decode step: norms with and without quantizers, and the draw of tokens.

    python benchmarks/decode_rows.py [--rows 8 64 256]

Microseconds inside a CUDA graph, each next to the same work in separate calls. Tokens are drawn from fp32 logits of
Qwen3's vocabulary; ``exact`` is the draw of exact mode. Truncated draws read the logits several times. The floor moves
the bytes that must move, at the bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from graph_time import graph_time
from options import positive
from side_by_side import bandwidth, card, measured_device
from torch import Tensor

from lqrl.engines import triton_draw
from lqrl.engines.sampling import sample_eager, sample_exact
from lqrl.quant import exact, rows, triton_norm_quantize
from lqrl.types import SamplingParams

VOCABULARY = 151936
WIDTHS = {"0.6B": 1024, "8B": 4096, "32B": 5120}
Ways = dict[str, Callable[[], object]]


def norms(m: int, width: int, device: torch.device) -> tuple[Ways, int]:
    """Sum, norm and quantizer; and the bytes that they move."""
    x, delta = torch.randn(2, m, width, device=device).bfloat16()
    weight = torch.ones(width, device=device, dtype=torch.bfloat16)

    def apart(quantize: Callable[[Tensor], object]) -> object:
        total, normed = exact.add_rms_norm(x, delta, weight, 1e-6)
        return total, quantize(normed)

    def fused(kind: triton_norm_quantize.Codes) -> object:
        return triton_norm_quantize.add_rms_norm(x, delta, weight, 1e-6, kind)

    ways: Ways = {
        "int8 apart": partial(apart, rows.quantize_int8_token),
        "int8 fused": partial(fused, "int8"),
        "fp8 apart": partial(apart, rows.quantize_fp8_token),
        "fp8 fused": partial(fused, "fp8_e4m3"),
    }
    return ways, 7 * m * width


def draws(m: int, device: torch.device) -> tuple[Ways, int]:
    """Draws from the whole vocabulary; and the bytes that they move."""
    logits = torch.randn(m, VOCABULARY, device=device) * 3
    uniform = torch.rand(m, device=device, dtype=torch.float64)
    params = SamplingParams(temperature=0.7)
    ways: Ways = {
        "eager": partial(sample_eager, logits, uniform, params),
        "exact": partial(sample_exact, logits, uniform, params),
        "fused": partial(triton_draw.draw, logits, uniform, 0.7),
        "greedy": partial(triton_draw.draw, logits, None, 1.0),
        "top-p .95": partial(sample_exact, logits, uniform, SamplingParams(temperature=0.7, top_p=0.95)),
        "top-k 20, top-p .95": partial(
            sample_exact, logits, uniform, SamplingParams(temperature=0.7, top_k=20, top_p=0.95)
        ),
    }
    return ways, 4 * m * VOCABULARY


def line(ways: Ways, moved: int, speed: float, replays: int) -> str:
    """Times of all ways next to the floor."""
    times = "; ".join(f"{name} {graph_time([run] * 8, replays):.1f}" for name, run in ways.items())
    return f"floor {moved / speed * 1e6:.1f} | {times}"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=positive, nargs="+", default=[8, 64, 256])
    parser.add_argument("--replays", type=positive, default=9)
    args = parser.parse_args()
    device = measured_device(args.device)
    speed = bandwidth(device)
    print(f"{card(device)}; copy {speed / 1e12:.2f} TB/s; us")
    for m in args.rows:
        for model, hidden in WIDTHS.items():
            print(f"{model} M {m} norm {hidden}: {line(*norms(m, hidden, device), speed, args.replays)}", flush=True)
        print(f"M {m} draw: {line(*draws(m, device), speed, args.replays)}", flush=True)


if __name__ == "__main__":
    main()
