"""Muon on matrices and AdamW elsewhere: each equals PyTorch's own, and a resumed run is the same run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lqrl.learner import MuonAdamW
from lqrl.learner.muon import orthogonal_factor
from lqrl.modeling.backbone import load_model
from lqrl.testing import tiny_config

LR, DECAY = 1e-2, 0.1
Named = list[tuple[str, nn.Parameter]]


def parameters(**shapes: tuple[int, ...]) -> Named:
    generator = torch.Generator().manual_seed(0)
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]


def gradient(parameter: Tensor, step: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))


def advance(named: Named, optimizer: torch.optim.Optimizer, first: int = 0, steps: int = 3) -> None:
    for step in range(first, first + steps):
        for _, parameter in named:
            parameter.grad = gradient(parameter, step)
        optimizer.step()


def trained(named: Named, make: Callable[[Named], torch.optim.Optimizer]) -> list[Tensor]:
    named = copy.deepcopy(named)
    advance(named, make(named))
    return [parameter.detach() for _, parameter in named]


def muon(named: Named) -> MuonAdamW:
    return MuonAdamW(named, lr=LR, weight_decay=DECAY)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_the_orthogonal_factor_has_the_singular_vectors_and_no_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal_factor(matrix).float()
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.25
    assert values.median() > 0.7
    # In the basis of the singular vectors it is diagonal, up to bf16.
    diagonal = u.T @ found @ vh.T
    assert (diagonal - diagonal.diagonal().diag()).abs().max() < 0.03
    assert orthogonal_factor(torch.zeros(shape)).count_nonzero() == 0


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_matrices_step_as_in_torch(shape: tuple[int, int]) -> None:
    """Up to bf16: both iterate in it, PyTorch with other roundings in between."""
    start = parameters(weight=shape)
    (ours,) = trained(start, muon)
    (theirs,) = trained(
        start, lambda named: torch.optim.Muon(named, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    )
    moved = (theirs - start[0][1].detach()).norm()
    assert (ours - theirs).norm() < 0.03 * moved


def test_the_rest_steps_as_adamw() -> None:
    start = parameters(**{"model.embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8), "norm.weight": (8,)})
    ours = trained(start, muon)
    theirs = trained(start, lambda named: torch.optim.AdamW(named, lr=LR, weight_decay=DECAY))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_a_step_has_the_size_of_adamws() -> None:
    start = parameters(weight=(96, 256))
    (moved,) = trained(start, lambda named: MuonAdamW(named, lr=LR, weight_decay=0.0, momentum=0.0))
    rms = (moved - start[0][1].detach()).square().mean().sqrt() / 3**0.5
    assert rms == pytest.approx(0.2 * LR, rel=0.25)


def test_stacked_experts_are_separate_matrices() -> None:
    start = parameters(experts=(3, 16, 32))
    (stacked,) = trained(start, muon)
    for i in range(3):
        named = [("expert", nn.Parameter(start[0][1].detach()[i].clone()))]
        optimizer = muon(named)
        for step in range(3):
            named[0][1].grad = gradient(start[0][1], step)[i]
            optimizer.step()
        torch.testing.assert_close(stacked[i], named[0][1].detach(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_muon_gets_the_linear_layers_of_a_model(family: str) -> None:
    model = load_model(tiny_config(family), dtype=torch.float32, seed=0)
    optimizer = MuonAdamW(model.named_parameters())
    taken = {name for name, p in model.named_parameters() if optimizer.is_matrix(name, p)}
    assert taken == {
        f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"
    }


def test_a_resumed_run_is_the_same_run() -> None:
    start = parameters(weight=(8, 16), bias=(8,))
    whole, half = copy.deepcopy(start), copy.deepcopy(start)
    optimizer = muon(whole)
    advance(whole, optimizer, steps=4)
    first = muon(half)
    advance(half, first, steps=2)
    second = muon(half)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    advance(half, second, first=2, steps=2)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole, half, strict=True))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    named = parameters(weight=(4, 4), bias=(4,))
    before = [parameter.detach().clone() for _, parameter in named]
    muon(named).step()
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, named, strict=True))


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ([nn.Parameter(torch.zeros(2, 2))], {}, "give it named_parameters"),
        ([("weight", nn.Parameter(torch.zeros(2, 2).bfloat16()))], {}, "master_dtype: float32"),
        (parameters(weight=(2, 2)), {"lr": -1.0}, "lr=-1.0"),
        (parameters(weight=(2, 2)), {"newton_schulz_steps": 0}, "newton_schulz_steps=0"),
        (parameters(weight=(2, 2)), {"momentum": 1.0}, r"momentum and betas in \[0, 1\), got 1.0"),
    ],
    ids=["names", "dtype", "lr", "steps", "momentum"],
)
def test_what_it_cannot_do_is_refused(params: list, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MuonAdamW(params, **options)
