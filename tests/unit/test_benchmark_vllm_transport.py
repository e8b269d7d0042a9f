"""The benchmark of transports to a vLLM server, without vLLM: what children are told, and what it prints of rows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WAYS = ["cuda_ipc", "files", "cuda_ipc, layer by layer", "files, layer by layer"]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("vllm_transport")


def test_a_format_is_a_process_for_all_ways(benchmark, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/src")
    options = ["--formats", "none", "int8_w8a8", "--vllm-path", "/site", "--card", "1"]
    jobs = benchmark.make_jobs(benchmark.parse(options))
    assert [(job.case["format"], job.case["card"], job.environment["PYTHONPATH"]) for job in jobs] == [
        ("none", "1", "/site:/src"),
        ("int8_w8a8", "1", "/site:/src"),
    ]
    assert [[row["way"] for row in job.rows] for job in jobs] == [WAYS, WAYS]


def test_files_are_compared_with_the_same_way_through_memory(benchmark, capsys):
    table, medians = benchmark.Table(*"abcdefghi"), {}
    taken = {
        "format": "none",
        "least_ms": 90.0,
        "most_ms": 310.0,
        "sent_bytes": 8e9,
        "equal": True,
        "directory": "/tmp",
    }
    for way, ms in zip(WAYS, (100.0, 300.0, 200.0, 250.0), strict=True):
        benchmark.show(table, taken | {"way": way, "median_ms": ms, "equal": way != WAYS[1]}, medians)
    benchmark.show(table, {"format": "int4", "way": "files", "error": "no server"}, medians)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0] == ["none", WAYS[0], "100", "90 to 310", "1.00", "8.00", "80.0", "yes", "/tmp"]
    assert [row[4] for row in rows] == ["1.00", "3.00", "1.00", "1.25", ""]
    assert rows[1][7] == "NO"
    assert rows[4][-1] == "no server"


def test_files_go_where_there_is_room(benchmark):
    assert benchmark.room_for(2**60) != "/dev/shm"
    assert Path(benchmark.room_for(1)).is_dir()
