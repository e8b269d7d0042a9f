"""Time the ways to cut the decode attention over a slot cache, against the bandwidth of a large copy.

A step's time is the median of launches on caches that take turns, more than the L2 cache holds; ``TB/s`` counts keys
and values once. ``dense`` is `lqrl.modeling.attention.decode_attention` on the dequantized cache, ``exact`` the
kernel of exact mode.

    python benchmarks/decode_attention.py --batch 8 64 256 --context 512
    python benchmarks/decode_attention.py --batch 8 64 256 --tiles 1 --splits
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics

import torch
from options import positive, scheme_name
from rows import Table
from side_by_side import bandwidth, card, measured_device

from lqrl.engines.slots import SlotCache
from lqrl.engines.triton_decode_attention import Tile, attend, tile_of
from lqrl.modeling.attention import decode_attention, live_bias
from lqrl.modeling.backbone import AttentionShape
from lqrl.quant import exact, triton_exact_attention
from lqrl.quant.kv import kv_method
from lqrl.quant.scheme import QuantScheme

COLD_BYTES = 128 * 2**20
TILES = [
    Tile(*cut)
    for cut in (
        (64, 4, 3), (64, 4, 3, 96), (32, 4, 4), (32, 4, 3), (64, 4, 4, 96), (64, 4, 2, 96), (32, 4, 5), (128, 4, 2),
        (128, 8, 3), (64, 8, 3), (32, 2, 4), (64, 2, 3), (16, 1, 4), (32, 1, 4),
    )
]  # fmt: skip


def timed(runs: list, repeats: int) -> float:
    """Median microseconds of a launch; the runs are captured one after the other and replayed."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(times[1:])


@torch.no_grad()
def measure(name: str, batch: int, table: Table, args: argparse.Namespace) -> None:
    device, heads, kv_heads, width = torch.device("cuda"), args.heads, args.kv_heads, args.width
    method = kv_method(QuantScheme.preset(name))
    shape = AttentionShape(kv_heads, width, width, width**-0.5, None)
    scales = [(torch.full((1,), 0.02), torch.full((1,), 0.02))] * 64 if method is not None else ()
    lengths = torch.linspace(args.context * (1 - args.spread), args.context * (1 + args.spread), batch).long()
    room = int(lengths.max()) + 8
    size = 2 * batch * kv_heads * room * width * (2 if method is None else 1)
    copies = max(2, -(-COLD_BYTES // size))
    cache = SlotCache([shape] * copies, torch.bfloat16, device, method, scales[:copies])
    cache.reserve(batch, room)
    for layer in range(copies):
        x = torch.randn(2, 1, kv_heads, batch * room, width, device=device, dtype=torch.bfloat16)
        at = torch.arange(batch * room, device=device)
        cache.write(layer, cache.rows(kv_heads, at // room, at % room), *x)
    q = torch.randn(batch, heads, width, device=device, dtype=torch.bfloat16)
    positions = (lengths - 1).to(device)
    read = (
        2
        * int(lengths.sum())
        * kv_heads
        * (width * (2 if method is None else 1) + 4 * (method is not None and method.per_token))
    )
    tiles = [tile_of(width, 8 if method is not None else 16), *TILES][: args.tiles]
    ways = [(tile, splits) for tile, splits in itertools.product(tiles, [None, *args.splits])]
    slots = torch.arange(batch, device=device)
    sequences = exact.Sequences(torch.stack([slots, torch.ones_like(slots), slots, positions]), 1)
    bias = live_bias(positions, room, torch.bfloat16)

    def row(way: str, runs: list) -> None:
        try:
            time = timed(runs, args.repeats)
            table.row(name, batch, way, time, read / time / 1e6, None)
        except Exception as error:  # a tile that does not fit must not end the table
            table.row(name, batch, way, None, None, f"{type(error).__name__}: {error}"[:120])

    def dense(layer: int) -> object:
        return decode_attention(q, *cache.read(layer, batch, room), bias, width**-0.5)

    def exactly(layer: int, stages: int, split: bool) -> object:
        stored = cache.stored(layer, batch, room)
        return triton_exact_attention.attention(q, *stored, sequences, width**-0.5, None, stages=stages, split=split)

    row("dense", [lambda layer=layer: dense(layer) for layer in range(copies)])
    apart = (False, True) if room > triton_exact_attention.PART else (False,)
    for stages, split in itertools.product((2, 3, 4), apart):
        run = functools.partial(exactly, stages=stages, split=split)
        row(f"exact, {stages} stages{', split' * split}", [functools.partial(run, layer) for layer in range(copies)])
    for tile, splits in ways:

        def fused(layer: int, tile: Tile = tile, splits: int | None = splits) -> object:
            return attend(q, *cache.stored(layer, batch, room), positions, width**-0.5, tile=tile, splits=splits)

        limit = f", {tile.registers} registers" if tile.registers else ""
        way = f"{tile.keys} keys, {tile.warps} warps, {tile.stages} stages{limit}, splits {splits or 'usual'}"
        row(way, [lambda layer=layer, run=fused: run(layer) for layer in range(copies)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--caches", nargs="+", type=scheme_name, default=["none", "none+kv_fp8", "none+kv_fp8_static", "none+kv_int8"]
    )
    parser.add_argument("--batch", nargs="+", type=positive, default=[8, 64, 256])
    parser.add_argument("--context", type=positive, default=512, help="mean length")
    parser.add_argument("--spread", type=float, default=0.25, help="lengths differ by this share of the mean")
    parser.add_argument("--heads", type=positive, default=32)
    parser.add_argument("--kv-heads", type=positive, default=8)
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--tiles", type=positive, default=len(TILES) + 1, help="so many, from the usual one on")
    parser.add_argument("--splits", nargs="*", type=positive, default=[1, 2, 4, 8], help="beside the usual number")
    parser.add_argument("--repeats", type=positive, default=20)
    args = parser.parse_args()
    device = measured_device()
    print(f"{card(device)}, a copy moves {bandwidth(device) / 1e12:.2f} TB/s")
    table = Table("cache", "batch", "way", "us", "TB/s", "note")
    for name in args.caches:
        for batch in args.batch:
            measure(name, batch, table, args)


if __name__ == "__main__":
    main()
