"""The GPU benchmarks run, small, on a CPU: a script must not fail late."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = {
    "aligned_linear.py": (["--tokens", "8"], ["| qkv, 8", "| down, 8", "| all, 8"]),
    "refresh.py": (["--layers", "1"], ["| fp8_per_channel", "| int8_w8a8"]),
    "exact_cost.py": (
        ["--batches", "8", "16", "--prompt", "8", "--tokens", "6", "--rows", "3"],
        [f"{name:16} {n:5d} {n * 6:8d} of {n * 6:8d}" for name in ("none", "int4_w4a16") for n in (8, 16)],
    ),
}


@pytest.mark.parametrize("script", list(SCRIPTS))
def test_a_benchmark_prints_its_rows(script, monkeypatch, capsys):
    options, wanted = SCRIPTS[script]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [script, "--device", "cpu", "--tiny", "--repeats", "1", *options])
    runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(any(line.startswith(row) for line in printed.splitlines()) for row in wanted), printed


def test_exported_checkpoints_are_read_back(monkeypatch, capsys):
    options = ["--peer", "lqrl", "--device", "cpu", "--tiny", "--families", "moe", "--formats", "int8_w8a8", "unknown"]
    script = "vllm_checkpoint.py"
    monkeypatch.setattr(sys, "argv", [script, *options, "--prompts", "2", "--tokens", "4", "--jobs", "2"])
    runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    read, refused = [row for row in capsys.readouterr().out.splitlines() if row.startswith("moe")]
    assert read.split()[1:6] == ["int8_w8a8", "8", "0.00e+00", "0.00e+00", "0.00e+00"]
    assert "not loaded: ValueError: unknown quantization scheme 'unknown'" in refused
