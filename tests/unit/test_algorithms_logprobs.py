"""Chunked log-probs: values and gradients of the plain formula, without its memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lqrl.algorithms import chunked_logprobs, head_logits, logprobs_with_entropy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def operands(rows: int, width: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(device, dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(device, dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator).to(device)
    return [hidden, weight, targets]


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    logits = hidden.double() @ weight.double().T / temperature
    return logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)


def test_logprobs_of_a_two_token_vocabulary() -> None:
    # Logits [2, 0]: p(0) = 1 / (1 + e^-2), so log p(0) = -log(1 + e^-2) = -0.126928.
    hidden, weight = torch.tensor([[2.0]]), torch.tensor([[1.0], [0.0]])
    assert chunked_logprobs(hidden, weight, torch.tensor([0])).item() == pytest.approx(-0.126928, abs=1e-6)


def test_temperature_divides_the_logits() -> None:
    # Logits [2, 0] / 2 = [1, 0]: log p(0) = -log(1 + e^-1) = -0.313262.
    hidden, weight = torch.tensor([[2.0]]), torch.tensor([[1.0], [0.0]])
    logprobs = chunked_logprobs(hidden, weight, torch.tensor([0]), temperature=2.0)
    assert logprobs.item() == pytest.approx(-0.313262, abs=1e-6)


def test_temperature_zero_scores_like_one() -> None:
    hidden, weight, targets = operands(5, 4, 7, torch.float32)
    greedy = chunked_logprobs(hidden, weight, targets, temperature=0.0)
    assert torch.equal(greedy, chunked_logprobs(hidden, weight, targets, temperature=1.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100, None])
def test_values_and_gradients_equal_the_plain_formula(chunk_size: int | None, device: str) -> None:
    hidden, weight, targets = operands(7, 5, 11, torch.float64, device)
    upstream = torch.linspace(-1, 1, 7, dtype=torch.float64, device=device)
    grads = []
    for fn in (
        lambda h, w: chunked_logprobs(h, w, targets, temperature=0.7, chunk_size=chunk_size),
        lambda h, w: reference(h, w, targets, 0.7),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs = fn(h, w)
        grads.append((logprobs.detach(), *torch.autograd.grad(logprobs, (h, w), upstream)))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, targets = operands(5, 3, 6, torch.float64)
    hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_logprobs(h, w, targets, temperature=1.3, chunk_size=2), (hidden, weight)
    )


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = operands(4, 3, 5, torch.float32)
    hidden.requires_grad_()
    chunked_logprobs(hidden, weight, targets).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_frozen_hidden_states_get_no_gradient() -> None:
    hidden, weight, targets = operands(4, 3, 5, torch.float32)
    weight.requires_grad_()
    chunked_logprobs(hidden, weight, targets).sum().backward()
    assert weight.grad is not None
    assert hidden.grad is None


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_operands_give_fp32_logprobs_of_the_exact_products(device: str) -> None:
    hidden, weight, targets = operands(64, 32, 100, torch.bfloat16, device)
    logprobs = chunked_logprobs(hidden, weight, targets, chunk_size=10)
    assert logprobs.dtype == torch.float32
    # Products of bf16 numbers are exact in fp32; only 32 additions round. Rounded logits would be off by 1e-2.
    torch.testing.assert_close(logprobs.double(), reference(hidden, weight, targets), rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_weight_gradient_is_summed_in_fp32(device: str) -> None:
    # 512 equal rows in 512 chunks: a bf16 sum would stop growing at 256 times its summand.
    hidden = torch.ones(512, 1, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.zeros(512, dtype=torch.int64, device=device)
    chunked_logprobs(hidden, weight, targets, chunk_size=1).sum().backward()
    # p = 1/2: each row adds 1 - 1/2 to the target's gradient and -1/2 to the other's.
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [256.0, -256.0]


def test_autocast_does_not_round_the_logits() -> None:
    hidden, weight, targets = operands(8, 16, 32, torch.float32)
    plain = chunked_logprobs(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(chunked_logprobs(hidden, weight, targets), plain)
        assert head_logits(hidden, weight).dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_nothing_larger_than_one_chunk_of_logits_is_made() -> None:
    hidden, weight, targets = operands(64, 4, 50, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    with LargestTensor() as largest:
        chunked_logprobs(hidden, weight, targets, chunk_size=8).sum().backward()
        logprobs_with_entropy(hidden, weight, targets, chunk_size=8)
    assert largest.numel == 8 * 50  # all logits would be 3200


def test_entropy_of_known_distributions() -> None:
    # Row 0: logits [0, 0], H = log 2.
    # Row 1: logits [log 3, 0], p = (3/4, 1/4), H = -3/4 log 3/4 - 1/4 log 1/4 = 0.562335.
    hidden, weight = torch.tensor([[0.0], [math.log(3)]]), torch.tensor([[1.0], [0.0]])
    result = logprobs_with_entropy(hidden, weight, torch.tensor([0, 1]))
    assert result.entropy.tolist() == pytest.approx([math.log(2), 0.562335], abs=1e-6)
    assert result.logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)


def test_entropy_is_detached_and_does_not_change_the_logprobs() -> None:
    hidden, weight, targets = operands(6, 4, 9, torch.float32)
    hidden.requires_grad_()
    result = logprobs_with_entropy(hidden, weight, targets, temperature=0.8, chunk_size=4)
    assert not result.entropy.requires_grad
    assert torch.equal(result.logprobs, chunked_logprobs(hidden, weight, targets, temperature=0.8, chunk_size=4))
    result.logprobs.sum().backward()
    assert hidden.grad is not None


def test_no_rows_give_no_logprobs_and_zero_gradients() -> None:
    hidden, weight, targets = operands(0, 4, 9, torch.float32)
    weight.requires_grad_()
    logprobs = chunked_logprobs(hidden, weight, targets)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, "select the predicting rows"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, "one target for each of 3 rows"),
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"temperature": float("nan")}, "temperature must be >= 0 and finite"),
        ({"temperature": float("inf")}, "temperature must be >= 0 and finite"),
        ({"chunk_size": 0}, "use None"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    hidden, weight, targets = operands(3, 4, 5, torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(**arguments)  # type: ignore[arg-type]
