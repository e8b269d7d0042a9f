"""Products of tokens that are quantized already: the bits of the layer that quantizes them itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lqrl.engines import coded_steps
from lqrl.engines.fused_decoder import _gated_product
from lqrl.quant import exact, triton_use
from lqrl.quant.fused import QuantizedProduct, fuse_
from lqrl.quant.linear import QuantizedLinear
from lqrl.quant.methods import linear_method
from lqrl.quant.methods.base import Coded, LinearMethod
from lqrl.quant.methods.exact import exact_method
from lqrl.quant.methods.fp8 import Fp8Tensor
from lqrl.quant.rows import quantize_fp8_token, quantize_int8_token
from lqrl.quant.scheme import QuantScheme

TOKEN_FORMATS = ["int8_w8a8", "fp8_per_channel", "fp8_per_tensor"]
QUANTIZERS = {"int8": quantize_int8_token, "fp8_e4m3": quantize_fp8_token}
K, N = 96, 80


def coded(x: Tensor, method: LinearMethod) -> Coded:
    assert method.token_codes is not None
    return Coded(*QUANTIZERS[method.token_codes](x))


def layer_of(method: LinearMethod, device: torch.device, n: int = N, bias: bool = False) -> QuantizedLinear:
    plain = nn.Linear(K, n, bias=bias, device=device, dtype=torch.bfloat16).requires_grad_(False)
    return QuantizedLinear(plain, method)


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_ready_codes_give_the_bits_of_the_layer(name, dtype, exactly, device):
    method = linear_method(QuantScheme.preset(name))
    method = exact_method(method) if exactly else method
    torch.manual_seed(0)
    tensors = method.quantize(torch.randn(N, K, device=device).to(dtype))
    operands = method.operands(tensors, dtype)
    for rows in (1, 7, 40):
        x = torch.randn(rows, K, device=device).to(dtype)
        for bias in (None, torch.randn(N, device=device)):
            got = method.coded_linear(coded(x, method), operands, bias, dtype)
            assert got.dtype == dtype
            assert torch.equal(got, method.linear(x, operands, bias))


@pytest.mark.parametrize(
    "method",
    [
        *(linear_method(QuantScheme.preset(name)) for name in ("int4_w4a16", "int4_w4a4", "fp8_per_block")),
        Fp8Tensor("tensor"),
    ],
    ids=str,
)
def test_other_formats_take_none(method):
    assert method.token_codes is None
    with pytest.raises(NotImplementedError, match="takes no ready codes: call linear"):
        method.coded_linear(Coded(torch.empty(0), torch.empty(0)), (), None, torch.float32)


def test_an_adapter_reads_the_input_itself():
    layer = layer_of(linear_method(QuantScheme.preset("int8_w8a8")), torch.device("cpu"))
    assert layer.token_codes == "int8"
    layer.add_low_rank(4, 1.0)
    assert layer.token_codes is None


@pytest.mark.gpu
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["int8_w8a8", "fp8_per_channel"])
def test_steps_have_the_bits_of_their_parts(name, together):
    cuda, method = torch.device("cuda"), linear_method(QuantScheme.preset(name))
    torch.manual_seed(0)
    layers = [layer_of(method, cuda, n, bias=True) for n in (64, 32)]
    weight = torch.rand(K, device=cuda).bfloat16() + 0.5
    x, delta = torch.randn(2, 37, K, device=cuda).bfloat16()
    total, normed = exact.add_rms_norm(x, delta, weight, 1e-6)
    wanted = [layer(normed) for layer in layers]
    fused = {layers[0]: fuse_(layers)} if together else {}
    assert all(isinstance(product, QuantizedProduct) for product in fused.values())
    step = coded_steps.normed_product(weight, 1e-6, layers, fused)
    assert step is not None
    got_total, got = step(x, delta)
    assert torch.equal(got_total, total)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int8_w8a8", "fp8_per_channel"])
def test_the_gated_step_has_the_bits_of_its_parts(name):
    cuda = torch.device("cuda")
    torch.manual_seed(0)
    down = layer_of(linear_method(QuantScheme.preset(name)), cuda, bias=True)
    gate, up = torch.randn(37, 2 * K, device=cuda).bfloat16().split(K, -1)  # rows of one product
    step = coded_steps.gated_product(down)
    assert step is not None
    assert torch.equal(step((gate, up)), down(exact.silu_mul(gate, up)))


def test_steps_are_left_alone_off_cuda_and_for_plain_layers():
    cpu, weight = torch.device("cpu"), torch.ones(K)
    layer = layer_of(linear_method(QuantScheme.preset("int8_w8a8")), cpu)
    assert coded_steps.normed_product(weight, 1e-6, [layer], {}) is None
    assert coded_steps.normed_product(weight, 1e-6, [nn.Linear(K, N), layer], {}) is None


@pytest.mark.parametrize("name", ["plain", "int8_w8a8", "int8_w8a8 and an adapter", "int4_w4a16"])
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU()], ids=["silu", "gelu"])
def test_a_gated_step_without_codes_is_its_parts(name, activation, device):
    """Off CUDA, for layers that take no codes, and for an activation that no kernel quantizes."""
    torch.manual_seed(0)
    down = nn.Linear(128, N, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    if name != "plain":
        down = QuantizedLinear(down, linear_method(QuantScheme.preset(name.split()[0])))
    if "adapter" in name:
        down.add_low_rank(4, 1.0)
        for factor in (down.lora_A, down.lora_B):
            factor.weight.normal_()
    gate, up = torch.randn(7, 256, device=device).bfloat16().split(128, -1)
    quantizes = name == "int8_w8a8" and triton_use.serves(device)
    assert (coded_steps.gated_product(down) is not None) == quantizes
    silu = isinstance(activation, nn.SiLU)
    gated = exact.silu_mul(gate, up) if silu else activation(gate) * up
    assert torch.equal(_gated_product(activation, down)((gate, up)), down(gated))
