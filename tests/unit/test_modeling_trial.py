"""Kernels that are tried before a learner relies on them."""

from __future__ import annotations

import pytest
import torch

from lqrl.modeling.head import HeadKernels, exact_logprobs, head_kernels
from lqrl.modeling.trial import compare, kernels_work, works

CPU = torch.device("cpu")


def test_what_is_wrong_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    def attempt() -> None:
        compare("a sum", (torch.tensor([1.0, 2.0]), torch.ones(2)), (torch.tensor([1.0, 2.0]), torch.zeros(2) + 1.01))

    assert works("sums", CPU, lambda: None)
    assert not caplog.records
    assert not works("sums", CPU, attempt)
    assert "sums do not work on cpu" in caplog.text
    assert "result 1 of a sum is off by 9.9e-03 of its size in torch.float32" in caplog.text


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_wrong(value: float) -> None:
    with pytest.raises(RuntimeError, match="result 0 of a sum"):
        compare("a sum", (torch.tensor([1.0, value]),), (torch.tensor([1.0, 2.0]),))


def test_results_are_as_near_as_their_dtype_lets_one_expect() -> None:
    wanted = (torch.tensor([1.0, 2.0]),)
    compare("a sum", (torch.tensor([1.0, 2.02], dtype=torch.bfloat16),), wanted)
    with pytest.raises(RuntimeError, match="off by"):
        compare("a sum", (torch.tensor([1.0, 2.02]),), wanted)


def test_on_the_cpu_the_learner_has_tensor_operations() -> None:
    assert not kernels_work(CPU)
    assert head_kernels(CPU, exact=False) == HeadKernels(None, None)
    assert head_kernels(CPU, exact=True) == HeadKernels(exact_logprobs, None)
