"""Optimizer state in main memory between steps: the same bits in parameters, states and checkpoints."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lqrl.learner import KahanAdamW, MuonAdamW, StochasticAdamW
from lqrl.learner.offload import StateOffload

Named = list[tuple[str, nn.Parameter]]
Make = Callable[[Named], torch.optim.Optimizer]


def bitsandbytes_adamw(parameters: Named) -> torch.optim.Optimizer:
    optim = pytest.importorskip("bitsandbytes.optim", reason="needs bitsandbytes")
    return optim.AdamW8bit(parameters, lr=1e-2)


OPTIMIZERS: dict[str, tuple[torch.dtype, Make]] = {
    "AdamW": (torch.float32, lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "AdamW fused": (torch.float32, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
    "AdamW amsgrad": (torch.float32, lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True)),
    "KahanAdamW": (torch.bfloat16, lambda p: KahanAdamW(p, lr=1e-2)),
    "StochasticAdamW": (torch.bfloat16, lambda p: StochasticAdamW(p, lr=1e-2)),
    "MuonAdamW": (torch.float32, lambda p: MuonAdamW(p, lr=1e-2)),
    "bitsandbytes": (torch.float32, bitsandbytes_adamw),
}


@pytest.fixture(params=OPTIMIZERS)
def case(request: pytest.FixtureRequest) -> tuple[torch.dtype, Make]:
    return OPTIMIZERS[request.param]


def parameters(dtype: torch.dtype, device: torch.device) -> Named:
    """A matrix, one whose rows are not contiguous, one large enough for 8-bit states, and a norm."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (48, 32), "down": (32, 48), "embed_tokens": (96, 64), "norm": (32,)}
    values = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    values["down"] = values["down"].t().contiguous().t()
    return [(name, nn.Parameter(value.to(device, dtype))) for name, value in values.items()]


def step(named: Named, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for _, parameter in named:
        # The layout of the parameter: AdamW fused wants it.
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, inner in value.items() for k, v in leaves(inner, f"{path}/{key}").items()}


def assert_same(ours: Any, theirs: Any) -> None:
    ours, theirs = leaves(ours), leaves(theirs)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, Tensor):
            other = theirs[name]
            assert (value.dtype, value.shape) == (other.dtype, other.shape)
            assert torch.equal(value.detach().cpu(), other.detach().cpu()), name
        else:
            assert value == theirs[name], name


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = {id(t): t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)}
    return list(found.values())


def test_steps_states_and_checkpoints_have_the_same_bits(case: tuple[torch.dtype, Make], device: torch.device) -> None:
    dtype, make = case
    plain, moved = parameters(dtype, device), parameters(dtype, device)
    a, b = make(plain), make(moved)
    offload = StateOffload(b)
    assert (offload.offload(), offload.restore()) == (0, 0)  # there is no state yet
    for number in range(4):
        step(plain, a, number)
        step(moved, b, number)
        size = sum(t.nbytes for t in states(b) if t.device.type == device.type)
        assert offload.offload() == size
        assert offload.offload() == 0
        assert {t.device.type for t in states(b)} == {"cpu"}
        assert_same(b.state_dict(), a.state_dict())
        if number == 1:  # what is in main memory may also be brought back by hand
            assert offload.restore() == size
            assert_same(b.state_dict(), a.state_dict())
    assert_same(dict(moved), dict(plain))
    offload.close()
    assert_same(b.state_dict(), a.state_dict())


def test_a_checkpoint_from_main_memory_continues_the_run(case: tuple[torch.dtype, Make], device: torch.device) -> None:
    dtype, make = case
    plain, moved = parameters(dtype, device), parameters(dtype, device)
    a, b = make(plain), make(moved)
    offload = StateOffload(b)
    for number in range(2):
        step(plain, a, number)
        step(moved, b, number)
        offload.offload()
    file = io.BytesIO()
    torch.save({"optimizer": b.state_dict(), "parameters": {n: p.detach() for n, p in moved}}, file)
    offload.close()
    file.seek(0)
    saved = torch.load(file, map_location="cpu", weights_only=True)
    rest = [(name, nn.Parameter(saved["parameters"][name].to(device))) for name, _ in moved]
    c = make(rest)
    again = StateOffload(c)
    c.load_state_dict(saved["optimizer"])
    again.offload()
    for number in range(2, 4):
        step(plain, a, number)
        step(rest, c, number)
    assert_same(dict(rest), dict(plain))
    assert_same(c.state_dict(), a.state_dict())
    again.close()


def test_a_state_that_is_loaded_meanwhile_is_the_one_that_counts(device: torch.device) -> None:
    named, other = parameters(torch.float32, device), parameters(torch.float32, device)
    a, b = (OPTIMIZERS["AdamW"][1](p) for p in (named, other))
    for number in range(3):
        step(other, b, number)
    offload = StateOffload(a)
    step(named, a, 9)
    offload.offload()
    a.load_state_dict(b.state_dict())
    assert offload.restore() == 0
    assert_same(a.state_dict(), b.state_dict())
    offload.offload()
    step(named, a, 3)
    step(other, b, 3)
    assert_same(a.state_dict(), b.state_dict())


def test_main_memory_is_taken_once(device: torch.device) -> None:
    named = parameters(torch.float32, device)
    optimizer = OPTIMIZERS["AdamW"][1](named)
    offload, places = StateOffload(optimizer), []
    for number in range(3):
        step(named, optimizer, number)
        offload.offload()
        places.append(sorted(t.data_ptr() for t in states(optimizer)))
    assert places[0] == places[1] == places[2]
    assert len({t.untyped_storage().data_ptr() for t in states(optimizer) if t.dim()}) == 1


def test_a_state_of_many_parameters_stays_one(device: torch.device) -> None:
    named = parameters(torch.float32, device)
    optimizer = OPTIMIZERS["AdamW"][1](named)
    step(named, optimizer, 0)
    shared = torch.arange(6.0, device=device)
    for state in optimizer.state.values():
        state["map"] = shared
    offload = StateOffload(optimizer)
    for move in (offload.offload, offload.restore):
        move()
        (one,) = {id(state["map"]): state["map"] for state in optimizer.state.values()}.values()
        assert one.tolist() == [0, 1, 2, 3, 4, 5]


class Packed(Tensor):
    """What some packages keep their states in."""


def test_states_that_are_no_plain_tensors_are_refused() -> None:
    named = parameters(torch.float32, torch.device("cpu"))
    optimizer = OPTIMIZERS["AdamW"][1](named)
    step(named, optimizer, 0)
    optimizer.state[named[0][1]]["exp_avg"] = torch.zeros(3).as_subclass(Packed)
    with pytest.raises(ValueError, match="state 'exp_avg' of AdamW is a Packed that is sharded, paged or packed"):
        StateOffload(optimizer).offload()
    assert type(optimizer.state[named[1][1]]["exp_avg"]) is Tensor  # nothing has moved


def test_nothing_to_move_is_an_error() -> None:
    named = [("weight", nn.Parameter(torch.zeros(3)))]
    optimizer = torch.optim.SGD(named, lr=0.1)
    step(named, optimizer, 0)
    optimizer.state[named[0][1]]["step"] = 1
    with pytest.raises(ValueError, match=r"no state of SGD is on the device .* nothing to offload; remove"):
        StateOffload(optimizer).offload()


@pytest.mark.gpu
def test_the_gpu_has_its_memory_back() -> None:
    device = torch.device("cuda")
    named = [("weight", nn.Parameter(torch.zeros(2**22, 4, device=device)))]
    optimizer = torch.optim.AdamW(named, lr=1e-3, fused=True)
    offload = StateOffload(optimizer)
    step(named, optimizer, 0)
    held = torch.cuda.memory_allocated()
    moved = offload.offload()
    assert moved >= 2 * 4 * 2**24
    assert held - torch.cuda.memory_allocated() >= moved
    assert all(t.is_pinned() for t in states(optimizer))
    assert offload.restore() == moved
    assert torch.cuda.memory_allocated() == held
    offload.offload()
    offload.close()
    assert not any(t.is_pinned() for t in states(optimizer))
