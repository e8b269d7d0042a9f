"""Time the kernel that rotates a prefill's or a step's heads and writes its keys and values into the cache.

``TB/s`` counts what must be read and written once: product, queries, keys and values. ``tiles`` are those of heads that
a program takes.

    python benchmarks/cache_write.py --tokens 256 16384 --times 1 2 4 8
"""

from __future__ import annotations

import argparse
import functools

import torch
from decode_attention import COLD_BYTES, timed
from options import positive, scheme_name
from rows import Table
from side_by_side import bandwidth, card, measured_device

from lqrl.engines.layers import Rotation
from lqrl.engines.slots import SlotCache
from lqrl.engines.triton_cache_write import rotate_and_store
from lqrl.modeling.backbone import AttentionShape
from lqrl.quant.kv import kv_method
from lqrl.quant.scheme import QuantScheme


def measure(name: str, tokens: int, table: Table, args: argparse.Namespace) -> None:
    device, heads, kv_heads, width = torch.device("cuda"), args.heads, args.kv_heads, args.width
    method, side, length = kv_method(QuantScheme.preset(name)), args.kv_heads * args.width, 256
    slots = -(-tokens // length)
    copies = max(2, -(-COLD_BYTES // (tokens * (heads + 2 * kv_heads) * width * 2)))
    scales = (torch.full((1,), 0.02, device=device), torch.full((1,), 0.02, device=device))
    shape = AttentionShape(kv_heads, width, width, width**-0.5, None)
    cache = SlotCache([shape] * copies, torch.bfloat16, device, method, [scales] * copies if method else ())
    cache.reserve(slots, length)
    product = torch.randn(copies, tokens, heads * width + 2 * side, device=device, dtype=torch.bfloat16)
    cos, sin = torch.randn(2, length, width, device=device, dtype=torch.bfloat16)
    norm = torch.randn(width, device=device, dtype=torch.bfloat16)
    at = torch.arange(tokens, device=device)
    positions, where = at % length, at // length
    moved = tokens * (2 * heads + 4 * kv_heads if method is None else 2 * heads + 3 * kv_heads) * width * 2

    def run(layer: int, times: int | None) -> object:
        parts = product[layer].split([heads * width, side, side], 1)
        rotation, views = Rotation(cos, sin, norm, norm, 1e-6), cache._views_of(layer)
        return rotate_and_store(parts, rotation, positions, where, views, method, scales, times=times)

    for times in (None, *args.times):
        runs = [functools.partial(run, layer, times) for layer in range(copies)]
        time = timed(runs, args.repeats)
        table.row(name, tokens, times or "usual", time, moved / time / 1e6)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--caches", nargs="+", type=scheme_name, default=["none", "none+kv_fp8_static", "none+kv_fp8", "none+kv_int8"]
    )
    parser.add_argument("--tokens", nargs="+", type=positive, default=[256, 16384])
    parser.add_argument("--times", nargs="*", type=positive, default=[1, 2, 4], help="tiles of a program")
    parser.add_argument("--heads", type=positive, default=32)
    parser.add_argument("--kv-heads", type=positive, default=8)
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=20)
    args = parser.parse_args()
    device = measured_device()
    print(f"{card(device)}, a copy moves {bandwidth(device) / 1e12:.2f} TB/s")
    table = Table("cache", "tokens", "tiles", "us", "TB/s")
    for name in args.caches:
        for tokens in args.tokens:
            measure(name, tokens, table, args)


if __name__ == "__main__":
    main()
