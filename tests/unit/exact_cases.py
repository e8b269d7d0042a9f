"""Checks of exact mode's Triton kernels on any device: right, and the same bits for a row in any company and tile.

Run as a script with ``TRITON_INTERPRET=1`` they go through Triton's interpreter on the CPU, with small shapes, and
print ``{check: what went wrong}`` as JSON; `test_exact_triton.py` does that, and runs them on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from exact_draw_cases import check_draws, check_truncated_draws
from exact_inputs import randn, same
from interpreter import mend_interpreter, print_checks
from torch import Tensor
from triton_cases import packed_weights

from lqrl.quant import exact
from lqrl.quant import numerics as q
from lqrl.quant.kv import METHODS, Cached, KVCacheMethod

DTYPES = (torch.float32, torch.bfloat16)


def company(x: Tensor, run: Callable[[Tensor], Tensor], heights: tuple[int, ...], what: object) -> None:
    """Rows of ``run(x)`` are those of ``run`` on ``heights`` rows from anywhere."""
    out = run(x)
    for height in heights:
        for start in {0, (len(x) - height) // 2, len(x) - height}:
            same(run(x[start : start + height]), out[start : start + height], (what, height, start))


def check_products(device: torch.device) -> None:
    from lqrl.quant import triton_exact_gemm as t

    small = device.type == "cpu"
    tiles = [t.Tile(64, 32, 64, 4, 2), t.Tile(64, 32, 64, 4, 2, tma=True)]
    tiles = tiles if small else sorted({tile for *_, tile in t.TILES}, key=str)
    shapes = [(70, 40, 80)] if small else [(1500, 1032, 1000), (300, 4096, 4096), (130, 152, 12288), (5, 3, 7)]
    for dtype in DTYPES:
        for m, n, k in shapes:
            x, weight = randn(device, m, k, seed=m, dtype=dtype), randn(device, n, k, seed=n, dtype=dtype)
            bias = randn(device, n, dtype=dtype)
            chosen = [t.FP32_TILE] if dtype == torch.float32 else tiles
            out = t.linear(x, weight, None, torch.float32, chosen[0])
            true = x.double() @ weight.double().T
            bound = (k + 1) * 2**-23 * (x.double().abs() @ weight.double().abs().T)
            assert ((out - true).abs() <= bound).all(), (dtype, m, n, k)
            for tile in chosen:
                same(t.linear(x, weight, None, torch.float32, tile), out, (dtype, m, n, k, tile))
                same(t.linear(x, weight, None, torch.bfloat16, tile), out.bfloat16(), "rounded")
                same(t.linear(x, weight, bias, torch.bfloat16, tile), (out + bias.float()).bfloat16(), "bias")
                heights = tuple(h for h in (1, 3, 65) if h < m)
                company(x, lambda x, w=weight, s=tile: t.linear(x, w, None, torch.float32, s), heights, tile)
            if not small:
                heights = tuple(h for h in (1, 64, 65, 129, 257, 1024) if h < m)
                company(x, lambda x, w=weight: t.linear(x, w, None, torch.float32), heights, "chosen tiles")


def check_fp8_products(device: torch.device) -> None:
    from lqrl.quant import triton_exact_gemm as t

    small = device.type == "cpu"
    tiles = [t.Tile(64, 32, 128, 4, 2)] if small else sorted({tile for *_, tile in t.TILES}, key=str)
    for m, n, k in [(70, 40, 144)] if small else [(1500, 1032, 1040), (300, 4096, 4096), (130, 152, 12288)]:
        codes, scale = q.quantize_fp8_token(randn(device, m, k))
        weight, weight_scale = q.quantize_fp8_channel(randn(device, n, k, seed=1) * 0.02)
        bias = randn(device, n)
        out = t.scaled_linear(codes, scale, weight, weight_scale, None, torch.float32, tiles[0])
        true = (codes.double() * scale) @ (weight.double() * weight_scale).T
        # Tensor cores add products of fp8 in about 14 bits, cut off at every step.
        assert (out - true).norm() <= 1e-2 * true.norm(), (m, n, k, float((out - true).norm() / true.norm()))

        def run(
            rows: slice, tile: t.Tile | None, codes=codes, scale=scale, weight=weight, column=weight_scale
        ) -> Tensor:
            return t.scaled_linear(codes[rows], scale[rows], weight, column, None, torch.float32, tile)

        for tile in tiles:
            same(run(slice(None), tile), out, (m, n, k, tile))
            rounded = t.scaled_linear(codes, scale, weight, weight_scale, bias, torch.bfloat16, tile)
            same(rounded, out.bfloat16() + bias.bfloat16(), (m, n, k, tile, "bias"))
            same(run(slice(3, 4), tile), out[3:4], (m, n, k, tile, "alone"))
        for height in () if small else (1, 64, 65, 129, 257, 1024):
            same(run(slice(0, height), None), out[:height], (m, n, k, height))


def check_packed_products(device: torch.device) -> None:
    from lqrl.quant import triton_exact_gemm as t
    from lqrl.quant import triton_weight_only

    small = device.type == "cpu"
    tiles = [t.Tile(64, 32, 64, 4, 2)] if small else sorted({tile for *_, tile in t.PACKED_TILES}, key=str)
    for m, n, k in [(5, 24, 256)] if small else [(1, 4096, 4096), (300, 392, 12288), (64, 1040, 1280)]:
        x, bias = randn(device, m, k, dtype=torch.bfloat16), randn(device, n, dtype=torch.bfloat16)
        for packed, _ in packed_weights(device, n, k):
            weight = triton_weight_only.dequantize(packed, torch.bfloat16)
            plain = t.Tile(64, 32, 128, 4, 2) if small else None
            for added, dtype in ((None, torch.float32), (bias, torch.bfloat16)):
                wanted = t.linear(x, weight, added, dtype, plain)
                for tile in tiles:
                    same(t.packed_linear(x, packed, added, dtype, tile), wanted, (packed.format, m, n, k, tile))


def attention_cases(device: torch.device) -> Iterator[tuple[list[int], tuple[int, int], int, int, int | None]]:
    """Lengths, heads and key heads, widths of keys and values, window."""
    small = device.type == "cpu"
    cases = [([5, 40, 1, 70], (6, 2), 20, 12), ([66, 3], (17, 1), 16, 16)]  # of 17 heads, two tiles in fp32
    if not small:
        cases += [
            ([1, 300, 77, 64, 65, 513, 128], (32, 8), 128, 128), ([200, 3, 129], (16, 8), 64, 64),
            ([130, 90], (9, 3), 80, 80), ([150, 5], (100, 1), 96, 32), ([70, 260], (8, 1), 256, 256),
        ]  # fmt: skip
    for case in cases:
        for window in (None, 6) if small else (None, 1, 6, 100):
            yield *case, window


def operands(
    device: torch.device, lengths: list[int], heads: tuple[int, int], width: int, value_width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of whole sequences, ``[tokens, heads, width]``."""
    shapes = [(heads[0], width), (heads[1], width), (heads[1], value_width)]
    query, key, value = (randn(device, sum(lengths), *s, dtype=dtype, seed=i) for i, s in enumerate(shapes))
    return query, key, value


def in_slots(rows: Tensor, lengths: list[int], dead: float) -> Tensor:
    """``[tokens, Hkv, D]`` as a cache ``[slots, Hkv, L, D]`` that holds ``dead`` behind the end of every slot."""
    shape = len(lengths), rows.shape[1], max(lengths) + 7, rows.shape[2]
    cache = torch.full(shape, dead, dtype=rows.dtype, device=rows.device)
    for slot, sequence in zip(cache, rows.split(lengths), strict=True):
        slot[:, : len(sequence)] = sequence.transpose(0, 1)
    return cache


def decode_steps(device: torch.device, lengths: list[int]) -> Iterator[tuple[Tensor, exact.Sequences]]:
    """Rows of the queries, and the sequences: one query for each slot that has not ended."""
    counts, longest = torch.tensor(lengths, device=device), max(lengths)
    starts = counts.cumsum(0) - counts
    for step in sorted({0, 1, longest // 2, longest - 1} if longest > 80 or device.type == "cpu" else range(longest)):
        slot = (counts > step).nonzero()[:, 0]
        row = torch.arange(len(slot), device=device)
        table = torch.stack([row, torch.ones_like(slot), slot, torch.full_like(slot, step)])
        yield starts[slot] + step, exact.Sequences(table, 1)


def check_attention(device: torch.device) -> None:
    for case in attention_cases(device):
        for dtype in DTYPES:
            _attention_case(device, *case, dtype)


def _attention_case(
    device: torch.device, lengths: list[int], heads: tuple[int, int], width: int, value_width: int,
    window: int | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Whole sequences against float64, and steps of decoding against them, from a cache with NaN behind the end."""
    from lqrl.quant.triton_exact_attention import attention

    scaling, what, start = width**-0.5, (lengths, heads, width, dtype, window), 0
    query, key, value = operands(device, lengths, heads, width, value_width, dtype)
    whole = exact.packed_sequences(lengths, device)
    out = attention(query, key, value, whole, scaling, window)
    for n in lengths:
        rows = slice(start, start + n)
        distance = torch.arange(n, device=device)[:, None] - torch.arange(n, device=device)
        mask = (distance >= 0) & (distance < (window or n))
        full = (t[rows].transpose(0, 1)[None].double() for t in (query, key, value))
        true = F.scaled_dot_product_attention(*full, attn_mask=mask, scale=scaling, enable_gqa=True)[0].transpose(0, 1)
        assert (out[rows] - true).abs().max() < (5e-6 if dtype == torch.float32 else 3e-2), what
        alone = exact.packed_sequences([n], device)
        same(attention(query[rows], key[rows], value[rows], alone, scaling, window), out[rows], (what, "alone"))
        start += n
    keys, values = (in_slots(x, lengths, torch.nan) for x in (key, value))
    for rows, where in decode_steps(device, lengths):
        same(attention(query[rows], keys, values, where, scaling, window), out[rows], (what, "decode", where))


def check_parts(device: torch.device) -> None:
    """Sums that begin anew: right, and the same bits from one program or several, from any end of the cache."""
    for case in attention_cases(device):
        for dtype in DTYPES:
            for part in (64,) if device.type == "cpu" else (64, 256):
                _parts_case(device, *case, dtype, part)


def _parts_case(
    device: torch.device, lengths: list[int], heads: tuple[int, int], width: int, value_width: int,
    window: int | None, dtype: torch.dtype, part: int,
) -> None:  # fmt: skip
    from lqrl.quant.triton_exact_attention import attention

    scaling, what = width**-0.5, (lengths, heads, width, dtype, window, part)
    query, key, value = operands(device, lengths, heads, width, value_width, dtype)
    whole = exact.packed_sequences(lengths, device)
    out = attention(query, key, value, whole, scaling, window, part=part)
    once = attention(query, key, value, whole, scaling, window)
    assert (out - once).abs().max() < (5e-6 if dtype == torch.float32 else 3e-2), what
    if max(lengths) <= part:
        same(out, once, (what, "one part"))
    same(attention(query, key, value, whole._replace(keys=None), scaling, window, part=part), out, (what, "unknown"))
    keys, values = (in_slots(x, lengths, torch.nan) for x in (key, value))
    for rows, where in decode_steps(device, lengths):
        for split in (False, True):
            step = attention(query[rows], keys, values, where, scaling, window, part=part, split=split)
            same(step, out[rows], (what, "decode", split, where))


def check_cached_attention(device: torch.device) -> None:
    for case in list(attention_cases(device))[: 1 if device.type == "cpu" else None]:
        for dtype in DTYPES:
            for method in METHODS.values():
                _cached_case(device, *case, dtype, method)


def _cached_case(
    device: torch.device, lengths: list[int], heads: tuple[int, int], width: int, value_width: int,
    window: int | None, dtype: torch.dtype, method: KVCacheMethod,
) -> None:  # fmt: skip
    """Codes and scales against the values they stand for, whole sequences and steps of decoding."""
    from lqrl.quant.triton_exact_attention import attention

    scaling, what = width**-0.5, (lengths, heads, width, dtype, window, method)
    query, *pair = operands(device, lengths, heads, width, value_width, dtype)
    scales = torch.tensor([0.0061, 0.0073], device=device).split(1)  # some values saturate
    key, value = (method.quantize(x, scale) for x, scale in zip(pair, scales, strict=True))
    whole = exact.packed_sequences(lengths, device)
    out = attention(query, key.values(dtype), value.values(dtype), whole, scaling, window)
    same(attention(query, key, value, whole, scaling, window), out, (what, "whole"))

    def cached(x: Cached) -> Cached:
        codes = in_slots(x.codes.view(torch.uint8), lengths, 0x7F).view(method.code_dtype)
        return Cached(codes, in_slots(x.scale, lengths, torch.nan) if method.per_token else x.scale)

    keys, values = cached(key), cached(value)
    for rows, where in decode_steps(device, lengths):
        same(attention(query[rows], keys, values, where, scaling, window), out[rows], (what, "decode", where))


def check_norms(device: torch.device) -> None:
    from lqrl.quant import triton_exact_rows as t

    for dtype in DTYPES:
        for width in (1, 7, 16, 577) if device.type == "cpu" else (1, 7, 64, 128, 577, 1024, 4096, 12288):
            x, weight = randn(device, 33, width, dtype=dtype) * 3, randn(device, width, seed=1, dtype=dtype)
            out, inverse = t.rms_norm(x, weight, 1e-6)
            factor = 1 / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            assert torch.allclose(inverse.double(), factor, rtol=1e-6), (dtype, width)
            close = 1e-2 if dtype == torch.bfloat16 else 1e-6
            assert torch.allclose(out.double(), x.double() * factor * weight.double(), rtol=close, atol=1e-7), (
                dtype,
                width,
            )
            company(x, lambda x, w=weight: t.rms_norm(x.contiguous(), w, 1e-6)[0], (1, 2, 31), (dtype, width))


def check_together(device: torch.device) -> None:
    """A sum and its norm, SiLU and the product after it: the bits of one after the other."""
    from lqrl.quant import triton_exact_rows as t

    generator = torch.Generator().manual_seed(3)
    for dtype in DTYPES:
        for rows, width in ((3, 40), (5, 128), (1, 576)):
            made = [torch.randn(rows, width, generator=generator).to(dtype).to(device) for _ in range(2)]
            x, delta, weight = made[0] * 30, made[1], torch.rand(width, generator=generator).to(dtype).to(device)
            total, normed = t.add_rms_norm(x, delta, weight, 1e-6)
            same(total, rounded_sum(x, delta), (dtype, width))
            same(normed, t.rms_norm(total, weight, 1e-6)[0], (dtype, width))
            side_by_side = torch.cat(made, 1)  # as a product of several layers leaves them
            gate, up = side_by_side.split(width, 1)
            wanted = rounded_product(t.silu(gate.contiguous()), up)
            same(t.silu_mul(gate, up), wanted, (dtype, width))


def rounded_sum(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() + b.float()).to(a.dtype)


def rounded_product(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() * b.float()).to(a.dtype)


def check_silu(device: torch.device) -> None:
    from lqrl.quant import triton_exact_rows as t

    for dtype in DTYPES:
        x = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0])]).to(dtype).to(device)
        out = t.silu(x)
        true = x.double() / (1 + (-x.double()).exp())
        live = true.abs() > 1e-35  # exp(86.6) and above: the result is as small as that, or 0
        # The exponent is rounded before it is raised, so the error grows with it.
        spacing = torch.finfo(dtype).eps * true.abs() * (2 + x.double().abs() * (dtype == torch.float32))
        assert ((out.double() - true).abs() <= spacing)[live].all()
        for start in (13, 77, 4000):
            same(t.silu(x[start:].clone()), out[start:], start)
        extremes = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype, device=device)
        assert t.silu(extremes).isnan().tolist() == [False, True, True]


CHECKS: dict[str, Callable[[torch.device], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_products,
        check_fp8_products,
        check_packed_products,
        check_attention,
        check_parts,
        check_cached_attention,
        check_norms,
        check_silu,
        check_together,
        check_draws,
        check_truncated_draws,
    )
}


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, of overflows in exponentials
    mend_interpreter()
    print_checks(CHECKS)


if __name__ == "__main__":
    main()
