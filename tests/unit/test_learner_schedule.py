"""A schedule of the learning rate counts iterations, also those in which nothing was learned."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR

from lqrl.learner.update import step_schedule


def test_iterations_without_an_optimizer_step_count_and_are_no_warning() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_schedule(schedule)
        step_schedule(None)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.75)
