from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lqrl.quant.linear import AlignedLinear, QuantizedLinear
from lqrl.quant.methods import IntegerGemm, Operands

DTYPES = [torch.float32, torch.bfloat16]
INT8_W8A8 = IntegerGemm()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def make_linear(device: str = "cpu", *, k: int = 24, n: int = 10, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=bias).to(device)


def make_x(device: str = "cpu", dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 5, 24)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def aligned(linear: nn.Linear, export_dtype: torch.dtype = torch.float32) -> AlignedLinear:
    return AlignedLinear(linear, INT8_W8A8, export_dtype)


@dataclasses.dataclass(frozen=True)
class Counting(IntegerGemm):
    """int8 that notes each quantization of a weight."""

    calls: list[int] = dataclasses.field(default_factory=list, compare=False)

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        self.calls.append(1)
        return super().quantize(weight, amax)


@dataclasses.dataclass(frozen=True)
class Sharing(IntegerGemm):
    """int8 whose kernel reads the shipped codes themselves."""

    def operands(self, tensors, dtype, out: Operands | None = None) -> Operands:
        return tensors["weight"], tensors["weight_scale"]

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        tensors = {"weight": operands[0], "weight_scale": operands[1]}
        return super().linear(x, super().operands(tensors, x.dtype), bias)


@dataclasses.dataclass(frozen=True)
class Copying(IntegerGemm):
    """int8 whose kernel reads a copy of the codes."""

    def operands(self, tensors, dtype, out: Operands | None = None) -> Operands:
        if out is None:
            return tensors["weight"].clone(), tensors["weight_scale"]
        out[0].copy_(tensors["weight"])
        return out


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The int8 layer in plain int64 arithmetic."""

    def rows(t: Tensor) -> tuple[Tensor, Tensor]:
        t = t.float()
        amax = t.abs().amax(-1, keepdim=True)
        qmax = torch.full_like(amax, 127)
        return torch.round(t * (qmax / amax)).long().cpu(), amax / qmax

    codes, token_scale = rows(x.reshape(-1, x.shape[-1]))
    w_codes, w_scale = rows(weight)
    acc = (codes[:, None, :] * w_codes[None]).sum(-1).to(x.device)
    out = ((acc.float() * w_scale.t()) * token_scale).to(x.dtype)
    out = out if bias is None else out + bias.to(x.dtype)
    return out.view(*x.shape[:-1], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_aligned_forward_is_the_integer_gemm_of_the_exported_weight(device, dtype, bias):
    linear, x = make_linear(device, bias=bias), make_x(device, dtype)
    expected = reference(x, linear.weight.bfloat16(), None if linear.bias is None else linear.bias.bfloat16())
    assert torch.equal(aligned(linear, torch.bfloat16)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24,), (1, 24), (7, 24), (2, 3, 24), (2, 1, 3, 24)])
def test_learner_and_engine_layers_are_equal_bit_for_bit(device, dtype, shape):
    linear, x = make_linear(device), make_x(device, dtype, shape)
    engine = QuantizedLinear(copy.deepcopy(linear).to(dtype), INT8_W8A8)
    out = aligned(linear, dtype)(x)
    assert out.dtype == dtype
    assert out.shape == (*shape[:-1], 10)
    assert torch.equal(out, engine(x))


def test_export_dtype_comes_before_quantization():
    linear, x = make_linear(), make_x()
    assert not torch.equal(aligned(linear, torch.float32)(x), aligned(linear, torch.bfloat16)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_a_plain_linear(device, dtype):
    plain = make_linear(device).to(dtype)
    layer = aligned(copy.deepcopy(plain), dtype)
    x = make_x(device, dtype).requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    grad = make_x(device, dtype, (2, 5, 10))
    F.linear(x, plain.weight, plain.bias).backward(grad)
    layer(x2).backward(grad)
    rows, inputs = grad.reshape(-1, 10), x.detach().reshape(-1, 24)
    assert torch.equal(x2.grad, (rows @ plain.weight).view_as(x))
    assert torch.equal(layer.weight.grad, rows.t() @ inputs)
    assert torch.equal(layer.bias.grad, rows.sum(0))
    for ours, theirs in [(x2.grad, x.grad), (layer.weight.grad, plain.weight.grad), (layer.bias.grad, plain.bias.grad)]:
        torch.testing.assert_close(ours, theirs)


def test_a_bf16_forward_gives_fp32_gradients_to_fp32_masters():
    layer = aligned(make_linear(), torch.bfloat16)
    x, grad = make_x(dtype=torch.bfloat16), make_x(dtype=torch.bfloat16, shape=(2, 5, 10))
    layer(x).backward(grad)
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, (grad.reshape(-1, 10).t() @ x.reshape(-1, 24)).float())


def test_frozen_parameters_get_no_gradient_and_the_input_does():
    layer = aligned(make_linear().requires_grad_(False))
    x = make_x().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    assert layer.bias.grad is None


def test_parameters_are_the_very_same_objects_under_the_same_names():
    linear = make_linear()
    weight, bias, names = linear.weight, linear.bias, list(linear.state_dict())
    layer = aligned(linear)
    assert layer.weight is weight
    assert layer.bias is bias
    layer(make_x())
    assert list(layer.state_dict()) == names == [n for n, _ in layer.named_parameters()]


def test_autocast_computes_in_its_dtype_as_a_plain_linear_does():
    layer, x = aligned(make_linear(), torch.bfloat16), make_x()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert torch.equal(out, layer(x.bfloat16()))


def test_micro_batches_quantize_once_and_an_optimizer_step_once_more():
    method = Counting()
    layer = AlignedLinear(make_linear(), method, torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for step in range(1, 4):
        for _ in range(3):
            layer(make_x()).sum().backward()
        layer.quantized_weight()
        assert len(method.calls) == step
        optimizer.step()


def test_an_optimizer_that_hides_its_writes_from_autograd_is_noticed():
    class DataSGD(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(-1)  # leaves p._version alone

    layer = aligned(make_linear(bias=False))
    before = layer(make_x())
    version = layer.weight._version
    DataSGD(layer.parameters()).step()
    assert layer.weight._version == version
    assert torch.equal(layer(make_x()), -before)


def test_an_in_place_change_and_loading_a_checkpoint_are_noticed():
    layer, x = aligned(make_linear(bias=False)), make_x()
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(x), before * 2)
    layer.load_state_dict({"weight": -layer.weight.detach()})
    assert torch.equal(layer(x), before * -2)


def test_invalidate_forgets_codes_after_a_hidden_write():
    layer, x = aligned(make_linear(bias=False)), make_x()
    before = layer(x)
    layer.weight.data.mul_(2)
    layer.invalidate()
    assert torch.equal(layer(x), before * 2)


def test_codes_of_an_earlier_export_are_not_overwritten_by_a_later_one():
    layer = aligned(make_linear())
    codes = layer.quantized_weight()["weight"]
    kept = codes.clone()
    with torch.no_grad():
        layer.weight.neg_()
    layer(make_x())
    assert torch.equal(codes, kept)


def test_a_weight_changed_between_forward_and_backward_is_an_error():
    layer = aligned(make_linear())
    out = layer(make_x().requires_grad_())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_copied_layer_is_independent():
    layer, x = aligned(make_linear()), make_x()
    before = layer(x)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.neg_()
    assert torch.equal(layer(x), before)
    assert not torch.equal(other(x), before)


def test_engine_state_is_codes_scale_and_bias():
    engine = QuantizedLinear(make_linear().bfloat16(), INT8_W8A8)
    state = engine.state_dict()
    assert {n: (t.dtype, tuple(t.shape)) for n, t in state.items()} == {
        "weight": (torch.int8, (10, 24)),
        "weight_scale": (torch.float32, (10, 1)),
        "bias": (torch.bfloat16, (10,)),
    }
    assert list(engine.parameters()) == []


def test_a_refresh_keeps_every_storage_and_changes_the_output(device):
    a, b = make_linear(device), make_linear(device)
    with torch.no_grad():
        b.weight.mul_(torch.linspace(-2, 2, 24, device=device))
    engine, wanted, x = QuantizedLinear(a, INT8_W8A8), QuantizedLinear(b, INT8_W8A8), make_x(device)
    engine(x)
    addresses = {n: t.data_ptr() for n, t in engine.named_buffers()}
    engine.load_state_dict(wanted.state_dict())
    assert {n: t.data_ptr() for n, t in engine.named_buffers()} == addresses
    assert torch.equal(engine(x), wanted(x))


def test_codes_written_without_pack_are_refused():
    engine = QuantizedLinear(make_linear(), Copying())
    engine.weight.copy_(-engine.weight)
    with pytest.raises(RuntimeError, match="call pack"):
        engine(make_x())
    engine.pack()
    assert torch.equal(engine.operand_0, engine.weight)


def test_a_layout_that_is_the_codes_needs_no_second_copy():
    engine = QuantizedLinear(make_linear(bias=False), Sharing())
    assert [n for n, _ in engine.named_buffers()] == ["weight", "weight_scale"]
    before = engine(make_x())
    engine.weight.neg_()
    assert torch.equal(engine(make_x()), -before)


def test_changing_the_compute_dtype_leaves_scales_in_fp32():
    engine = QuantizedLinear(make_linear(), INT8_W8A8)
    scale = engine.weight_scale.clone()
    engine.to(torch.bfloat16)
    assert engine.bias.dtype == torch.bfloat16
    assert torch.equal(engine.weight_scale, scale)


def test_a_copied_engine_does_not_share_its_layout():
    engine = QuantizedLinear(make_linear(), INT8_W8A8)
    before = engine(make_x())
    other = copy.deepcopy(engine)
    other.weight.zero_()
    other.pack()
    assert torch.equal(engine(make_x()), before)
    assert not torch.equal(other(make_x()), before)


def test_a_meta_layer_refuses_to_run_until_it_is_materialized_and_loaded():
    meta = QuantizedLinear(nn.Linear(24, 10, device="meta"), INT8_W8A8)
    with pytest.raises(RuntimeError, match="to_empty"):
        meta(make_x())
    source = QuantizedLinear(make_linear(), INT8_W8A8)
    meta.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(meta(make_x()), source(make_x()))


def test_inference_mode_is_refused_for_building():
    linear = make_linear()
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"torch.no_grad\(\)"):
        QuantizedLinear(linear, INT8_W8A8)


def test_engine_output_has_no_graph():
    assert not QuantizedLinear(make_linear(), INT8_W8A8)(make_x().requires_grad_()).requires_grad
