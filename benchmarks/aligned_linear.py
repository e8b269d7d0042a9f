"""Forward and backward of an aligned linear layer over a plain bf16 one, at the layers of Qwen3-8B.

    python benchmarks/aligned_linear.py [--device cuda] [--tokens 4096 16384] [--formats fp8_per_channel ...]

Both layers hold bf16 weights and take turns. The codes are those of one optimizer step: the quantization of the weight,
which micro-batches share, is timed apart. Ratios below 1 mean that the aligned layer is faster. `LQRL_TRITON=0` gives
the eager operations.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from options import positive, scheme_name
from side_by_side import Timer, card, measured_device
from torch import nn

from lqrl.quant import QuantScheme
from lqrl.quant.linear import AlignedLinear
from lqrl.quant.methods import linear_method

QWEN3_8B = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24576), "down": (12288, 4096)}
TINY = {"qkv": (128, 256), "down": (256, 128)}
FORMATS = ["int8_w8a8", "fp8_per_channel", "fp8_per_tensor", "fp8_per_block", "int4_w4a16"]


def step(layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], object]:
    """Forward and backward, gradients of input and weight."""
    return lambda: torch.autograd.grad(layer(x), (x, layer.weight), grad)


def forward(layer: nn.Linear, x: torch.Tensor) -> Callable[[], object]:
    """Forward alone."""

    @torch.no_grad()
    def run() -> object:
        return layer(x)

    return run


def quantize(layer: AlignedLinear) -> Callable[[], object]:
    """Quantization of the weight and the layout of its operands."""

    def run() -> object:
        layer.invalidate()
        return layer.quantized_weight()

    return run


def measure(shape: tuple[int, int], tokens: int, formats: list[str], timer: Timer) -> dict[str, dict[str, float]]:
    """Milliseconds by what is timed and by format; ``bf16`` is the plain layer."""
    k, n = shape
    plain = nn.Linear(k, n, bias=False, device=timer.device, dtype=torch.bfloat16)
    aligned = {
        name: AlignedLinear(copy.deepcopy(plain), linear_method(QuantScheme.preset(name)), torch.bfloat16)
        for name in formats
    }
    x = torch.randn(tokens, k, device=timer.device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, n, device=timer.device, dtype=torch.bfloat16)
    layers: dict[str, nn.Linear] = {"bf16": plain, **aligned}
    return {
        "fwd+bwd": timer.in_turn({name: step(layer, x, grad) for name, layer in layers.items()}),
        "fwd": timer.in_turn({name: forward(layer, x) for name, layer in layers.items()}),
        "quantize": timer.in_turn({name: quantize(layer) for name, layer in aligned.items()}),
    }


def line(label: str, times: dict[str, dict[str, float]], formats: list[str]) -> str:
    """One row of the table: ratios to bf16 of fwd+bwd and, in parentheses, of the forward."""
    base, first = times["fwd+bwd"]["bf16"], times["fwd"]["bf16"]
    cells = [f"{times['fwd+bwd'][f] / base:5.2f} ({times['fwd'][f] / first:4.2f})" for f in formats]
    return f"| {label:18} | {base:9.3f} ({first:8.3f}) | " + " | ".join(f"{c:>15}" for c in cells) + " |"


def total(measured: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Sums over layers."""
    return {what: {name: sum(m[what][name] for m in measured) for name in measured[0][what]} for what in measured[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[4096, 16384])
    parser.add_argument("--formats", nargs="+", type=scheme_name, default=FORMATS)
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--tiny", action="store_true", help="small layers, for a rehearsal without a GPU")
    args = parser.parse_args()
    timer = Timer(measured_device(args.device), args.repeats)
    print(f"{card(timer.device)}; ms of bf16, then ratios to it: fwd+bwd (fwd)")
    print(f"| {'layer, tokens':18} | {'bf16 ms':20} | " + " | ".join(f"{f:>15}" for f in args.formats) + " |")
    print("|---|---|" + "---|" * len(args.formats))
    for tokens in args.tokens:
        measured = []
        for name, shape in (TINY if args.tiny else QWEN3_8B).items():
            measured.append(measure(shape, tokens, args.formats, timer))
            print(line(f"{name}, {tokens}", measured[-1], args.formats), flush=True)
        sums = total(measured)
        print(line(f"all, {tokens}", sums, args.formats), flush=True)
        weights = ", ".join(f"{name} {ms:.3f}" for name, ms in sums["quantize"].items())
        print(f"quantizing these weights once, ms: {weights}\n", flush=True)


if __name__ == "__main__":
    main()
