"""The Triton kernels give the bits of eager torch: interpreted on the CPU, compiled on the GPU."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreter import needs_triton
from triton_cases import CHECKS

from lqrl.quant import QuantScheme, kernels, rows, triton_use
from lqrl.quant import numerics as q
from lqrl.quant.methods import linear_method

CASES = Path(__file__).with_name("triton_cases.py")


@needs_triton
@pytest.mark.parametrize("name", list(CHECKS))
def test_interpreted_kernels_give_the_bits_of_eager_torch(name, interpreted):
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("name", list(CHECKS))
def test_compiled_kernels_give_the_bits_of_eager_torch(name):
    CHECKS[name](torch.device("cuda"))


def test_the_cpu_never_goes_to_triton():
    assert not triton_use.use_triton(torch.zeros(1))


def test_importing_the_library_does_not_import_triton():
    script = (
        "import sys, lqrl, lqrl.quant.methods, lqrl.quant.kernels, lqrl.engines.transaction, lqrl.engines.digest\n"
        "print([m for m in sys.modules if m.startswith('lqrl.') and 'triton_' in m and not m.endswith('triton_use')])"
    )
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


def test_a_machine_without_triton_says_so_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)  # what a failed import leaves
    triton_use.available.cache_clear()
    with caplog.at_level(logging.INFO, logger="lqrl.quant.triton_use"):
        assert not triton_use.available()
        assert not triton_use.available()
    triton_use.available.cache_clear()
    assert [r.message for r in caplog.records] == [
        "triton is not installed: low-bit kernels run as eager torch operations, with the same results"
    ]


def test_the_variable_turns_triton_off(monkeypatch):
    monkeypatch.setenv(triton_use.VARIABLE, "0")
    triton_use.available.cache_clear()
    assert not triton_use.available()
    triton_use.available.cache_clear()


@pytest.mark.parametrize(("value", "off"), [("0", True), ("1", False), ("", False), (None, False)])
def test_kernels_are_turned_off_by_a_zero(monkeypatch, value, off):
    for name in (triton_use.VARIABLE, "LQRL_HOPPER"):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        assert triton_use.switched_off(name) is off


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("LQRL_HOPPER", "off")
    with pytest.raises(ValueError, match="LQRL_HOPPER=off: 0 turns these kernels off, 1 or nothing leaves them on"):
        triton_use.switched_off("LQRL_HOPPER")


@pytest.mark.parametrize(("length", "size", "covering"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_tiles_cover_a_length(length, size, covering):
    assert triton_use.tiles(length, size) == covering


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_powers_of_two(n, power):
    assert triton_use.power_of_two(n) == power


def test_dispatch_gives_what_the_numerics_give(device):
    x = torch.randn(300, 256).to(device)
    pairs = [
        (rows.quantize_int8_token(x), q.quantize_int8_token(x)),
        (rows.quantize_int8_channel(x, 7.0), q.quantize_int8_channel(x, 7.0)),
        (rows.quantize_fp8_token(x), q.quantize_fp8_token(x)),
        (rows.quantize_fp8_channel(x), q.quantize_fp8_channel(x)),
        (rows.quantize_fp8_tensor(x), q.quantize_fp8_tensor(x)),
        (rows.quantize_fp8_per_tensor_dynamic(x), q.quantize_fp8_per_tensor_dynamic(x)),
        (rows.quantize_fp8_group(x), q.quantize_fp8_group(x)),
        (rows.quantize_fp8_block(x), q.quantize_fp8_block(x)),
    ]
    for got, wanted in pairs:
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))
    codes, scale = q.quantize_int4_group(x, 32)
    packed, packed_scale = rows.quantize_int4_packed(x, 32)
    assert torch.equal(packed, q.pack_int4(codes))
    assert torch.equal(packed_scale, scale)


@pytest.mark.parametrize("m", [1, 40, 300, 1100])
def test_int8_layers_have_the_bits_of_the_plain_product(m, device):
    x = torch.randn(m, 96).bfloat16().to(device)
    codes, scale = q.quantize_int8_channel(torch.randn(80, 96, device=device))
    plain = kernels.FloatBackend()
    expected = plain.linear(x, plain.pack(codes), scale, None)
    backend = kernels.TorchBackend()
    assert torch.equal(backend.linear(x, backend.pack(codes), scale, None), expected)


@pytest.mark.parametrize("name", ["int4_w4a16", "int4_w4a16_g32", "nvfp4_w4a16", "mxfp4_w4a16", "int8_w8a16"])
@pytest.mark.parametrize("m", [3, 200])
def test_weight_only_layers_multiply_the_dequantized_weight(name, m, device):
    method = linear_method(QuantScheme.preset(name))
    tensors = method.quantize(torch.randn(96, 256, device=device).bfloat16())
    operands = method.operands(tensors, torch.bfloat16)
    if device.type == "cuda" and triton_use.available():
        assert {o.data_ptr() for o in operands} == {t.data_ptr() for t in tensors.values()}  # no bf16 copy
    x, bias = torch.randn(m, 256).bfloat16().to(device), torch.randn(96).to(device)
    exact = x.double() @ method.dequantize(tensors, torch.bfloat16).double().T
    torch.testing.assert_close(method.logits(x, operands).double(), exact, rtol=1e-4, atol=1e-3)
    y = method.linear(x, operands, bias)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact + bias.double(), rtol=2e-2, atol=5e-2)


@pytest.mark.gpu
@needs_triton
def test_offsets_beyond_32_bits():
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    from lqrl.engines import triton_copy, triton_digest
    from lqrl.quant import triton_int8

    m, k = 2**31 // 4096 + 8, 4096
    x = torch.zeros(m, k, dtype=torch.bfloat16, device="cuda")
    x[-3:].normal_()
    for quantize in (rows.quantize_int8_token, rows.quantize_fp8_token, rows.quantize_fp8_group):
        codes, scale = quantize(x)
        last, last_scale = quantize(x[-3:])
        assert torch.equal(codes[-3:].float(), last.float())
        assert torch.equal(scale[-3:], last_scale)
    codes, scale = rows.quantize_int8_token(x[:, :64])
    weight, weight_scale = rows.quantize_int8_channel(torch.randn(4096, 64, device="cuda"))
    for tile in (triton_int8.Tile(128, 128, 64, 8, 3), triton_int8.Tile(128, 128, 64, 8, 3, tma=True)):
        y = triton_int8.gemm(codes, weight, weight_scale, scale, None, torch.bfloat16, tile)
        last = triton_int8.gemm(codes[-3:], weight, weight_scale, scale[-3:], None, torch.bfloat16, tile)
        assert torch.equal(y[-3:], last)
        assert last.any()
    del y
    target, flags = torch.zeros_like(x), torch.zeros(2, dtype=torch.int64, device="cuda")
    triton_copy.counted_copy_(target, x, flags)
    assert flags.tolist() == [torch.count_nonzero(x[-3:]).item(), 0]
    assert torch.equal(target[-3:], x[-3:])
    words = x.view(torch.int64).flatten()  # a digest of words, and of the same words in another order
    swapped = words.clone()
    swapped[[-1, -2]] = swapped[[-2, -1]]
    first, second = triton_digest.tensor_digests([words, swapped]).tolist()
    assert first != second
