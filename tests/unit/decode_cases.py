"""Checks of the Triton kernels of decode steps against what they stand for, on any device.

Run as a script with ``TRITON_INTERPRET=1`` they go through Triton's interpreter on the CPU, with small shapes, and
print ``{check: what went wrong}`` as JSON; `test_decode_triton.py` does that, and runs them on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from interpreter import print_checks
from torch import Tensor
from triton_cases import DTYPES, INF, NAN, packed_weights, same

from lqrl.engines.sampling import sample_eager
from lqrl.quant import kernels
from lqrl.quant import numerics as q
from lqrl.types import SamplingParams


def streams(device: torch.device, m: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two summands of uneven rows, among them zeros, NaN and inf, and a norm's weight."""
    generator = torch.Generator().manual_seed(width)
    x, delta = (torch.randn(m, width, generator=generator) for _ in range(2))
    x *= torch.tensor([1e-3, 0.02, 1.0, 40.0]).repeat(m // 4 + 1)[:m, None]
    x[1], delta[1] = 0.0, 0.0
    x[2, width - 1], x[3, 0] = NAN, -INF
    weight = torch.rand(width, generator=generator) + 0.5
    return x.to(dtype).to(device), delta.to(dtype).to(device), weight.to(dtype).to(device)


def check_norm_quantize(device: torch.device) -> None:
    from lqrl.quant import triton_exact_rows, triton_quantize
    from lqrl.quant import triton_norm_quantize as t

    shapes = [(5, 40), (9, 24)]
    if device.type == "cuda":
        shapes = [(m, width) for width in (1024, 4096, 5120, 896, 100) for m in (8, 257)]
    for dtype in DTYPES:
        for m, width in shapes:
            x, delta, weight = streams(device, m, width, dtype)
            total, normed = triton_exact_rows.add_rms_norm(x, delta, weight, 1e-6)
            alone, _ = triton_exact_rows.rms_norm(x, weight, 1e-6)
            int8 = triton_quantize.quantize_int8_rows(normed, 127.0, 0.0)
            same(t.add_rms_norm(x, delta, weight, 1e-6, "int8"), (total, *int8), f"int8 {dtype} {m} {width}")
            fp8 = triton_quantize.quantize_fp8_rows(normed)
            same(t.add_rms_norm(x, delta, weight, 1e-6, "fp8_e4m3"), (total, *fp8), f"fp8 {dtype} {m} {width}")
            fp8 = triton_quantize.quantize_fp8_rows(alone)
            same(t.add_rms_norm(x, None, weight, 1e-6, "fp8_e4m3"), (x, *fp8), f"no sum {dtype} {m} {width}")


def check_silu_quantize(device: torch.device) -> None:
    from lqrl.quant import triton_exact_rows, triton_quantize
    from lqrl.quant import triton_norm_quantize as t

    shapes = [(5, 96, 4), (5, 2500, 4), (5, 9728, 1), (5, 20000, 4)]  # one part, three, and more than are held
    if device.type == "cuda":
        shapes = [(m, width, 4) for width in (12288, 3072, 896, 20000, 100) for m in (8, 257)] + [(8, 9728, 1)]
    for dtype in DTYPES:
        for m, width, held in shapes:
            gate, up, _ = streams(device, m, width, dtype)
            up[m - 1, 0] = INF
            halves = torch.cat([gate, up], 1).split(width, 1)
            gated = triton_exact_rows.silu_mul(gate, up)
            for a, b in ((gate, up), halves, (gate[:1], up[:1])):
                int8 = triton_quantize.quantize_int8_rows(gated[: len(a)], 127.0, 0.0)
                same(t.silu_mul(a, b, "int8", held), int8, f"int8 {dtype} {len(a)} {width}")
                fp8 = triton_quantize.quantize_fp8_rows(gated[: len(a)])
                same(t.silu_mul(a, b, "fp8_e4m3", held), fp8, f"fp8 {dtype} {len(a)} {width}")


def check_scaled_gemm(device: torch.device) -> None:
    """int8: the bits of the exact sum; e4m3: the bits of one chain for every tile that is not split."""
    from lqrl.quant import triton_scaled as t
    from lqrl.quant.triton_tiles import Tile

    small = device.type == "cpu"
    shapes = [(5, 40, 96), (17, 24, 64)] if small else [(8, 4096, 4096), (61, 6144, 4096), (256, 4096, 12288)]
    step = 32 if small else 256
    tiles = [Tile(16, 64, step, 4, 3, tall=True), Tile(64, 64, step // 2, 4, 3, tall=True), Tile(64, 64, step, 4, 3)]
    for m, n, k in shapes:
        x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
        bias = torch.randn(n, device=device)
        codes, token = q.quantize_int8_token(x)
        weight, scale = q.quantize_int8_channel(w)
        eager = kernels.FloatBackend()
        acc = eager.mm(codes, eager.pack(weight), n)
        out = acc.float().mul(scale.view(1, -1)).mul(token).bfloat16() + bias.bfloat16()
        for tile in tiles:
            for splits in (1, 2, 3):
                cut = Tile(tile.m, tile.n, tile.k, tile.warps, tile.stages, tall=tile.tall, splits=splits)
                same((t.gemm(codes, weight, scale, token, bias, torch.bfloat16, cut),), (out,), f"{m} {n} {k} {cut}")
        codes, token = q.quantize_fp8_token(x)
        weight, scale = q.quantize_fp8_channel(w)
        true = (codes.double() * token) @ (weight.double() * scale).T
        chain = t.gemm(codes, weight, scale, token, None, torch.float32, tiles[-1])
        assert (chain - true).norm() <= 1e-2 * true.norm(), "fp8"
        for tile in tiles:
            got = t.gemm(codes, weight, scale, token, None, torch.float32, tile)
            if small:  # the interpreter adds in fp32, in the order of numpy
                torch.testing.assert_close(got, chain)
            else:
                same((got,), (chain,), f"fp8 {m} {n} {k} {tile}")
        cut = Tile(16, 64, step, 4, 3, tall=True, splits=2)
        split = t.gemm(codes, weight, scale, token, None, torch.float32, cut)
        assert (split - true).norm() <= 1e-2 * true.norm(), "fp8, split"


def check_word_values(device: torch.device) -> None:
    """Products with single inputs show each value of a packed weight, as the product sees it."""
    from lqrl.quant import triton_weight_only as t
    from lqrl.quant.triton_tiles import Tile

    n, k = (20, 128) if device.type == "cpu" else (300, 1024)
    x = torch.eye(k, device=device, dtype=torch.bfloat16)
    for packed, eager in packed_weights(device, n, k):
        for tile in (Tile(64, 64, 64, 4, 2, tall=True), Tile(64, 64, 128, 4, 3, tall=True, splits=4)):
            for some in (x, x[-9:]):  # inputs are reordered once, or by every tile
                got = t.linear(some, packed, None, torch.bfloat16, tile)
                same((got,), (eager(torch.bfloat16).T[-len(some) :] + 0.0,), packed.format)  # a sum is no -0


def check_packed_tables(device: torch.device) -> None:
    """Every tile of the tables, at the size of its rows: the same bits each time, and near the dequantized product."""
    from lqrl.quant import triton_weight_only as t

    small = device.type == "cpu"
    k, repeats = (128, 1) if small else (4096, 10)
    widths = (24,) if small else (24576, 6144, 20)
    for packed, eager in (case for n in widths for case in packed_weights(device, n, k)):
        n = packed.shape[0]
        for m in (3, 20) if small else (8, 16, 63, 100, 256):
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(device, torch.bfloat16)
            wanted = x.double() @ eager(torch.bfloat16).double().T
            first = t.linear(x, packed, None, torch.float32)
            where = f"{packed.format} {m} {n} {t.tile_for(packed.format, m, n)}"
            assert (first - wanted).norm() <= 1e-4 * wanted.norm(), where
            for _ in range(repeats):
                same((t.linear(x, packed, None, torch.float32),), (first,), where)


def check_draw(device: torch.device) -> None:
    """Tokens and log-probs of the eager code; a uniform at the boundary of two tokens may take either."""
    from lqrl.engines import triton_draw as t

    small = device.type == "cpu"
    for vocabulary in (7, 1024, 5000) if small else (7, 1024, 5000, 151936):
        rows = 40 if small else 256
        generator = torch.Generator().manual_seed(vocabulary)
        logits = torch.randn(rows, vocabulary, generator=generator) * torch.linspace(0.1, 8, rows)[:, None]
        logits[1, 1:], logits[2, : vocabulary // 2] = -INF, -INF
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
        uniform[:6] = torch.tensor([0.5, 1 - 2.0**-53, 0.0, 0.0, 1 - 2.0**-53, 0.25], dtype=torch.float64)
        logits, uniform = logits.to(device), uniform.to(device)
        for temperature in (1.0, 0.7):
            params = SamplingParams(temperature=temperature)
            tokens, logprobs = t.draw(logits, uniform, temperature)
            wanted = sample_eager(logits, uniform, params)
            apart = tokens != wanted.tokens
            weights = (logits.double() / temperature).softmax(1)
            mass = weights.cumsum(1).gather(1, torch.minimum(tokens, wanted.tokens)[:, None]).squeeze(1)
            assert (mass - uniform).abs()[apart].le(1e-6).all(), (vocabulary, temperature, int(apart.sum()))
            assert (weights.gather(1, tokens[:, None]) > 0).all()
            true = (logits.double() / temperature).log_softmax(1).gather(1, tokens[:, None]).squeeze(1)
            torch.testing.assert_close(logprobs.double(), true, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(logprobs[~apart], wanted.logprobs[~apart], rtol=1e-6, atol=1e-6)
            again = t.draw(logits[3:5].contiguous(), uniform[3:5], temperature)
            same(again, (tokens[3:5], logprobs[3:5]), "company")
        greedy, wanted = t.draw(logits, None, 1.0), sample_eager(logits, None, SamplingParams(temperature=0))
        assert torch.equal(greedy[0], logits.argmax(1))
        torch.testing.assert_close(greedy[1], wanted.logprobs, rtol=0, atol=1e-6)
        logits[0, vocabulary - 1], logits[3, 0] = NAN, INF
        tokens, logprobs = t.draw(logits, uniform, 1.0)
        assert logprobs[[0, 3]].isnan().all()
        assert not logprobs[[2, *range(4, rows)]].isnan().any()
        assert ((tokens >= 0) & (tokens < vocabulary)).all()


CHECKS: dict[str, Callable[[torch.device], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_norm_quantize,
        check_silu_quantize,
        check_scaled_gemm,
        check_word_values,
        check_packed_tables,
        check_draw,
    )
}


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, of divisions by zero
    print_checks(CHECKS)


if __name__ == "__main__":
    main()
