"""A measurement in a child process that fails, hangs or says too little costs its own rows, and says why."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHILD = """
import json, sys, time
sys.path.insert(0, {benchmarks!r})
from children import failure, send, wait_for_turn
case = json.loads(sys.argv[2])
wait_for_turn()
for value in case["values"]:
    if value == "hang":
        print("about to hang", flush=True)
        time.sleep(60)
    if value == "raise":
        raise KeyError("lost")
    if value == "caught":
        send(failure(ValueError("too large")))
    else:
        send({{"value": value}})
print("the last words", file=sys.stderr)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from children import Job, run_jobs

    script = tmp_path / "child.py"
    script.write_text(CHILD.format(benchmarks=str(BENCHMARKS)))

    def rows(*cases, limit=20.0, budget=60.0, ahead=False):
        jobs = [Job(str(script), {"values": values}, [{"of": i}] * n) for i, (values, n) in enumerate(cases)]
        return list(run_jobs(jobs, limit=limit, budget=budget, ahead=ahead))

    return rows


@pytest.mark.parametrize("ahead", [False, True])
def test_every_row_comes_in_order_and_a_child_that_would_not_end_is_ended(run, ahead):
    rows = run(([1, 2, "hang"], 2), (["caught", 4], 2), ahead=ahead)
    assert rows == [
        {"of": 0, "value": 1},
        {"of": 0, "value": 2},
        {"of": 1, "error": "ValueError: too large"},
        {"of": 1, "value": 4},
    ]


def test_a_child_that_dies_costs_the_rest_of_its_rows(run):
    first, lost, other = run(([1, "raise"], 2), ([3], 1))
    assert first == {"of": 0, "value": 1}
    assert lost == {"of": 0, "error": "exit code 1: KeyError: 'lost'"}
    assert other == {"of": 1, "value": 3}


def test_a_child_that_says_too_little_is_quoted(run):
    assert run(([1], 2))[1] == {"of": 0, "error": "exit code 0: the last words"}


def test_a_child_that_hangs_is_cut_off(run):
    rows = run((["hang", 1], 2), ([3], 1), limit=3.0, ahead=True)
    assert [(row.get("error"), row.get("cut")) for row in rows] == [
        ("no result within the time limit; it printed last: about to hang", True)
    ] * 2 + [(None, None)]


def test_no_job_begins_when_the_time_is_over(run):
    rows = run((["hang"], 1), ([3], 1), budget=2.0, ahead=True)
    assert rows[1] == {"of": 1, "error": "not run: 2 s are over", "cut": True}


@pytest.mark.parametrize(
    ("row", "failed"), [({"value": 1}, False), ({"error": "late", "cut": True}, False), ({"error": "lost"}, True)]
)
def test_a_row_that_failed_is_an_exit_status_and_one_that_was_cut_is_not(row, failed, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from rows import Record

    record = Record(None, "speed")
    for each in (row, {"value": 2}):
        record.add(each)
    with pytest.raises(SystemExit, match="1") if failed else nullcontext():
        record.end()


def test_rows_are_appended_and_printed(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from rows import Record, Table

    path = tmp_path / "deep" / "rows.jsonl"
    for value in (1.5, 2.5):
        Record(path, "speed").add({"value": value})
    Record(None, "speed").add({"value": 3.5})
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["benchmark"], row["value"]) for row in kept] == [("speed", 1.5), ("speed", 2.5)]
    assert all(len(row["date"]) == 10 for row in kept)
    Table("name", "value", "note").row("a|b", 1234.5, None)
    assert capsys.readouterr().out == "| name | value | note |\n| --- | --- | --- |\n| a/b | 1234 |  |\n"
