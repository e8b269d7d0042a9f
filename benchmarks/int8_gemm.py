"""Time one int8 linear layer against `F.linear` in fp32 and bf16, and print the ratios.

    python benchmarks/int8_gemm.py [--device cpu] [--threads 1] [--shape M,K,N ...]

All candidates of a shape run in turn within one loop, so that a busy machine slows all of them alike. The int8 times
include the quantization of the activations and the epilogue. The best run, in parentheses, is the figure least
disturbed by other processes; the last column is the rate of multiply-adds in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from options import duration, positive

from lqrl.quant import kernels
from lqrl.quant.numerics import quantize_int8_channel

SMOLLM2 = [(576, 576), (576, 192), (576, 1536), (1536, 576)]
TINY = [(64, 64), (64, 192), (192, 64)]
SHAPES = [(8, k, n) for k, n in TINY] + [(64, k, n) for k, n in TINY] + [(1, 576, 1536)]
SHAPES += [(m, k, n) for m in (8, 64, 512) for k, n in SMOLLM2] + [(64, 1024, 3072)]


def time_in_turn(candidates: dict[str, Callable[[], object]], device: torch.device, budget_s: float) -> dict[str, list]:
    """Sorted times in microseconds of each candidate, run one after another until the budget is spent."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times["int8"]) < 5:
        for name, run in candidates.items():
            run()  # the weights of the others left the cache
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: sorted(values) for name, values in times.items()}


def measure(m: int, k: int, n: int, device: torch.device, budget_s: float) -> str:
    """One line of the table."""
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    codes, scale = quantize_int8_channel(weight)
    packed = kernels.int8_pack(codes)
    x_bf16, weight_bf16 = x.bfloat16(), weight.bfloat16()
    candidates: dict[str, Callable[[], object]] = {
        "int8": lambda: kernels.int8_linear(x, packed, scale),
        "int8_bf16": lambda: kernels.int8_linear(x_bf16, packed, scale),
        "fp32": lambda: F.linear(x, weight),
        "bf16": lambda: F.linear(x_bf16, weight_bf16),
    }
    times = time_in_turn(candidates, device, budget_s)
    median = {name: values[len(values) // 2] for name, values in times.items()}
    least = {name: values[0] for name, values in times.items()}
    columns = " | ".join(f"{median[name]:9.1f} ({least[name]:8.1f})" for name in candidates)
    ratios = [median["fp32"] / median["int8"], median["bf16"] / median["int8_bf16"], least["fp32"] / least["int8"]]
    peak = m * n * k / least["int8"] / 1e3
    return (
        f"| {m:4d} {k:5d} {n:5d} | {columns} | {ratios[0]:5.2f} ({ratios[2]:5.2f}) | {ratios[1]:5.2f} | {peak:6.1f} |"
    )


def shape(text: str) -> tuple[int, ...]:
    """The argparse type of M,K,N."""
    sizes = tuple(map(positive, text.split(",")))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"must be M,K,N, not {text}")
    return sizes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=duration, default=1.0, help="time budget of a shape")
    parser.add_argument("--shape", action="append", type=shape, metavar="M,K,N")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    device = torch.device(args.device)
    print(f"backend {kernels.int8_backend(device)}, {args.threads} threads; us, median (min)")
    print(
        "|    M     K     N | int8 from fp32 | int8 from bf16 | fp32 | bf16 | fp32 / int8 | bf16 / int8 | peak GMAC/s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for m, k, n in args.shape or SHAPES:
        print(measure(m, k, n, device, args.seconds), flush=True)


if __name__ == "__main__":
    main()
