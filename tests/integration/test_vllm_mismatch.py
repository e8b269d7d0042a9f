"""`benchmarks/vllm_mismatch.py` beside a real vLLM: what it captures is what vLLM computed."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm_models import DEVICE

pytestmark = pytest.mark.vllm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """By table."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        tables.setdefault(row["table"], []).append(row)
    return tables


def test_a_learner_of_vllms_parts_gives_its_hidden_states(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    mismatch = import_module("vllm_mismatch")
    options = ["--model", "tiny", "--layers", "2", "--prompts", "3", "--prompt", "7", "--tokens", "5", "--seeds", "0"]
    options += ["--sequences", "2", "--formats", "int8_w8a8", "--modes", "eager", "--device", DEVICE.type]
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["vllm_mismatch.py", *options, "--rows", str(path)])
    mismatch.main()
    printed, tables = capsys.readouterr().out, rows_of(path)
    assert not [row for rows in tables.values() for row in rows if "error" in row], printed
    assert [row["learner"] for row in tables["logprobs"]] == [
        "not aligned",
        "fake quantization",
        "aligned, own rounding",
        "aligned",
        "aligned, rounded logits",
        "vLLM itself, in one pass",
    ]
    assert all(row["tokens"] == 15 and 0 <= row["k3"] < 0.5 for row in tables["logprobs"])
    assert [row["layer"] for row in tables["layers"]] == [0, 1]
    # What a part of the learner does with vLLM's inputs is what vLLM's part did, but for rounding.
    assert len(tables["alone"]) > 2 * 12
    assert max(row["relative"] for row in tables["alone"]) < 0.02
    assert {row["run"] for row in tables["alone"] if row["part"] == "attention"} == {"decode", "prefill"}
    # With vLLM's parts instead of its own the learner has vLLM's hidden states, and with its head the log-probs.
    swaps = {row["swap"]: row for row in tables["swaps"]}
    assert swaps["nothing"]["forward_equal"] == 1
    assert swaps["all but the head"]["hidden"]["relative"] < 1e-3
    assert swaps["vLLM decoding"]["mean"] < 0.02  # logits in bf16, of other numbers of rows
