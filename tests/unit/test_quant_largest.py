"""The largest numbers of a dtype: codes decode to finite values, and every kernel scales them alike."""

from __future__ import annotations

import pytest
import torch
from test_quant_kernels import backends, bits, in_dtypes, layer, on_devices
from test_quant_methods import DTYPES, FORMATS, inputs

from lqrl.quant import kernels
from lqrl.quant.methods import linear_method
from lqrl.quant.scheme import PRESETS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_numbers_of_a_dtype_stay_finite(name, dtype, device):
    method, weight = linear_method(PRESETS[name]), inputs(device, dtype)
    largest = torch.finfo(dtype).max
    # mxfp4 saturates at 1.5 * 2**127, bitsandbytes on a GPU at 2**126
    least = 0.24 if name == "nf4" and device.type == "cuda" else 0.74
    words = torch.tensor(largest, dtype=dtype).view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    for below in (0, 1, 2, 3, 7, 40):
        value = (words - below).view(dtype)
        weight[0, 3], weight[1, 5] = value, -value
        values = method.dequantize(method.quantize(weight), dtype)
        assert bool(values.isfinite().all())
        kept = values[[0, 1], [3, 5]].double().abs() / largest
        assert bool((kept > least).all())


@on_devices
@in_dtypes
def test_the_largest_number_of_a_dtype_is_scaled_alike_in_every_backend(device, dtype):
    weight_codes, scale = layer(16, 64, device)
    x = torch.randn(3, 64).to(dtype)
    x[0, 3], x[1, 5] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    x, small = x.to(device), scale * 1e-9  # outputs stay finite
    plain = kernels.FloatBackend()
    expected = plain.linear(x, plain.pack(weight_codes), small, None)
    assert expected.isfinite().all()
    for name, backend in backends(device).items():
        assert torch.equal(bits(backend.linear(x, backend.pack(weight_codes), small, None)), bits(expected)), name
