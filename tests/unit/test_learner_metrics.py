"""Metrics of a step: what is logged of a batch does not depend on how it was cut."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lqrl.algorithms import TokenTIS
from lqrl.algorithms.correction import effective_share
from lqrl.learner.update import sum_ratios
from lqrl.types import Maximum

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
