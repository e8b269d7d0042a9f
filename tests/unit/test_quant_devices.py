"""Every quantizer gives the same bits on the GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lqrl.quant import numerics as q

QUANTIZERS = {
    "int8_channel": q.quantize_int8_channel,
    "int8_token": q.quantize_int8_token,
    "fp8_tensor": q.quantize_fp8_tensor,
    "fp8_channel": q.quantize_fp8_channel,
    "fp8_block": q.quantize_fp8_block,
    "fp8_token": q.quantize_fp8_token,
    "fp8_per_tensor_dynamic": q.quantize_fp8_per_tensor_dynamic,
    "fp8_group": q.quantize_fp8_group,
    "int4_group": lambda x: q.quantize_int4_group(x, 32),
    "int4_group_bf16_scale": lambda x: q.quantize_int4_group(x, 128, torch.bfloat16),
    "nvfp4": q.quantize_nvfp4,
    "mxfp4": q.quantize_mxfp4,
    "mxfp8": q.quantize_mxfp8,
    "kv_int8_token_head": q.quantize_kv_int8_token_head,
    "kv_fp8_token_head": q.quantize_kv_fp8_token_head,
    "kv_fp8_static": lambda x: (q.quantize_kv_fp8_static(x, torch.tensor([0.01], device=x.device)),),
}


def comparable(x: Tensor) -> Tensor:
    """Bits as integers; every NaN is one NaN, since devices make different ones."""
    values = x.float()
    return torch.where(values.isnan(), torch.nan, values).cpu().view(torch.int32)


def weights(dtype: torch.dtype) -> Tensor:
    """Rows of four magnitudes, with outliers, zeros, subnormals and a huge value."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 512, generator=generator) * torch.tensor([1e-3, 0.02, 1.0, 40.0]).repeat(64).unsqueeze(1)
    x[torch.rand(256, 512, generator=generator) < 1e-3] *= 20
    x[0] = 0.0
    x[1] = 1e-42
    x[2, 0] = 3e30
    return x.to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_the_gpu_gives_the_bits_of_the_cpu(name, dtype, bad):
    x = weights(dtype)
    if bad is not None:
        x[7, 9] = bad
    for cpu, cuda in zip(QUANTIZERS[name](x), QUANTIZERS[name](x.cuda()), strict=True):
        assert cuda.is_cuda
        assert cuda.dtype == cpu.dtype
        assert torch.equal(comparable(cuda), comparable(cpu))


@pytest.mark.gpu
def test_packing_and_decoding_are_the_same_on_the_gpu():
    codes = torch.randint(0, 16, (64, 256), dtype=torch.uint8)
    assert torch.equal(q.pack_fp4(codes.cuda()).cpu(), q.pack_fp4(codes))
    assert torch.equal(q.unpack_fp4(codes.cuda()).cpu(), q.unpack_fp4(codes))
    assert torch.equal(comparable(q.decode_e2m1(codes.cuda())), comparable(q.decode_e2m1(codes)))
    int4 = codes.view(torch.int8) - 8
    assert torch.equal(q.pack_int4(int4.cuda()).cpu(), q.pack_int4(int4))
    assert torch.equal(q.unpack_int4(q.pack_int4(int4).cuda()).cpu(), int4)
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(comparable(q.decode_e8m0(byte.cuda())), comparable(q.decode_e8m0(byte)))


@pytest.mark.gpu
def test_the_calibrated_scale_is_the_same_on_the_gpu():
    amaxes = torch.rand(5000)
    torch.testing.assert_close(q.kv_scale_from_amax(amaxes.cuda()).cpu(), q.kv_scale_from_amax(amaxes))
