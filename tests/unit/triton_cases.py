"""Checks of the Triton kernels against eager torch, on any device.

Run as a script with ``TRITON_INTERPRET=1`` they go through Triton's interpreter on the CPU, with small shapes, and
print ``{check: what went wrong}`` as JSON; `test_quant_triton.py` does that, and runs them on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from interpreter import print_checks
from torch import Tensor

from lqrl.engines import copy as eager_copy
from lqrl.engines import digest as eager_digest
from lqrl.quant import fp8_gemm, kernels
from lqrl.quant import numerics as q
from lqrl.quant.numerics.fp8 import FP8_SCALE_FLOOR
from lqrl.quant.packed import PackedWeight, as_bytes

DTYPES = (torch.float32, torch.bfloat16)
_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
NAN, INF = float("nan"), float("inf")


def same(got: Iterable[Tensor], wanted: Iterable[Tensor], what: str = "") -> None:
    """Equal shapes, dtypes and bits; every NaN is one NaN."""
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (what, a.shape, a.dtype, b.shape, b.dtype)
        if a.is_floating_point():
            a, b = (torch.where(t.float().isnan(), NAN, t.float()).contiguous().view(torch.int32) for t in (a, b))
        assert torch.equal(a, b), (what, int((a != b).sum()), "elements differ")


def rows(device: torch.device, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of four magnitudes, then: zeros, subnormals, one huge value, NaN, -inf, 1e-38."""
    m = 1000 if device.type == "cuda" else 10
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x *= torch.tensor([1e-3, 0.02, 1.0, 40.0]).repeat(m // 4 + 1)[:m, None]
    x[4], x[5], x[6, 0], x[7, k - 1], x[8, 1], x[9] = 0.0, 1e-42, 3e30, NAN, -INF, 1e-38
    return x.to(dtype).to(device)


def check_rows(device: torch.device) -> None:
    from lqrl.quant import triton_quantize as t

    for dtype in DTYPES:
        for k in (40,) if device.type == "cpu" else (1, 40, 4096, 12288, 33000):
            x = rows(device, k + 3, dtype)[:, :k] if k > 1 else rows(device, 2, dtype)[:, :1]
            same(t.quantize_int8_rows(x, 127.0, 0.0), q.quantize_int8_token(x), f"int8 token {dtype} {k}")
            same(t.quantize_int8_rows(x, 7.0, 1e-30, 16), q.quantize_int8_channel(x, 7.0), f"in parts {dtype} {k}")
            same(t.quantize_fp8_rows(x), q.quantize_fp8_token(x), f"fp8 token {dtype} {k}")
            same(t.quantize_fp8_rows(x, 16), q.quantize_fp8_token(x), f"fp8 in parts {dtype} {k}")
    x = rows(device, 40, torch.float32)
    same(t.quantize_int8_rows(x[:0], 127.0, 0.0), q.quantize_int8_token(x[:0]), "no rows")
    same(t.quantize_fp8_rows(x.view(2, -1, 40)), q.quantize_fp8_token(x.view(2, -1, 40)), "three dimensions")
    same(t.quantize_fp8_rows(x.t()), q.quantize_fp8_token(x.t()), "transposed")


def check_many_rows(device: torch.device) -> None:
    from lqrl.quant import triton_row_batch as t

    small = device.type == "cpu"
    narrow, wide = (40, 48) if small else (4096, 12288)
    shapes = [(10, narrow), (2, wide), (1, narrow), (0, narrow)]
    if not small:
        shapes += [(900, wide)] + [(3, narrow)] * 150
    for dtype in DTYPES:
        weights = [rows(device, k, dtype, seed)[:n] for seed, (n, k) in enumerate(shapes)]
        flat = torch.randn(2 * narrow + 1, generator=torch.Generator().manual_seed(9)).to(dtype).to(device)
        weights.append(flat[1:].view(2, narrow))  # an address that is no multiple of 16
        weights.append(rows(device, narrow + 3, dtype)[:2, :narrow])
        for export in DTYPES:
            if small and dtype == torch.bfloat16 and export == torch.float32:
                continue
            wanted = [w.to(export) for w in weights]
            split = {"widest": 16, "together": 2} if dtype == export else {}
            got = t.quantize_many(weights, export, 127.0, q.WEIGHT_AMAX_FLOOR, **split)
            for pair, weight in zip(got, wanted, strict=True):
                same(pair, q.quantize_int8_channel(weight), f"int8 {dtype} {export} {tuple(weight.shape)}")
            got = t.quantize_many(weights, export, None, FP8_SCALE_FLOOR, **split)
            for pair, weight in zip(got, wanted, strict=True):
                same(pair, q.quantize_fp8_channel(weight), f"fp8 {dtype} {export} {tuple(weight.shape)}")


def check_groups_and_blocks(device: torch.device) -> None:
    from lqrl.quant import triton_quantize as t

    for dtype in DTYPES:
        x = rows(device, 160, dtype)
        same(t.quantize_fp8_group(x, 128), q.quantize_fp8_group(x), f"group {dtype}")
        same(t.quantize_fp8_block(x), q.quantize_fp8_block(x), f"block {dtype}")
        clean = x[:4] if device.type == "cpu" else torch.cat([x[:4], x[10:]])
        same(t.quantize_fp8_block(clean), q.quantize_fp8_block(clean), f"block {dtype}")
        for size in (32, 128):
            y = x[:, :128]
            codes, scale = q.quantize_int4_group(y, size, dtype)
            same(t.quantize_int4_group(y, size, dtype, 7.0), (q.pack_int4(codes), scale.to(dtype)), f"int4 {dtype}")


def check_largest_numbers(device: torch.device) -> None:
    from lqrl.quant import triton_quantize, triton_row_batch

    for dtype in DTYPES:
        x = rows(device, 40, dtype)[:4]
        words = torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(_WORDS[dtype])
        for row in range(4):
            x[row, row] = (words - row).view(dtype)
        wanted = q.quantize_int8_channel(x)
        assert q.dequantize(*wanted, dtype).isfinite().all()
        same(triton_quantize.quantize_int8_rows(x, 127.0, q.WEIGHT_AMAX_FLOOR), wanted, f"int8 {dtype}")
        same(triton_row_batch.quantize_many([x], dtype, 127.0, q.WEIGHT_AMAX_FLOOR)[0], wanted, f"together {dtype}")
        codes, scale = q.quantize_int4_group(x, 8, dtype)
        assert q.dequantize_int4_group(codes, scale, dtype).isfinite().all()
        got = triton_quantize.quantize_int4_group(x, 8, dtype, 7.0)
        same(got, (q.pack_int4(codes), scale.to(dtype)), f"int4 {dtype}")


def check_tensor(device: torch.device) -> None:
    from lqrl.quant import rows as dispatch
    from lqrl.quant import triton_quantize as t

    for dtype in DTYPES:
        x = rows(device, 40, dtype)
        for y in (x[:6], x[:7], x, x[4:5]):
            amax = dispatch.tensor_amax(y)
            same((amax,), (q.shared_amax([y]),), "amax")
            same(t.quantize_fp8_tensor(y, amax), q.quantize_fp8_tensor(y), f"{dtype}")
        given = torch.tensor([3.0], device=device)
        same(t.quantize_fp8_tensor(x, given), q.quantize_fp8_tensor(x, given), f"{dtype} saturates")


def check_int8_gemm(device: torch.device) -> None:
    from lqrl.quant import triton_int8 as t

    eager = kernels.FloatBackend()
    tiles = [t.Tile(16, 16, 32, 4, 3), t.Tile(16, 16, 32, 4, 3, tma=True)]
    shapes = [(17, 16, 64), (5, 20, 33)]
    if device.type == "cuda":
        tiles = sorted({tile for *_, tile in t.TILES if tile is not None}, key=str)
        shapes += [(1, 4096, 4096), (300, 1032, 1040), (1500, 640, 4096)]
    for dtype in DTYPES:
        for m, n, k in shapes:
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).to(device)
            x[0, k - 1] = NAN
            codes, scale = q.quantize_int8_channel(torch.randn(n, k, device=device))
            x_codes, token_scale = q.quantize_int8_token(x)
            packed = kernels.TorchBackend().pack(codes)
            for bias in (None, torch.randn(n, device=device)):
                wanted = eager.linear(x, eager.pack(codes), scale, bias)
                acc = eager.mm(x_codes, eager.pack(codes), n)
                padded = torch.nn.functional.pad(acc, (0, 3))[:, :n]
                same((t.epilogue(padded, scale, token_scale, bias, dtype),), (wanted,), "epilogue")
                for tile in tiles:
                    got = t.gemm(x_codes, packed, scale, token_scale, bias, dtype, tile)
                    same((got,), (wanted,), f"{m} {n} {k} {tile}")


def check_fp8_block_gemm(device: torch.device) -> None:
    from lqrl.quant import triton_fp8 as t

    small, tiles = [(5, 130, 144)], [t.Tile(16, 64, 128, 4, 3), t.Tile(16, 64, 128, 4, 3, tma=True)]
    if device.type == "cuda":
        small, tiles = [(5, 144, 272), (1500, 384, 4096), (40, 4096, 1040)], [tile for *_, tile in t.TILES]
    for m, n, k in small:
        codes, scale = q.quantize_fp8_group(torch.randn(m, k, device=device))
        weight, weight_scale = q.quantize_fp8_block(torch.randn(n, k, device=device) * 0.02)
        exact = q.dequantize_fp8_group(codes, scale).double() @ q.dequantize_fp8_block(weight, weight_scale).double().T
        for tile in tiles:
            got = t.block_scaled(codes, scale, weight, weight_scale, torch.float32, tile)
            # Tensor cores add products of fp8 in about 14 bits.
            torch.testing.assert_close(got.double(), exact, rtol=2e-3, atol=2e-3)
            alone = t.block_scaled(codes[1:3], scale[1:3], weight, weight_scale, torch.float32, tile)
            assert torch.equal(alone, got[1:3]), "a row depends on the others"
        if device.type == "cpu":
            eager = fp8_gemm.block_scaled(codes, scale, fp8_gemm.operand(weight), weight_scale, torch.float32)
            torch.testing.assert_close(got, eager)


def packed_weights(device: torch.device, n: int, k: int) -> list[tuple[PackedWeight, Callable[[torch.dtype], Tensor]]]:
    """Weights of each format, with what eager torch makes of them."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(3)).mul(0.02).to(device)
    weight[0], weight[1, 1], weight[2, :32] = 0.0, 3.0, 1e-30
    found: list[tuple[PackedWeight, Callable[[torch.dtype], Tensor]]] = []
    for dtype in DTYPES:
        for size in (32, 128):
            codes, scale = q.quantize_int4_group(weight.to(dtype), size, dtype)
            packed = PackedWeight("int4", as_bytes(q.pack_int4(codes)), scale.to(dtype))
            found.append((packed, lambda d, c=codes, s=scale: q.dequantize_int4_group(c, s, d)))
    codes, scale, whole = q.quantize_nvfp4(weight)
    nvfp4 = PackedWeight("nvfp4", q.pack_fp4(codes), scale, whole)
    found.append((nvfp4, lambda d, c=codes, s=scale: q.dequantize_nvfp4(c, s, whole, d)))
    codes, scale = q.quantize_mxfp4(weight)
    found.append(
        (PackedWeight("mxfp4", q.pack_fp4(codes), scale), lambda d, c=codes, s=scale: q.dequantize_mxfp4(c, s, d))
    )
    codes, scale = q.quantize_int8_channel(weight)
    found.append((PackedWeight("int8", codes, scale), lambda d, c=codes, s=scale: q.dequantize(c, s, d)))
    return found


def check_dequantize(device: torch.device) -> None:
    from lqrl.quant import triton_weight_only as t

    for packed, eager in packed_weights(device, 20, 256):
        for dtype in DTYPES:
            same((t.dequantize(packed, dtype),), (eager(dtype),), packed.format)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    codes, scales = every.expand(16, 256).contiguous(), every.view(16, 16)  # every pair of codes, every scale
    same(
        (t.dequantize(PackedWeight("mxfp4", codes, scales), torch.float32),),
        (q.dequantize_mxfp4(q.unpack_fp4(codes), scales),),
        "e8m0",
    )
    fp8, whole = scales.repeat_interleave(2, 1).view(torch.float8_e4m3fn), torch.tensor([3.0], device=device)
    same(
        (t.dequantize(PackedWeight("nvfp4", codes, fp8, whole), torch.float32),),
        (q.dequantize_nvfp4(q.unpack_fp4(codes), fp8, whole),),
        "e4m3",
    )


def check_fused_weight_only(device: torch.device) -> None:
    from lqrl.quant import triton_weight_only as t

    small = device.type == "cpu"
    shapes, tiles = [(3, 24, 384)], [t.Tile(16, 16, 256, 4, 3, tall=True, splits=splits) for splits in (1, 2)]
    if not small:
        shapes, tiles = (
            [(1, 4096, 4096), (40, 384, 12288), (64, 1040, 1408)],
            sorted({e[-1] for rows in t.TILES.values() for e in rows}, key=str),
        )
    for m, n, k in shapes:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16().to(device)
        bias = torch.randn(n, device=device)
        for packed, eager in packed_weights(device, n, k):
            weight = eager(torch.bfloat16).double()
            for tile in tiles:
                got = t.linear(x, packed, None, torch.float32, tile)
                torch.testing.assert_close(got.double(), x.double() @ weight.T, rtol=1e-4, atol=1e-4)
                if small and packed.format != "int4":
                    break  # one format shows what is common
                rounded = got.bfloat16()
                same((t.linear(x, packed, None, torch.bfloat16, tile),), (rounded,), packed.format)
                same((t.linear(x, packed, bias, torch.bfloat16, tile),), (rounded + bias.bfloat16(),), "bias")


def check_copy(device: torch.device) -> None:
    from lqrl.engines import triton_copy as t

    shape = (3, 7) if device.type == "cpu" else (999, 1001)
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
    for dtype in (*floats, torch.int8, torch.int32, torch.uint8):
        for bad in (None, NAN, -INF, INF):
            if bad is not None and dtype not in floats:
                continue
            source = torch.randn(*shape).mul(50)
            source[1, 2] = 0.0 if bad is None else bad
            source = source.to(dtype).to(device)
            target = source.clone()
            target.view(torch.uint8)[0, :3] ^= 1
            for name in ("a.weight", "a.weight_scale") if dtype == torch.uint8 else ("a.weight",):
                flags = torch.zeros(2, 2, dtype=torch.int64, device=device)
                eager, fused = target.clone(), target.clone()
                version = fused._version
                bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
                flags[0, 0] = (eager.view(bits) != source.view(bits)).sum()
                flags[0, 1] = ~eager_copy.whole_scale(name, source)
                e8m0 = dtype == torch.uint8 and name.endswith("weight_scale")
                t.counted_copy_(fused, source, flags[1], e8m0=e8m0)
                same((flags[1], fused.view(torch.uint8)), (flags[0], source.view(torch.uint8)), f"{dtype} {bad} {name}")
                assert fused._version > version, "layers would not notice"


def check_copies(device: torch.device) -> None:
    from lqrl.engines import triton_copy as t

    generator = torch.Generator().manual_seed(0)
    floats = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
    dtypes = [*floats, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
    # Multiples of 16 are copied together; the others take the way of tensors that do not lie in whole words.
    sizes = [0, 5, 16] if device.type == "cpu" else [0, 1, 5, 16, 32768, 65536, 1_000_001]
    targets, copies = [], []
    for dtype in dtypes:
        for size in sizes:
            for bad in (0.0, NAN, INF, -INF) if dtype in floats and size else (0.0,):
                source = torch.randn(size, generator=generator).mul(50)
                if size:
                    source[size - 1] = bad
                source = source.to(dtype).to(device)
                target = source.clone()
                if size:
                    flips = torch.tensor([1, 0x80, 0xFF, 0, 0x7F], dtype=torch.uint8, device=device)
                    flips &= 1 if dtype == torch.bool else 0xFF
                    target.view(torch.uint8)[:5] ^= flips[: target.view(torch.uint8).numel()]
                targets.append(target)
                name = f"{len(copies)}.{'weight_scale' if size % 2 or size == 16 else 'weight'}"
                copies.append(eager_copy.Copy(target.clone(), source, name, len(copies)))
    if device.type == "cpu":
        for dtype, name in ((torch.bfloat16, "long.weight"), (torch.uint8, "long.weight_scale")):
            source = torch.randn(40_000, generator=generator).mul(50).to(dtype)  # whole stretches, and a rest
            source[33_000] = NAN if dtype == torch.bfloat16 else 255
            targets.append(torch.zeros_like(source))
            copies.append(eager_copy.Copy(targets[-1].clone(), source, name, len(copies)))
    odd = torch.randn(101, generator=generator).to(device)
    targets += [torch.zeros(100, device=device), torch.zeros(8, 12, device=device)]
    copies.append(eager_copy.Copy(targets[-2].clone(), odd[1:], "no multiple of 16", len(copies)))
    copies.append(eager_copy.Copy(targets[-1].clone(), odd[:96].view(12, 8).t(), "strided", len(copies)))
    if device.type == "cuda":
        small = [torch.randn(7, generator=generator).to(device) for _ in range(600)]
        targets += [torch.zeros_like(s) for s in small]
        copies += [eager_copy.Copy(torch.zeros_like(s), s, "many", len(copies) + i) for i, s in enumerate(small)]
    versions = [c.target._version for c in copies]
    sources = [c.source.contiguous().view(torch.uint8).clone() for c in copies]
    flags, wanted = (torch.zeros(len(copies), 2, dtype=torch.int64, device=device) for _ in range(2))
    t.counted_copies_(copies, flags)
    for copy, target, source in zip(copies, targets, sources, strict=True):
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.source.element_size()]
        wanted[copy.row, 0] = torch.count_nonzero(target.view(bits) != copy.source.contiguous().view(bits))
        wanted[copy.row, 1] = ~eager_copy.whole_scale(copy.name, copy.source)
        assert torch.equal(copy.source.contiguous().view(torch.uint8), source), copy.name
        assert torch.equal(copy.target.view(torch.uint8), source), copy.name
    assert torch.equal(flags, wanted), (flags != wanted).nonzero().tolist()
    assert all(c.target._version > v for c, v in zip(copies, versions, strict=True)), "layers would not notice"


def check_digest(device: torch.device) -> None:
    from lqrl.engines import triton_digest as t

    long = 33_001 if device.type == "cpu" else 33_000 * 300  # more than the 2**15 words that share place values
    tensors = [
        torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randint(-128, 127, (1001,), dtype=torch.int8),
        torch.randn(()), torch.empty(0), torch.randint(0, 255, (long,), dtype=torch.uint8), torch.randn(1100, 2),
    ]  # fmt: skip
    here = [x.to(device) for x in tensors]
    found = t.tensor_digests(here).tolist()
    assert found == [int(eager_digest.tensor_digest(x)) for x in tensors]
    odd = torch.arange(100, dtype=torch.int8)
    views = [odd.to(device)[1:], odd.to(device)[8:72]]
    found = t.tensor_digests(views).tolist()
    assert found == [int(eager_digest.tensor_digest(x)) for x in (odd[1:], odd[8:72])]


CHECKS: dict[str, Callable[[torch.device], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_rows,
        check_many_rows,
        check_groups_and_blocks,
        check_largest_numbers,
        check_tensor,
        check_int8_gemm,
        check_fp8_block_gemm,
        check_dequantize,
        check_fused_weight_only,
        check_copy,
        check_copies,
        check_digest,
    )
}


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, of divisions by zero
    print_checks(CHECKS)


if __name__ == "__main__":
    main()
