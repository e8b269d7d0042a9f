"""Checks of what spares launches and work around attention, on any device: new tokens of a step, last ones of a prompt.

Run as a script with ``TRITON_INTERPRET=1`` they go through Triton's interpreter on the CPU, with small shapes, and
print ``{check: what went wrong}`` as JSON; `test_new_tokens.py` does that, and runs them on a GPU.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import torch
from exact_inputs import randn
from fused_cases import DTYPES, REAL, SMALL, Shape, cache_of, engine, product_of, same, tables
from interpreter import mend_interpreter, print_checks

from lqrl.engines.fused_decoder import FusedDecoder
from lqrl.engines.slots import PrefillContext, SlotCache
from lqrl.quant.kv import METHODS, KVCacheMethod, kv_rounding


def check_tiles_of_heads(device: torch.device) -> None:
    """Programs that take several tiles of heads give the bits of those that take one."""
    from lqrl.engines.triton_cache_write import rotate_and_store

    shapes = [(9, 3, 128, 40)] if device.type == "cpu" else [SMALL[2], *REAL[:3]]
    for shape, dtype, method in itertools.product(shapes, DTYPES, [None, *METHODS.values()]):
        tokens, width, what = 7, shape[2], (shape, dtype, method)
        product, positions = product_of(device, shape, tokens, dtype), torch.arange(tokens, device=device)
        norms = [randn(device, width, seed=i, dtype=dtype) for i in (8, 9)]
        rotation = tables(device, width, 12, dtype)
        scales = (torch.tensor([0.0061], device=device), torch.tensor([0.0073], device=device))
        for turning in (rotation, rotation._replace(query_norm=norms[0], key_norm=norms[1], eps=1e-6)):
            one, some = (cache_of(device, shape, dtype, method, tokens, 12) for _ in range(2))
            out, other = (
                rotate_and_store(product, turning, positions, None, cache._views[0], method, scales, times=times)
                for cache, times in ((one, 1), (some, 3))
            )
            same(out, other, what)
            for a, b in zip(one._views[0], some._views[0], strict=True):
                same(a, b, what)


def check_new_tokens(device: torch.device) -> None:
    """Rotated, stored and attended to in one launch: the bits of two, in the cache too, which is NaN elsewhere."""
    lengths = [1, 18, 7, 1] if device.type == "cpu" else [1, 300, 77, 64, 65, 1, 513, 128, 1000, 2]
    methods, on_gpu = [None, *METHODS.values()], device.type == "cuda"
    small, real = (SMALL[1:2], (*REAL[:3], REAL[4])) if on_gpu else (SMALL[:2], ())
    cases = [*itertools.product(small, DTYPES, methods)]
    cases += itertools.product([(2, 1, 64, 64), *real], [torch.bfloat16], methods)
    for shape, dtype, method in cases:
        _new_token_case(device, shape, dtype, method, lengths)


def _new_token_case(
    device: torch.device, shape: Shape, dtype: torch.dtype, method: KVCacheMethod | None,
    lengths: list[int],
) -> None:  # fmt: skip
    from lqrl.engines import triton_decode_attention as t
    from lqrl.engines.triton_new_token import attend_new, takes_new

    heads, kv_heads, width, value_width = shape
    rows, longest = len(lengths), max(lengths)
    counts = torch.tensor(lengths, device=device)
    keys, values = (randn(device, 1, kv_heads, sum(lengths), w, seed=w, dtype=dtype) for w in (width, value_width))
    at = torch.cat([torch.arange(n, device=device) for n in lengths])
    slots = torch.arange(rows, device=device).repeat_interleave(counts)
    product = [randn(device, rows, n, seed=n + 1, dtype=dtype) for n in (heads * width, kv_heads * width)]
    product.append(randn(device, rows, kv_heads * value_width, seed=3, dtype=dtype))
    product[1][2], product[2][2] = 0.0, 3e4  # a key of zeros, values beyond a static scale
    whole = torch.cat(product, 1).split([x.shape[1] for x in product], 1)
    norms = [randn(device, width, seed=i, dtype=dtype) for i in (8, 9)]
    plain = tables(device, width, longest, dtype)
    scales = (torch.tensor([0.0061], device=device), torch.tensor([0.0073], device=device))
    for turning in (plain, plain._replace(query_norm=norms[0], key_norm=norms[1], eps=1e-6)):
        if not takes_new(heads // kv_heads, width, whole[0].element_size(), turning.query_norm is not None):
            continue
        for window, splits, tile in ((None, 1, None), (6, 2, t.Tile(16, 4, 2)), (None, 4, t.Tile(16, 4, 2))):
            caches = [cache_of(device, shape, dtype, method, rows + 2, longest + 5) for _ in range(2)]
            outs = []
            for cache, apart in zip(caches, (True, False), strict=True):
                cache.write(0, cache.rows(kv_heads, slots, at), keys, values)
                outs.append(
                    attend_new(
                        whole, turning, cache._views[0], counts - 1, width**-0.5, window, method, scales,
                        tile=tile, splits=splits, apart=apart,
                    )
                )  # fmt: skip
            what = (shape, dtype, method, window, splits, turning.query_norm is not None)
            assert outs[1].isfinite().all(), what
            same(outs[1], outs[0], what)
            for a, b in zip(caches[1]._views[0], caches[0]._views[0], strict=True):
                same(a, b, (what, "cache"))


def check_which_new_tokens_are_taken(device: torch.device) -> None:
    from lqrl.engines.triton_new_token import takes_new

    assert [takes_new(group, 128, 2, True) for group in (1, 4, 15, 16, 40)] == [True, True, True, False, False]
    assert [takes_new(4, width, 2, True) for width in (32, 64, 80, 256)] == [False, True, True, True]
    assert [takes_new(4, width, 2, False) for width in (16, 32)] == [True, True]


def check_last_tokens(device: torch.device) -> None:
    """The last layer for last tokens alone: a call's keys and values, and its hidden states; its bits in exact mode."""
    lengths = [9, 1, 4] if device.type == "cpu" else [9, 1, 40, 33]
    for name, scheme, exact in (
        ("llama", "int8_w8a8+kv_int8", False),
        ("mistral", "none+kv_fp8", True),
        ("llama", "int8_w8a8+kv_fp8_static", True),
    ):
        built = engine(name, scheme, torch.float32, device, exact=exact)
        decoder, kv = built.decoder, kv_rounding(built.decoder.model, built.spec.scheme)
        assert isinstance(decoder.lean, FusedDecoder), (name, scheme, exact)
        assert kv is not None
        shapes = [shape for _, shape in sorted(decoder.shapes.items())]
        tokens, caches, hidden = torch.arange(sum(lengths), device=device) % 50, [], []
        for alone in (False, True):
            scales = [kv.scales(layer) for layer in range(len(shapes))]
            cache = SlotCache(shapes, torch.float32, device, kv.method, scales, exact)
            cache.reserve(5, 48)
            context = PrefillContext(cache, lengths, [3, 0, 4, 1][: len(lengths)])
            run = decoder.prefill(tokens, context) if alone else decoder(tokens, context.position_ids, context)
            hidden.append(run if alone else run.index_select(0, context.last))
            caches.append(cache)
        assert hidden[1].shape == (len(lengths), built.spec.config.hidden_size)
        if exact:
            same(hidden[1], hidden[0], (name, scheme))
        torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)
        for layers in zip(*(cache._views for cache in caches), strict=True):
            for a, b in zip(*layers, strict=True):
                same(a, b, (name, scheme, exact))


CHECKS: dict[str, Callable[[torch.device], None]] = {
    check.__name__: check
    for check in (check_tiles_of_heads, check_new_tokens, check_which_new_tokens_are_taken, check_last_tokens)
}


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, of overflows
    mend_interpreter()
    print_checks(CHECKS)


if __name__ == "__main__":
    main()
