"""The Triton kernels on every GPU, against the eager torch code that is their oracle."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lqrl.doctor.machine import dotted
from lqrl.doctor.native import COMPILER
from lqrl.doctor.report import Row, Section, WrongResultError, attempt
from lqrl.doctor.row_kernels import check_near, check_row_kernels
from lqrl.engines.copy import Copy
from lqrl.engines.digest import tensor_digest
from lqrl.quant import numerics, triton_use
from lqrl.quant.kernels import FloatBackend
from lqrl.quant.packed import PackedWeight, as_bytes
from lqrl.quant.triton_use import TENSOR_CORES_FP8, TENSOR_CORES_INT8

_BF16 = torch.bfloat16
_FP8_ERROR = 2e-3  # tensor cores add products of fp8 in about 14 bits


def triton_section() -> Section:
    """Triton itself, then every family of kernels on every GPU."""
    found = attempt("triton", _triton)
    if found.status != "ok":
        return Section("Triton kernels", (found,))
    rows = [
        attempt(f"cuda:{index} {family}", _family, torch.device("cuda", index), family)
        for index in range(torch.cuda.device_count())
        for family in FAMILIES
    ]
    return Section("Triton kernels", (found, *rows))


def _triton(name: str) -> Row:
    if triton_use.switched_off(triton_use.VARIABLE):
        return Row(name, "missing", f"{triton_use.VARIABLE}=0", f"unset {triton_use.VARIABLE}")
    if importlib.util.find_spec(name) is None:
        return Row(name, "missing", "not installed: GPUs run eager torch code", "pip install triton")
    version = importlib.import_module(name).__version__
    facts = {"version": version}
    if not triton_use.available():
        return Row(name, "missing", f"{version} finds no C compiler for its launchers", COMPILER, facts)
    if not torch.cuda.is_available() or torch.version.cuda is None:
        gpu = f"an NVIDIA GPU of capability {dotted(TENSOR_CORES_INT8)}, {dotted(TENSOR_CORES_FP8)} for fp8"
        return Row(name, "missing", f"{version}, no NVIDIA GPU to compile for", gpu, facts)
    return Row(name, "ok", version, "", facts)


def _family(name: str, device: torch.device, family: str) -> Row:
    check, least = FAMILIES[family]
    if not triton_use.serves(device, least):
        has = dotted(torch.cuda.get_device_capability(device))
        needs = f"a GPU of capability {dotted(least)}"
        return Row(name, "missing", f"capability {has}: eager torch code runs instead", needs)
    check(device)
    return Row(name, "ok", "compiled, agrees with eager torch code")


def check_integers(device: torch.device) -> None:
    """int8 and int4 quantizers, and the int8 product."""
    from lqrl.quant import triton_int8, triton_quantize, triton_row_batch

    x, weight = _random(20, device), _random(48, device)
    codes, scale = triton_quantize.quantize_int8_rows(x, numerics.INT8_MAX, 0.0)
    _same("int8 per token", (codes, scale), numerics.quantize_int8_token(x))
    ((packed, weight_scale),) = triton_row_batch.quantize_many(
        [weight], _BF16, numerics.INT8_MAX, numerics.WEIGHT_AMAX_FLOOR
    )
    _same("int8 per channel", (packed, weight_scale), numerics.quantize_int8_channel(weight))
    int4, group_scale = numerics.quantize_int4_group(weight, 128, _BF16)
    got = triton_quantize.quantize_int4_group(weight, 128, _BF16, numerics.INT4_MAX)
    _same("int4 per group", got, (numerics.pack_int4(int4), group_scale.to(_BF16)))
    eager = FloatBackend()
    acc = eager.mm(codes, eager.pack(packed), len(packed))
    expected = acc.float().mul(weight_scale.view(1, -1)).mul(scale).to(_BF16)
    (m, k), n = codes.shape, len(packed)
    tile = triton_int8.tile_for(m, n, k)
    if tile is not None:
        product = triton_int8.gemm(codes, packed, weight_scale, scale, None, _BF16, tile)
        _same("the int8 product", (product,), (expected,))
    _same("the int8 epilogue", (triton_int8.epilogue(acc, weight_scale, scale, None, _BF16),), (expected,))


def check_fp8(device: torch.device) -> None:
    """fp8 quantizers, and the product of blocks."""
    from lqrl.quant import triton_fp8, triton_quantize

    x, weight = _random(20, device), _random(48, device)
    _same("fp8 per token", triton_quantize.quantize_fp8_rows(x), numerics.quantize_fp8_token(x))
    codes, scale = triton_quantize.quantize_fp8_group(x, 128)
    _same("fp8 per group", (codes, scale), numerics.quantize_fp8_group(x))
    blocks, block_scale = triton_quantize.quantize_fp8_block(weight)
    _same("fp8 per block", (blocks, block_scale), numerics.quantize_fp8_block(weight))
    amax = weight.abs().amax().float().reshape(1)
    _same("fp8 per tensor", triton_quantize.quantize_fp8_tensor(weight, amax), numerics.quantize_fp8_tensor(weight))
    y = triton_fp8.block_scaled(codes, scale, blocks, block_scale, torch.float32)
    values = numerics.dequantize_fp8_group(codes, scale), numerics.dequantize_fp8_block(blocks, block_scale)
    check_near("the fp8 product", y, values[0].double() @ values[1].double().T, _FP8_ERROR)
    alone = triton_fp8.block_scaled(codes[2:3], scale[2:3], blocks, block_scale, torch.float32)
    _same("a row of the fp8 product", (alone,), (y[2:3],))


def check_packed(device: torch.device) -> None:
    """Weights that are dequantized inside the product."""
    from lqrl.quant import triton_weight_only

    x, weight = _random(3, device), _random(48, device)
    int8, int8_scale = numerics.quantize_int8_channel(weight)
    int4, int4_scale = numerics.quantize_int4_group(weight, 128, _BF16)
    nvfp4, nvfp4_scale, whole = numerics.quantize_nvfp4(weight)
    mxfp4, mxfp4_scale = numerics.quantize_mxfp4(weight)
    pairs = (
        (PackedWeight("int8", int8, int8_scale), numerics.dequantize(int8, int8_scale, _BF16)),
        (
            PackedWeight("int4", as_bytes(numerics.pack_int4(int4)), int4_scale.to(_BF16)),
            numerics.dequantize_int4_group(int4, int4_scale, _BF16),
        ),
        (
            PackedWeight("nvfp4", numerics.pack_fp4(nvfp4), nvfp4_scale, whole),
            numerics.dequantize_nvfp4(nvfp4, nvfp4_scale, whole, _BF16),
        ),
        (
            PackedWeight("mxfp4", numerics.pack_fp4(mxfp4), mxfp4_scale),
            numerics.dequantize_mxfp4(mxfp4, mxfp4_scale, _BF16),
        ),
    )
    for packed, values in pairs:
        _same(f"{packed.format} values", (triton_weight_only.dequantize(packed, _BF16),), (values,))
        y = triton_weight_only.linear(x, packed, None, torch.float32)
        check_near(f"the {packed.format} product", y, x.double() @ values.double().T, 1e-4)


def check_refresh(device: torch.device) -> None:
    """Copies that count what changes, and digests."""
    from lqrl.engines import triton_copy, triton_digest

    source = _random(48, device)
    target = source.clone()
    target[3, :5] += 1
    target[4, 0] += 1
    source[7, 7] = torch.nan
    flags = torch.zeros(1, 2, dtype=torch.int64, device=device)
    triton_copy.counted_copies_([Copy(target, source, "weight", 0)], flags)
    _same("a counted copy", (target.view(torch.int16),), (source.view(torch.int16),))
    if flags.tolist() != [[7, 1]]:  # six elements and the NaN
        raise WrongResultError(f"a copy that changes 7 elements and brings a NaN counted {flags.tolist()[0]}")
    words = source.view(torch.int64).flatten()
    digest = int(triton_digest.tensor_digests([words])[0])
    expected = int(tensor_digest(words.cpu()))
    if digest != expected:
        raise WrongResultError(f"a digest is {digest:x}, on the CPU {expected:x}")


FAMILIES: dict[str, tuple[Callable[[torch.device], None], tuple[int, int]]] = {
    "int8, int4": (check_integers, TENSOR_CORES_INT8),
    "fp8": (check_fp8, TENSOR_CORES_FP8),
    "packed weights": (check_packed, TENSOR_CORES_INT8),
    "refresh": (check_refresh, TENSOR_CORES_INT8),
    "exact mode": (check_row_kernels, TENSOR_CORES_INT8),
}
"""Families of kernels: their self-test, which raises when a result is wrong, and the least capability they run on."""


def _random(rows: int, device: torch.device) -> Tensor:
    """bf16 ``[rows, 256]``."""
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(device, _BF16)


def _same(what: str, got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        if a.dtype != b.dtype or not torch.equal(a.float(), b.float()):
            different = int((a.float() != b.float()).sum())
            raise WrongResultError(f"{what}: {different} of {a.numel()} elements differ from eager torch code")
