"""Layers that read one input: codes that travel with it, one quantization, one gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from interpreter import needs_triton
from torch import Tensor, nn

from lqrl.quant import shared_input
from lqrl.quant.carried import carry, take
from lqrl.quant.linear import AlignedLinear, codes_of
from lqrl.quant.methods import linear_method
from lqrl.quant.methods.base import Coded
from lqrl.quant.numerics import quantize_int8_token
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.shared_input import products, shared_codes

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def aligned(
    scheme: str, widths: Sequence[int] = (32, 48, 16), dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[AlignedLinear]:
    method = linear_method(QuantScheme.preset(scheme))
    linears = [nn.Linear(64, n, bias=n == 48, device=device, dtype=dtype) for n in widths]
    return [AlignedLinear(linear, method, dtype) for linear in linears]


def codes(x: Tensor) -> Coded:
    return Coded(*quantize_int8_token(x.detach().reshape(-1, x.shape[-1])))


@pytest.mark.parametrize("scheme", ["int8_w8a8", "fp8_per_channel", "fp8_per_tensor", "int8_w8a16", "none"])
@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(32, 48, 16), (512, 256, 256), (768, 768)])
def test_layers_that_share_their_input_give_the_bits_of_layers_called_alone(device, scheme, backward, dtype, widths):
    if scheme == "none":
        layers: list[nn.Module] = [nn.Linear(64, n, device=device, dtype=dtype) for n in widths]
    else:
        layers = [*aligned(scheme, widths, dtype, device)]
        for layer in layers:
            layer.backward_mode = backward
    x = torch.randn(2, 520, 64, device=device, dtype=dtype, requires_grad=True)

    def outcome(outs: list[Tensor]) -> list[Tensor]:
        leaves = [x, *(p for layer in layers for p in layer.parameters())]
        return [*outs, *torch.autograd.grad(sum(y.float().square().sum() for y in outs), leaves)]

    alone, shared = outcome([layer(x) for layer in layers]), outcome(products(x, layers))
    place = len(layers)  # of the input's gradient, which is rounded fewer times
    size = alone[place].abs().max()
    assert (alone.pop(place) - shared.pop(place)).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * size
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_frozen_layers_and_inputs_have_no_gradient() -> None:
    layers = aligned("int8_w8a8", (16, 24))
    layers[0].requires_grad_(False)
    outs = products(torch.randn(3, 64), layers)
    torch.cat(outs, 1).sum().backward()
    assert layers[0].weight.grad is None
    assert layers[1].weight.grad is not None


def test_a_layer_with_a_say_is_called() -> None:
    layers = aligned("int8_w8a8")
    assert shared_codes(layers, CPU) == "int8"
    assert shared_codes([], CPU) is None
    assert shared_codes([*layers, nn.Linear(64, 4)], CPU) is None
    assert shared_codes([*layers, *aligned("fp8_per_channel")], CPU) is None
    assert shared_codes(aligned("int8_w8a16"), CPU) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert shared_codes(layers, CPU) is None
    seen = []
    layers[0].register_forward_hook(lambda *_: seen.append(1))
    products(torch.randn(3, 64), layers)
    assert len(seen) == 1
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        products(torch.randn(3, 64), aligned("int8_w8a8"))
    finally:
        handle.remove()
    assert len(seen) == 1 + len(layers)
    (layer,) = changed = aligned("int8_w8a8", (16,))
    x, kept = torch.randn(3, 64), layer.forward
    layer.forward = lambda x: kept(x) * 2  # as libraries do that move weights about
    assert torch.equal(products(x, changed)[0], kept(x) * 2)


@pytest.mark.parametrize("scheme", ["int8_w8a8", "fp8_per_channel", "fp8_per_tensor", "int8_w8a16"])
def test_no_tokens_give_no_rows(scheme: str) -> None:
    x = torch.randn(2, 0, 64, requires_grad=True)
    layers = aligned(scheme)
    assert layers[0](x).shape == (2, 0, layers[0].out_features)
    outs = products(x, layers)
    assert [out.shape for out in outs] == [(2, 0, layer.out_features) for layer in layers]
    torch.cat(outs, -1).sum().backward()
    assert x.grad is not None


def test_codes_are_taken_as_often_as_they_are_read() -> None:
    x = torch.randn(2, 3, 64)
    carry(x, "int8", codes(x), 3)
    assert take(x, "int8", 2) is not None
    assert take(x, "int8") is not None
    assert take(x, "int8") is None
    carry(x, "int8", codes(x), 1)
    assert take(x, "fp8_e4m3") is None
    assert take(x, "int8") is None, "codes that do not fit are dropped"


def test_codes_are_those_of_the_very_tensor() -> None:
    x = torch.randn(3, 64)
    carry(x, "int8", codes(x), 1)
    assert take(x.view(3, 64), "int8") is None
    assert take(x * 1, "int8") is None
    x.mul_(2)
    assert take(x, "int8") is None
    carry(x, "int8", codes(x), 1)
    x.data = torch.randn(3, 64)
    assert take(x, "int8") is None
    with torch.inference_mode():
        y = torch.randn(3, 64)
        carry(y, "int8", codes(y), 1)
    assert take(y, "int8") is None


@pytest.mark.parametrize("count", [1, 3])
def test_codes_that_are_carried_are_used_and_others_are_not(count: int) -> None:
    layers = aligned("int8_w8a8")[:count]
    x = torch.randn(4, 64)
    wanted = [layer(x) for layer in layers]
    other = torch.randn(4, 64)
    carry(x, "int8", codes(other), count)  # wrong ones, to see that they are read
    assert all(torch.equal(a, b) for a, b in zip(products(x, layers), [layer(other) for layer in layers], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(products(x, layers), wanted, strict=True))
    carry(x, "int8", codes(other), 1)
    assert torch.equal(layers[0](x), layers[0](other))
    assert torch.equal(layers[0](x), wanted[0])


def test_codes_are_made_once_per_change_of_the_weights() -> None:
    layers = aligned("int8_w8a8")
    first = codes_of(layers)
    assert all(a is b for a, b in zip(codes_of(layers), first, strict=True))
    with torch.no_grad():
        layers[1].weight.mul_(2)
    second = codes_of(layers)
    assert [a is b for a, b in zip(second, first, strict=True)] == [True, False, True]


def test_operands_are_one_where_they_lie_behind_each_other() -> None:
    whole, scale = torch.randint(-9, 9, (24, 16), dtype=torch.int8), torch.rand(24, 1)
    parts = list(zip(whole.split([8, 12, 4]), scale.split([8, 12, 4]), strict=True))
    found = shared_input._side_by_side(parts)
    assert found is not None
    assert torch.equal(found[0], whole)
    assert torch.equal(found[1], scale)
    assert shared_input._side_by_side([parts[0], parts[2]]) is None
    assert shared_input._side_by_side([parts[1], parts[0]]) is None
    assert shared_input._side_by_side([(p.clone(), s) for p, s in parts]) is None


def test_joined_operands_follow_the_codes_of_every_layer() -> None:
    layers = aligned("int8_w8a8", (32, 16))
    codes = codes_of(layers)
    assert shared_input._joined(codes) is None  # on a CPU each has a layout of its own
    whole, scale = torch.randint(-9, 9, (24, 16), dtype=torch.int8), torch.rand(24, 1)
    for made, parts in zip(codes, zip(whole.split([8, 16]), scale.split([8, 16]), strict=True), strict=True):
        vars(made)["operands"] = parts
    joined = [shared_input._joined(codes), shared_input._joined(codes)]
    assert joined[0] is joined[1] is not None
    vars(codes[1])["operands"] = (whole[8:].clone(), scale[8:])
    assert shared_input._joined(codes) is None
    assert len(codes[0].joined) == 1


@needs_triton
def test_a_product_that_ran_before_is_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    from lqrl.quant import triton_scaled as t
    from lqrl.quant.triton_tiles import Tile

    names, searched, direct = list(t._gemm.arg_names), [], []

    class Kernel:
        def __init__(self, known: dict[str, object]) -> None:
            self.known = known

        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args: direct.append((grid, dict(zip(names, args, strict=True)), self.known))

    class Compiler:
        def __getitem__(self, grid: tuple[int, ...]):
            def run(*args, **options):
                searched.append(options)
                return Kernel(dict(zip(names, args, strict=True)))

            return run

    monkeypatch.setattr(t, "_gemm", Compiler())
    monkeypatch.setattr(t, "_compiled", {})

    def run(m: int, n: int = 64, tile: Tile | None = None, bias: Tensor | None = None, offset: int = 0) -> None:
        x, w = torch.zeros(m, 32, dtype=torch.int8), torch.zeros(n, 32, dtype=torch.int8)
        token = torch.ones(m + 4)[offset : m + offset]
        t.gemm(x, w, torch.ones(n), token, bias, torch.bfloat16, tile or Tile(16, 32, 32, 4, 2, tma=True))

    run(8)
    run(40)
    assert (len(searched), len(direct)) == (1, 1)
    grid, got, known = direct[0]
    assert grid == (6, 1, 1)
    assert (got["m"], got["x"].shape, got["out_ptr"].shape) == (40, (40, 32), (1, 40, 64))
    constants = names[names.index("K") :]
    assert [got[name] for name in constants] == [known[name] for name in constants]
    wanted = {"K": 32, "FP8": False, "SCALED": True, "BIAS": False, "BF16": True, "TMA": True, "TALL": False}
    wanted |= {"STEPS": 1, "FIRST": 0, "SECOND": 0, "BM": 16, "BN": 32, "BK": 32, "GROUP": t.GROUP}
    assert {name: got[name] for name in constants} == wanted
    run(8, n=96)
    run(8, tile=Tile(16, 16, 32, 4, 2))
    run(8, tile=Tile(16, 32, 32, 8, 2, tma=True))
    run(8, bias=torch.ones(64))
    run(8, offset=1)  # not aligned: left to Triton, and not kept
    run(8, offset=1)
    assert (len(searched), len(direct)) == (7, 1)


@needs_triton
@pytest.mark.parametrize("ends", [(0, 0), (2048, 3072), (3072, 6144)])
def test_outputs_of_several_layers_are_stored_in_whole_words(ends: tuple[int, int]) -> None:
    """On Hopper; compiled without one."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lqrl.quant.triton_scaled import _gemm

    if knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    fixed = {
        "K": 1024, "FP8": False, "SCALED": True, "BIAS": False, "BF16": True, "TMA": True, "TALL": False, "STEPS": 8,
        "FIRST": ends[0], "SECOND": ends[1], "BM": 128, "BN": 256, "BK": 128, "GROUP": 8,
    }  # fmt: skip
    kinds = {"x": "tensordesc<i8[128, 128]>", "w": "tensordesc<i8[256, 128]>", "out_ptr": "*bf16", "bias_ptr": "*bf16"}
    kinds |= {"x_stride": "i32", "w_stride": "i32", "m": "i32", "n": "i32"}
    names = _gemm.arg_names
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "*fp32") for name in names}
    aligned_to = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name not in {*fixed, "x", "w", "m"}
    }
    made = triton.compile(
        ASTSource(_gemm, signature, fixed, aligned_to),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False},
    )
    assert set(re.findall(r"st\.global[.\w]*", made.asm["ptx"])) == {"st.global.v4.b32"}
