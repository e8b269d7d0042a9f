"""The benchmark of vLLM's refreshes, without vLLM: what its children are told, and what it prints of their rows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("vllm_refresh")


def test_a_format_is_a_process_that_finds_vllm_first(benchmark, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/src")
    jobs = benchmark.make_jobs(benchmark.parse(["--formats", "none", "int8_w8a8", "--vllm-path", "/site"]))
    assert [(job.case["format"], job.environment["PYTHONPATH"]) for job in jobs] == [
        ("none", "/site:/src"),
        ("int8_w8a8", "/site:/src"),
    ]
    assert [(row["format"], row["way"], row["layers"]) for job in jobs for row in job.rows] == [
        (name, way, 36) for name in ("none", "int8_w8a8") for way in ("reload", "direct")
    ]


def test_a_direct_refresh_is_compared_with_the_reload_of_its_format(benchmark, capsys):
    table, reloads = benchmark.Table(*"abcdefghijklm"), {}
    taken = {"least_ms": 1.0, "most_ms": 2.0, "sent_bytes": 8e9, "floor_ms": 5.5, "equal": True}
    for row in (
        {"format": "none", "way": "reload", "median_ms": 250.0} | taken,
        {"format": "none", "way": "direct", "median_ms": 25.0} | taken | {"equal": False},
        {"format": "int4", "way": "direct", "error": "declined"},
    ):
        benchmark.show(table, row, reloads)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0][:8] == ["none", "reload", "250", "1.0 to 2.0", "1.00", "8.00", "5.50", "yes"]
    assert rows[1][4] == "10.0"
    assert rows[1][7] == "NO"
    assert rows[2][-1] == "declined"
