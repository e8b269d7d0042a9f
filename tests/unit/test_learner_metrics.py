"""Metrics of a step: what is logged of a batch does not depend on how it was cut."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.spawn import spawn

from lqrl.algorithms import TokenTIS
from lqrl.algorithms.correction import effective_share
from lqrl.learner.update import all_max, sum_ratios
from lqrl.types import Maximum, Ratio

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 8), max_size=4))
def test_a_cut_changes_no_metric_of_the_mismatch(seed: int, cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, behavior = (-3 * torch.rand(8, 5, generator=generator) for _ in range(2))
    mask = torch.rand(8, 5, generator=generator) < 0.4
    whole = sum_ratios([TokenTIS()(old, behavior, mask).metrics], CPU)
    stops = [0, *sorted(cuts), 8]
    rows = [slice(a, b) for a, b in pairwise(stops)]
    parts = sum_ratios([TokenTIS()(old[r], behavior[r], mask[r]).metrics for r in rows], CPU)
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=1e-6, msg=name)
    ratio = (old - behavior).exp()[mask]
    if len(ratio):
        assert abs(whole["mismatch/ess"] - float(ratio.sum() ** 2 / ratio.square().sum() / len(ratio))) < 1e-5
        assert abs(whole["mismatch/log_ratio_max"] - float((old - behavior)[mask].max())) < 1e-6
    else:
        assert whole["mismatch/log_ratio_max"] == whole["mismatch/ess"] == 0


def test_maxima_of_nothing_do_not_count() -> None:
    nothing = Maximum(torch.tensor(-torch.inf), torch.tensor(0.0))
    some = Maximum(torch.tensor(-2.0), torch.tensor(1.0))
    assert sum_ratios([{"a": nothing}, {"a": some}, {"a": nothing}], CPU) == {"a": -2.0}
    assert sum_ratios([{"a": nothing}], CPU) == {"a": 0.0}
    assert sum_ratios([], CPU) == {}


def test_a_share_needs_both_moments() -> None:
    assert effective_share({"mismatch/ratio_mean": 1.0}) == {"mismatch/ratio_mean": 1.0}
    moments = {"mismatch/ratio_mean": 2.0, "mismatch/ratio_square_mean": 8.0, "mismatch/ess": 0.9}
    assert effective_share(moments)["mismatch/ess"] == 0.5


class Percent(Ratio):
    """What a loss of one's own may return."""


def test_a_ratio_of_ones_own_is_a_ratio() -> None:
    one, three = Percent(torch.tensor(1.0), torch.tensor(2.0)), Percent(torch.tensor(3.0), torch.tensor(2.0))
    assert sum_ratios([{"m": one}], CPU) == {"m": 0.5}
    assert sum_ratios([{"m": one}, {"m": three}], CPU) == {"m": 1.0}
    largest = Maximum(torch.tensor(1.0), torch.tensor(1.0))
    for pair in ((one, largest), (largest, one)):
        with pytest.raises(TypeError):
            pair[0] + pair[1]


def _of_a_rank(rank: int, store: str, nan_at: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    try:
        value = torch.tensor(math.nan if rank == nan_at else rank - 5.0)
        own = {"largest": Maximum(value, torch.tensor(1.0)), "mean": Ratio(torch.tensor(rank + 1.0), torch.tensor(1.0))}
        metrics = sum_ratios([own] if rank != 1 else [], CPU)  # the second rank has nothing to learn
        assert metrics["mean"] == 2.0
        assert math.isnan(metrics["largest"]) if nan_at >= 0 else metrics["largest"] == -3.0
        assert all_max(torch.tensor([1.0 * rank, -rank])).tolist() == [2.0, 0.0]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("nan_at", [-1, 0, 2])
def test_maxima_over_ranks(nan_at: int, tmp_path: Path) -> None:
    spawn(_of_a_rank, (str(tmp_path / "store"), nan_at), nprocs=3)
