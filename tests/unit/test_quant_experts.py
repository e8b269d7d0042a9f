"""Routed experts: learner and engine agree bit for bit; an expert is three dense layers."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lqrl.quant import QuantizedLinear
from lqrl.quant.experts import AlignedExperts, QuantizedExperts, check_experts, routed
from lqrl.quant.linear import AlignedLinear
from lqrl.quant.methods import linear_method
from lqrl.quant.numerics import shared_amax
from lqrl.quant.scheme import PRESETS
from lqrl.quant.stacks import unstacked

MISSING = set() if find_spec("bitsandbytes") else {"nf4"}
FORMATS = sorted(name for name, scheme in PRESETS.items() if scheme.quantizes and name not in MISSING)
E, INNER, HIDDEN = 3, 128, 256


class Experts(nn.Module):
    """Stacked as in Qwen3-MoE, evaluated for every token and expert."""

    def __init__(self, count: int = E, inner: int = INNER, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, hidden) / 16)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, inner) / 16)
        self.act_fn = nn.SiLU()

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,enh->ten", hidden_states, self.gate_up_proj).chunk(2, -1)
        each = torch.einsum("ten,ehn->teh", self.act(gate, up), self.down_proj)
        chosen = each.gather(1, top_k_index[..., None].expand(-1, -1, each.shape[-1]))
        return (chosen * top_k_weights[..., None]).sum(1)


class Clamped(Experts):
    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().act(gate.clamp(max=7), up)


def routing(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
    """7 tokens, two experts each; expert 2 has none."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, HIDDEN, generator=generator)
    index = torch.stack([torch.arange(7) % 2, 1 - torch.arange(7) % 2], 1)
    weights = torch.rand(7, 2, generator=generator)
    return x.to(device, dtype), index.to(device), weights.to(device, dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def dense(experts: nn.Module, e: int) -> dict[str, nn.Linear]:
    """An expert as three linear layers."""
    gate_up, down = experts.get_parameter("gate_up_proj")[e], experts.get_parameter("down_proj")[e]
    weights = {"gate_proj": gate_up[:INNER], "up_proj": gate_up[INNER:], "down_proj": down}
    layers = {name: nn.Linear(w.shape[1], w.shape[0], bias=False) for name, w in weights.items()}
    for name, layer in layers.items():
        layer.weight = nn.Parameter(weights[name].detach().clone())
    return layers


def test_worked_sum():
    """Expert e multiplies by 10**e: 0.5 * 1 * 2 + 0.25 * 100 * 2 = 51, and 1 * 10 * 3 + 1 * 1 * 3 = 33."""
    x, index = torch.tensor([[2.0], [3.0]]), torch.tensor([[0, 2], [1, 0]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 1.0]])
    seen: list[tuple[int, list[float]]] = []

    def expert(e: int, part: Tensor) -> Tensor:
        seen.append((e, part.flatten().tolist()))
        return part * 10**e

    assert routed(x, index, weights, 4, expert).tolist() == [[51.0], [33.0]]
    assert seen == [(0, [2.0, 3.0]), (1, [3.0]), (2, [2.0])]  # expert 3 has no token and is not called


@given(st.permutations(list(range(6))), st.integers(0, 2**20))
def test_a_token_does_not_depend_on_its_place(order, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(6, 4, generator=generator), torch.rand(6, 3, generator=generator)
    index = torch.rand(6, 5, generator=generator).argsort(-1)[:, :3]

    def expert(e: int, part: Tensor) -> Tensor:
        return part * (e + 1)

    y = routed(x, index, weights, 5, expert)
    assert torch.equal(routed(x[order], index[order], weights[order], 5, expert), y[order])


def test_no_tokens_and_unknown_experts():
    x, index = torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.long)
    assert routed(x, index, torch.zeros(0, 2), 3, lambda e, part: part).shape == (0, 4)
    with pytest.raises(ValueError, match="chose expert 3 of 3"):
        routed(torch.zeros(1, 4), torch.tensor([[0, 3]]), torch.ones(1, 2), 3, lambda e, part: part)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learner_and_engine_are_equal_bit_for_bit(name, dtype, device):
    method, plain = linear_method(PRESETS[name]), Experts().to(device)
    engine = QuantizedExperts(copy.deepcopy(plain).to(dtype), method)
    learner = AlignedExperts(plain, method, dtype)
    shipped = learner.quantized_weights()
    assert list(shipped) == list(engine.shipped())
    assert all(torch.equal(bits(t), bits(engine.get_buffer(n))) for n, t in shipped.items())
    x, index, weights = routing(device, dtype)
    y = learner(x, index, weights)
    assert y.dtype == dtype
    assert torch.equal(y, engine(x, index, weights))


@pytest.mark.parametrize("name", FORMATS)
def test_an_expert_is_three_dense_layers_with_fused_siblings(name):
    """Codes and scales are those of gate, up (with their common magnitude) and down as dense layers."""
    method, experts = linear_method(PRESETS[name]), Experts()
    engine = QuantizedExperts(experts, method)
    tensors = dict(unstacked((f"mlp.experts.{n}", t) for n, t in engine.shipped().items()))
    x, index, weights = routing()
    expected = torch.zeros_like(x)
    for e in range(E):
        plain = dense(experts, e)
        amax = shared_amax([plain[n].weight.detach() for n in ("gate_proj", "up_proj")])
        layers = {
            n: QuantizedLinear(layer, method, amax if method.shares_amax and n != "down_proj" else None)
            for n, layer in plain.items()
        }
        for n, layer in layers.items():
            for part, tensor in layer.shipped().items():
                assert torch.equal(bits(tensors.pop(f"mlp.experts.{e}.{n}.{part}")), bits(tensor))
        y = layers["down_proj"](F.silu(layers["gate_proj"](x)) * layers["up_proj"](x))
        expected += y * (weights * (index == e)).sum(1, keepdim=True)
    assert not tensors
    torch.testing.assert_close(engine(x, index, weights), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["int8_w8a8", "nvfp4_w4a16"])
def test_gradients_are_those_of_dense_aligned_layers(name, backward):
    method, experts = linear_method(PRESETS[name]), Experts()
    learner = AlignedExperts(experts, method, torch.float32, backward)
    (x, index, weights), grad = routing(), torch.randn(7, HIDDEN)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    learner(x, index, weights).backward(grad)
    x2, weights2 = (t.detach().clone().requires_grad_() for t in (x, weights))
    y = torch.zeros_like(x)
    layers = []
    for e in range(2):
        aligned = {n: AlignedLinear(m, method, torch.float32, backward) for n, m in dense(experts, e).items()}
        for n in ("gate_proj", "up_proj"):
            aligned[n].share_scale([aligned["gate_proj"], aligned["up_proj"]])
        out = aligned["down_proj"](F.silu(aligned["gate_proj"](x2)) * aligned["up_proj"](x2))
        y = y + out * (weights2 * (index == e)).sum(1, keepdim=True)
        layers.append({n: m.weight for n, m in aligned.items()})
    y.backward(grad)
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(weights.grad, weights2.grad, rtol=1e-3, atol=1e-3)
    for e, own in enumerate(layers):
        gate_up = torch.cat([own["gate_proj"].grad, own["up_proj"].grad])
        torch.testing.assert_close(learner.gate_up_proj.grad[e], gate_up, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(learner.down_proj.grad[e], own["down_proj"].grad, rtol=1e-3, atol=1e-3)
    assert not learner.gate_up_proj.grad[2].any()  # no token went there
    assert not learner.down_proj.grad[2].any()


def test_codes_follow_a_step_and_autocast_gives_its_dtype():
    learner = AlignedExperts(Experts(), linear_method(PRESETS["int8_w8a8"]), torch.float32)
    x, index, weights = routing()
    before = learner(x, index, weights)
    assert learner.quantized_weights()["down_proj_weight"] is learner.quantized_weights()["down_proj_weight"]
    before.sum().backward()
    torch.optim.SGD(learner.parameters(), lr=1.0).step()
    assert not torch.equal(learner(x, index, weights), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = learner(x, index, weights)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, learner(x.bfloat16(), index, weights))


@pytest.mark.parametrize("name", FORMATS)
def test_a_refresh_keeps_every_storage_and_leaves_the_new_experts(name, device):
    method = linear_method(PRESETS[name])
    engine, wanted = (QuantizedExperts(Experts().to(device), method) for _ in range(2))
    args = routing(device)
    assert not torch.equal(engine(*args), wanted(*args))
    addresses = {n: t.data_ptr() for n, t in engine.named_buffers()}
    engine.load_state_dict(wanted.state_dict())
    assert {n: t.data_ptr() for n, t in engine.named_buffers()} == addresses
    assert torch.equal(engine(*args), wanted(*args))


@pytest.mark.parametrize("name", ["int8_w8a8", "int4_w4a16", "fp8_per_tensor"])
def test_a_copy_is_independent_and_a_move_keeps_codes(name):
    engine = QuantizedExperts(Experts(), linear_method(PRESETS[name]))
    other, args = copy.deepcopy(engine), routing()
    before = engine(*args)
    other.get_buffer("down_proj_weight_scale").mul_(2)
    other.pack()
    assert torch.equal(engine(*args), before)
    assert not torch.equal(other(*args), before)
    shipped = {n: t.clone() for n, t in engine.shipped().items()}
    engine.to(torch.bfloat16)
    assert all(torch.equal(bits(engine.shipped()[n]), bits(t)) for n, t in shipped.items())
    assert engine(*routing(dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_unpacked_codes_are_noticed():
    engine = QuantizedExperts(Experts(), linear_method(PRESETS["int4_w4a16"]))
    engine.get_buffer("gate_up_proj_weight_packed").zero_()
    with pytest.raises(RuntimeError, match="codes of a QuantizedExperts changed: call pack"):
        engine(*routing())


def test_other_experts_are_refused_by_name():
    method = linear_method(PRESETS["int8_w8a8"])
    check_experts("a.experts", Experts(), method)
    with pytest.raises(
        ValueError, match=r"a\.experts \(Clamped\) does not compute act\(gate\).*skip=\['\*\.experts'\]"
    ):
        check_experts("a.experts", Clamped(), method)
    turned = Experts()
    turned.gate_up_proj, turned.down_proj = (
        nn.Parameter(p.transpose(1, 2)) for p in (turned.gate_up_proj, turned.down_proj)
    )
    with pytest.raises(ValueError, match=r"its shapes are \(3, 256, 256\) and \(3, 128, 256\)"):
        check_experts("a.experts", turned, method)
    biased = Experts()
    biased.down_proj_bias = nn.Parameter(torch.zeros(E, HIDDEN))
    with pytest.raises(ValueError, match=r"it holds .*'down_proj_bias'"):
        check_experts("a.experts", biased, method)


def test_blocks_across_gate_and_up_and_widths_that_do_not_fit_are_refused():
    block, group = (linear_method(PRESETS[name]) for name in ("fp8_per_block", "int4_w4a16"))
    for inner in (64, 192):  # 2 * 192 = 384 rows are 3 blocks, 192 and 192 are 2 and 2
        with pytest.raises(ValueError, match=rf"{inner} rows each in gate and up, and blocks .* would span both"):
            check_experts("a.experts", Experts(inner=inner), block)
    with pytest.raises(ValueError, match=r"256 and 64 inputs, which .* cannot hold: .*skip=\['\*\.experts'\]"):
        check_experts("a.experts", Experts(inner=64), group)
