"""The learning benchmark keeps its rows: a call goes on where another was interrupted, and reads files of its past."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "learning.py"
PAST = ROOT / "benchmarks" / "results" / "2026-11-28_learning_xeon.jsonl"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SCRIPT.parent))
    learning = SimpleNamespace(**runpy.run_path(str(SCRIPT), run_name="learning"))
SETTINGS = {"epochs": 2, "minibatches": 2, "iterations": 50}
ROW = {"seconds": 1.0, "pass_at_1": [0.3, 0.5, 0.4], "pass_at_8": [0.7, 0.7, 0.7], "k3": 1e-3, "ess": 0.9}


def row(**changes: Any) -> dict[str, Any]:
    return {"format": "int8_w8a8", "way": "exact", "seed": 1, **SETTINGS, **ROW, **changes}


def read(path: Path) -> set[tuple[str, str, int]]:
    return set(learning.read(path, args()))


def args(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**SETTINGS, "config": learning.QUICKSTART, "device": "cpu", "set": [], **changes})


def test_runs_under_other_settings_and_failed_ones_are_repeated(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    others = [row(seed=2, epochs=3), row(seed=3, minibatches=1), row(seed=4, iterations=5), row(seed=5, error="exit 1")]
    for one in [row(), *others]:
        learning.append(path, one)
    assert read(path) == {("int8_w8a8", "exact", 1)}
    learning.append(path, row(seed=5))
    assert read(path) == {("int8_w8a8", "exact", 1), ("int8_w8a8", "exact", 5)}


def test_runs_of_another_task_or_device_are_repeated(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    other = args(config="other.yaml", device="cuda", set=[("a.b", "c")])
    learning.append(path, row())
    learning.append(path, row(seed=2, config="other.yaml"))
    learning.append(path, row(seed=3, **learning.settings(other)))
    assert read(path) == {("int8_w8a8", "exact", 1)}
    assert set(learning.read(path, other)) == {("int8_w8a8", "exact", 3)}


def test_a_line_that_was_cut_off_costs_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.jsonl"
    learning.append(path, row())
    path.write_text(path.read_text() + json.dumps(row(seed=2))[:50])
    learning.append(path, row(seed=3))
    assert read(path) == {("int8_w8a8", "exact", 1), ("int8_w8a8", "exact", 3)}
    assert f"{path}:2 is no row" in capsys.readouterr().err


def test_a_complete_file_is_a_table_without_training(monkeypatch, capsys, tmp_path: Path):
    copy = tmp_path / "rows.jsonl"
    copy.write_bytes(PAST.read_bytes())
    options = ["--rows", str(copy), "--epochs", "2", "--formats", "int3_w3a16_g32", "--ways", "tis", "aligned"]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", ["learning.py", *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert copy.read_bytes() == PAST.read_bytes()
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith("| int3_w3a16_g32 | tis | 0.392 | 0.370 0.399 0.406 | 0.688 | 6.7e-02 | 0.846 |")
    assert second.startswith("| int3_w3a16_g32 | aligned | 0.435 | 0.425 0.438 0.444 | 0.693 | 1.9e-13 | 1.000 |")
    assert "| 0 of 3 |" in second


def test_numbers_come_from_the_logged_lines():
    lines = [{"val/pass@1": "0.3", "val/pass@8": "0.7", "mismatch/k3": ""}]
    lines += [
        {
            "mismatch/k3": str(i),
            "mismatch/ess": "0.5",
            "mismatch/log_ratio_max": str(9 - i),
            "tbpo/dropped_fraction": "0.25",
        }
        for i in range(3)
    ]
    found = learning.numbers(lines)
    assert (found["pass_at_1"], found["pass_at_8"]) == ([0.3], [0.7])
    assert (found["k3"], found["k3_max"], found["ess"]) == (1, 2, 0.5)
    assert (found["log_ratio_max"], found["clip"], found["truncated"]) == (9, 0.25, 0)


def test_less_than_half_of_the_best_is_a_collapse():
    assert learning.collapsed(row(pass_at_1=[0.3, 0.5, 0.24]))
    assert not learning.collapsed(row(pass_at_1=[0.3, 0.5, 0.26]))
    summary = learning.summary([row(), row(pass_at_1=[0.3, 0.1], log_ratio_max=2.0), row(error="exit 1")])
    assert summary[:3] == ["0.250", "0.100 0.400, 1 failed", "0.700"]
    assert summary[5:9] == ["2.0e+00", "", "1 of 2", "1"]


def test_full_precision_has_ways_of_its_own():
    assert learning.ways_of("none", learning.WAYS) == ["fp32", "bf16", "exact"]
    assert learning.ways_of("int4_w4a4", learning.WAYS) == ["naive", "tis", "acr", "uaq", "aligned", "tbpo", "exact"]
