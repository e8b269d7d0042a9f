"""Time the ways to cut each low-bit product of decoding, and print the tables that the Triton kernels hold.

    python benchmarks/decode_gemm.py [--formats int8_w8a8 ...] [--rows 8 64 256] [--models 8B] [--seconds 140]
    python benchmarks/decode_gemm.py --formats exact_none --rows 256 --models 0.6B 8B "8B head"

A layer is captured in a CUDA graph as often as it takes for its weights to leave the L2 cache, each time with weights
of its own, as in a decode step; times are microseconds of one product, activations quantized beforehand. The floor
reads weight and input once and writes the output, at the bandwidth of a large copy. ``=`` marks outputs with the bits
of the library's product (fp8 blocks: of the kernel's plain tile), a share those of a part of the outputs; only ``=``
enters the tables of formats that promise bits, unless ``--any-bits``. The library's way with packed weights is to
dequantize them first. Kernels are compiled ahead, by processes that run every candidate once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from decode_tiles import EXACT, FORMATS, PROMISE_BITS, WITH_LIBRARY, candidates
from graph_time import graph_time
from options import at_least, duration, positive
from side_by_side import bandwidth, card, measured_device
from torch import Tensor

from lqrl.quant import kernels, triton_exact_gemm, triton_fp8, triton_int8, triton_scaled, triton_weight_only
from lqrl.quant.packed import PackedWeight
from lqrl.quant.triton_tiles import Tile

BF16 = torch.bfloat16
MODELS = {
    "0.6B": {"qkv": (1024, 4096), "o": (2048, 1024), "gate_up": (1024, 6144), "down": (3072, 1024)},
    "8B": {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24576), "down": (12288, 4096)},
    "0.6B head": {"head": (1024, 151936)},
    "8B head": {"head": (4096, 151936)},
    "32B": {"qkv": (5120, 10240), "o": (8192, 5120), "gate_up": (5120, 51200), "down": (25600, 5120)},
}
COLD_BYTES = 128 * 2**20  # more than the L2 cache holds
WRONG = 0.02  # relative error of a product that cannot be explained by the order of its sums

Run = Callable[[], Tensor]


@dataclass
class Layer:
    """Random operands of one product: the input ``[M, K]``, and weights ``[N, K]`` that are used in turn."""

    format: str
    m: int
    k: int
    n: int
    device: torch.device
    copies: int
    inputs: tuple[Tensor, ...] = field(init=False)
    weights: list[tuple[Tensor, ...]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        self._random = lambda *shape: torch.randn(shape, device=self.device, generator=generator)
        self.inputs = self._input()
        self.weights = [self._weight() for _ in range(self.copies)]

    def _input(self) -> tuple[Tensor, ...]:
        x = self._random(self.m, self.k)
        if self.format == "int8_w8a8":
            return x.mul_(40).clamp_(-127, 127).to(torch.int8), self._random(self.m, 1).abs()
        if self.format.startswith("fp8"):
            columns = self.k // 128 if self.format == "fp8_per_block" else 1
            return x.mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn), self._random(self.m, columns).abs()
        return (x.to(BF16),)

    def _weight(self) -> tuple[Tensor, ...]:
        shape, bits = (
            (self.n, self.k),
            lambda n, k: torch.randint(0, 255, (n, k), device=self.device, dtype=torch.uint8),
        )
        if self.format in ("bf16", "exact_none"):
            return (self._random(*shape).to(BF16),)
        if self.format == "int8_w8a8":
            return bits(*shape).view(torch.int8), self._random(self.n, 1).abs()
        if self.format.startswith("fp8"):
            scales = (self.n // 128, self.k // 128) if self.format == "fp8_per_block" else (self.n, 1)
            codes = self._random(*shape).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
            return codes, self._random(*scales).abs()
        if self.format.endswith("int4_w4a16"):
            return bits(self.n, self.k // 2), self._random(self.n, self.k // 128).to(BF16)
        scale = self._random(self.n, self.k // 16).abs().to(torch.float8_e4m3fn)
        return bits(self.n, self.k // 2), scale, torch.full((1,), 8.0, device=self.device)

    @property
    def moved(self) -> int:
        """Bytes that one product must read and write."""
        tensors = (*self.inputs, *self.weights[0])
        return sum(t.numel() * t.element_size() for t in tensors) + 2 * self.m * self.n

    def run(self, tile: Tile | None, copy: int) -> Tensor:
        """One product; without a tile, the library's."""
        weight, (x, *scale) = self.weights[copy], self.inputs
        if self.format in EXACT:
            return self._exact(x, weight, tile)
        if self.format == "bf16":
            return F.linear(x, weight[0])
        if self.format == "int8_w8a8":
            if tile is None:
                acc = kernels.TorchBackend().mm(x, weight[0], self.n)
                return triton_int8.epilogue(acc, weight[1], scale[0], None, BF16)
            return triton_int8.gemm(x, weight[0], weight[1], scale[0], None, BF16, tile)
        if self.format == "fp8_per_channel":
            if tile is None:
                return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                    x, weight[0].t(), scale[0], weight[1].view(1, -1), out_dtype=BF16, use_fast_accum=True
                )
            return triton_scaled.gemm(x, weight[0], weight[1], scale[0], None, BF16, tile)
        if self.format == "fp8_per_block":
            plain = Tile(64, 64, 128, 4, 5)
            return triton_fp8.block_scaled(x, scale[0], weight[0], weight[1], BF16, plain if tile is None else tile)
        packed = PackedWeight("int4" if self.format == "int4_w4a16" else "nvfp4", *weight)
        if tile is None:
            return F.linear(x, triton_weight_only.dequantize(packed, BF16))
        return triton_weight_only.linear(x, packed, None, BF16, tile)

    def _exact(self, x: Tensor, weight: tuple[Tensor, ...], tile: Tile | None) -> Tensor:
        """Without a tile, the library's way: a plain tile, or the weight dequantized first."""
        if self.format == "exact_none":
            plain = Tile(64, 64, 128, 4, 5)
            dtype = torch.float32 if self.n > 2**16 else BF16  # a head's logits are fp32
            return triton_exact_gemm.linear(x, *weight, None, dtype, plain if tile is None else tile)
        packed = PackedWeight("int4", *weight)
        if tile is None:
            return triton_exact_gemm.linear(x, triton_weight_only.dequantize(packed, BF16), None, BF16)
        return triton_exact_gemm.packed_linear(x, packed, None, BF16, tile)


def microseconds(layer: Layer, tile: Tile | None, replays: int) -> float:
    """Median time of one product in a graph of all copies."""
    return graph_time([functools.partial(layer.run, tile, copy) for copy in range(layer.copies)], replays)


@dataclass(frozen=True)
class Timed:
    """A candidate of one layer: its tile (``None``: the library), its time, and the share of the reference's bits."""

    tile: Tile | None
    us: float
    share: float

    @property
    def equal(self) -> bool:
        """Whether all outputs have the reference's bits."""
        return self.share == 1

    def __str__(self) -> str:
        return f"{label(self.tile)} {self.us:.1f}{'=' if self.equal else f' ({self.share:.2%})'}"


def label(tile: Tile | None) -> str:
    """Short name of a candidate."""
    if tile is None:
        return "library"
    options = f"{' tma' * tile.tma}{' tall' * tile.tall}{f' /{tile.splits}' * (tile.splits > 1)}"
    return f"{tile.m}x{tile.n}x{tile.k} w{tile.warps} s{tile.stages}{options}"


def timed(layer: Layer, replays: int) -> list[Timed]:
    """All candidates that run and are right, from the fastest on; the first three are timed twice as long again."""
    wanted = layer.run(None, 0).float()
    found = []
    for tile in (None, *candidates(layer.format, layer.m, layer.n, layer.k)):
        try:
            got = layer.run(tile, 0).float()
            error = float((got - wanted).norm() / wanted.norm())
            if not error <= WRONG:
                print(f"  {label(tile)}: WRONG, off by {error:.1e} of its size", flush=True)
                continue
            found.append(Timed(tile, microseconds(layer, tile, replays), float((got == wanted).float().mean())))
        except Exception as error:
            print(f"  {label(tile)}: {type(error).__name__}: {str(error)[:80]}", flush=True)
            torch.cuda.synchronize()
    found.sort(key=lambda t: t.us)
    again = [Timed(t.tile, microseconds(layer, t.tile, 2 * replays), t.share) for t in found[:3]]
    return sorted(again, key=lambda t: t.us) + found[3:]


def kernel_key(kind: str, m: int, k: int, tile: Tile) -> tuple[object, ...]:
    """What decides the compiled kernel."""
    return kind, m % 16 == 0, k, tile


def compile_part(args: argparse.Namespace) -> None:
    """Run every ``of``-th kernel of the sweep once, so that it lies in the compiler's cache."""
    part, of = args.compile
    shapes = sorted({MODELS[model][layer] for model in args.models for layer in MODELS[model]})
    seen: set[tuple[object, ...]] = set()
    for m, kind, (k, n) in itertools.product(args.rows, args.formats, shapes):
        tiles = {kernel_key(kind, m, k, t): t for t in candidates(kind, m, n, k)}
        mine = [tile for key, tile in tiles.items() if key not in seen and zlib.crc32(repr(key).encode()) % of == part]
        seen.update(tiles)
        layer = Layer(kind, m, k, n, torch.device(args.device), 1) if mine else None
        for tile in mine:
            assert layer is not None
            with contextlib.suppress(Exception):  # the measuring process names it
                layer.run(tile, 0)


def compile_all(args: argparse.Namespace, seconds: float) -> None:
    """`compile_part` in processes of their own, for at most ``seconds``."""
    lists = [f"--{key}={value}" for key, value in (("device", args.device),)]
    for key in ("formats", "rows", "models"):
        lists += [f"--{key}", *map(str, getattr(args, key))]
    command = [sys.executable, __file__, *lists, "--compile"]
    running = [subprocess.Popen([*command, str(i), str(args.jobs)]) for i in range(args.jobs)]
    until = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()


def table(
    results: dict[tuple[int, int], list[list[Timed]]], bits: bool, library: bool
) -> list[tuple[int, int, Tile | None]]:
    """Rows (largest M, smallest N, tile) from the candidates of layers by M and N: the least sum of relative times.

    Args:
        results: of one format.
        bits: only candidates with the bits of the reference.
        library: the library's product may stand in the table.
    """
    rows: list[tuple[int, int, Tile | None]] = []
    for m in sorted({m for m, _ in results}):
        widths = sorted(n for height, n in results if height == m)
        chosen = []
        for n in widths:
            able = [[t for t in layer if library or t.tile is not None] for layer in results[m, n]]
            layers = [{t.tile: t.us for t in layer if t.equal or not bits} for layer in able]
            shared = set.intersection(*(set(layer) for layer in layers))
            score = {tile: sum(layer[tile] / min(layer.values()) for layer in layers) for tile in shared}
            if score:
                chosen.append((n, min(score, key=lambda tile: score[tile])))
        kept = [(n, tile) for i, (n, tile) in enumerate(chosen) if i == 0 or tile != chosen[i - 1][1]]
        limits = [0, *(n for n, _ in kept[1:])]
        limit = 16 if m <= 16 else m
        rows += [(limit, least, tile) for least, (_, tile) in sorted(zip(limits, kept, strict=True), reverse=True)]
    return rows


def source(tile: Tile | None) -> str:
    """A tile as the tables hold it."""
    if tile is None:
        return "None"
    options = f"{', tma=True' * tile.tma}{', tall=True' * tile.tall}{f', splits={tile.splits}' * (tile.splits > 1)}"
    return f"Tile({tile.m}, {tile.n}, {tile.k}, {tile.warps}, {tile.stages}{options})"


def report(kind: str, layer: Layer, plain: float, speed: float, args: argparse.Namespace) -> tuple[list[Timed], str]:
    """The candidates of a layer, and a line about them."""
    ranked = timed(layer, args.repeats)
    library = next((t.us for t in ranked if t.tile is None), float("nan"))
    shown = "; ".join(map(str, ranked[: args.show]))
    kept = [t for t in ranked if t.equal]
    if kind in PROMISE_BITS and kept and kept[0] not in ranked[: args.show]:
        shown += f"; ... {kept[0]}"
    return ranked, f"floor {layer.moved / speed * 1e6:.1f} bf16 {plain:.1f} library {library:.1f} | {shown}"


def measure(args: argparse.Namespace, until: float) -> dict[str, dict[tuple[int, int], list[list[Timed]]]]:
    """Candidates of every format, by M and N; what the time does not suffice for is left out."""
    device = torch.device(args.device)
    speed = bandwidth(device)
    print(f"{card(device)}; copy {speed / 1e12:.2f} TB/s; us a product, '=': the reference's bits", flush=True)
    found: dict[str, dict[tuple[int, int], list[list[Timed]]]] = {kind: {} for kind in args.formats}
    for m, model in itertools.product(args.rows, args.models):
        sums: dict[str, list[float]] = {kind: [0.0] * 4 for kind in args.formats}
        for name, (k, n) in MODELS[model].items():
            plain = microseconds(Layer("bf16", m, k, n, device, copies(2 * k * n)), None, args.repeats)
            for kind in args.formats:
                if time.monotonic() > until:
                    print(f"no time left for {model} {name} M {m} {kind} and what follows", flush=True)
                    return found
                layer = Layer(kind, m, k, n, device, copies(k * n // (2 if "4" in kind else 1)))
                ranked, line = report(kind, layer, plain, speed, args)
                print(f"{model} {name} M {m} {kind}: {line}", flush=True)
                found[kind].setdefault((m, n), []).append(ranked)
                best = next((t.us for t in ranked if t.equal or kind not in PROMISE_BITS), float("nan"))
                library = next((t.us for t in ranked if t.tile is None), float("nan"))
                parts = layer.moved / speed * 1e6, plain, library, best
                sums[kind] = [a + b for a, b in zip(sums[kind], parts, strict=True)]
                del layer
                torch.cuda.empty_cache()
        for kind, times in sums.items():
            parts = zip(("floor", "bf16", "library", "best"), times, strict=True)
            print(f"== {model} layer, M {m} {kind}: {' '.join(f'{what} {us:.0f}' for what, us in parts)}", flush=True)
    return found


def copies(size: int) -> int:
    """Weights of ``size`` bytes that leave the L2 cache between two uses."""
    return max(2, -(-COLD_BYTES // size))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=[*FORMATS, *EXACT])
    parser.add_argument("--rows", type=positive, nargs="+", default=[8, 64, 256])
    parser.add_argument("--models", nargs="+", default=["8B"], choices=list(MODELS))
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--show", type=at_least(0), default=5, help="candidates a line")
    parser.add_argument("--jobs", type=at_least(0), default=15, help="processes that compile; 0 for none")
    parser.add_argument("--seconds", type=duration, default=140)
    parser.add_argument("--any-bits", action="store_true", help="tables of the fastest tiles, whatever their sums")
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_part(args)
        return
    measured_device(args.device)
    started = time.monotonic()
    if args.jobs:
        compile_all(args, args.seconds * 0.55)
        print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    for kind, results in measure(args, started + args.seconds).items():
        print(f"# {kind}")
        for row in table(results, kind in PROMISE_BITS and not args.any_bits, kind in WITH_LIBRARY):
            print(f"    ({row[0]}, {row[1]}, {source(row[2])}),")


if __name__ == "__main__":
    main()
