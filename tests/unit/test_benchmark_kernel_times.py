"""What a table of kernels says about the time in which none runs."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def wait_lines(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from kernel_times import wait_lines

    return wait_lines


def test_waits_are_what_no_kernel_covers(wait_lines):
    # a and b overlap, b ends last; c begins 30 later, d 5 after it.
    spans = [(140.0, 150.0, "c"), (0.0, 40.0, "a"), (20.0, 110.0, "b"), (155.0, 200.0, "d")]
    first, longest, other = wait_lines(spans)
    assert first.split(",")[0].strip() == "idle 35 us of 200"
    assert longest.strip() == "30.0 us at 110: after b, before c"
    assert other.strip() == "5.0 us at 150: after c, before d"


def test_times_are_those_of_one_run(wait_lines):
    assert "idle 5 us of 20" in wait_lines([(0.0, 15.0, "a"), (25.0, 40.0, "b")], each=2)[0]
    assert wait_lines([]) == []
