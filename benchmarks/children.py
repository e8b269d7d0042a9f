"""Measurements in processes of their own: one that fails or hangs costs its rows and nothing else."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from options import duration

Row = dict[str, Any]
_MARK = "row: "
_TICK = 0.5  # seconds between two looks at whether a silent child still lives


@dataclass(frozen=True)
class Job:
    """What one child measures.

    Attributes:
        script: the file it runs.
        case: what it is given, as JSON, after ``--case``.
        rows: what tells its rows apart, in the order it sends them.
        python: its interpreter.
        environment: variables in addition to those of this process.
    """

    script: str
    case: Row
    rows: Sequence[Row]
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


def add_job_options(parser: argparse.ArgumentParser, what: str, *, limit: float, budget: float = 570) -> None:
    """The options of every benchmark that measures in children; ``--case`` is what a child is started with.

    Args:
        parser: of the benchmark.
        what: one job measures.
        limit, budget: defaults, see `run_jobs`.
    """
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"],
        help="on a CPU that others use too, OMP_NUM_THREADS=1 keeps a tiny model's threads from waiting for each other",
    )  # fmt: skip
    parser.add_argument("--limit", type=duration, default=limit, help=f"seconds for {what}")
    parser.add_argument("--budget", type=duration, default=budget, help="seconds for everything")
    parser.add_argument("--rows", type=Path, help="a file that JSON lines are appended to")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)


def searched_first(*folders: Path | None) -> dict[str, str]:
    """The variable that has a child look for modules in ``folders`` before where this process does."""
    places = [*(str(folder.resolve()) for folder in folders if folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, places))} if any(places) else {}


# ---------------------------------------------------------------- in a child


def wait_for_turn() -> None:
    """Called when everything is imported: the child before may still measure. Ends the process if its parent has."""
    if not sys.stdin.readline():
        os._exit(1)


def send(row: Row) -> None:
    """Tell the parent a row."""
    print(f"\n{_MARK}{json.dumps(row)}", flush=True)


def failure(error: BaseException) -> Row:
    """A row that says what went wrong, by its first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300] or 'no message'}"}


def versions(*packages: str) -> dict[str, str]:
    """Versions of this interpreter and of those of ``packages`` that are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


# ---------------------------------------------------------------- in the parent


def _cut(reason: str) -> Row:
    """A row that the user's time limits cost, which is no failure."""
    return {"error": reason, "cut": True}


class _Child:
    """A running job."""

    def __init__(self, job: Job) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (as long as the child)
        self.process = subprocess.Popen(
            [job.python, job.script, "--case", json.dumps(job.case)],
            env={**os.environ, **job.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def go(self) -> None:
        """Let it measure."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has died; `row` says so
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def row(self, deadline: float) -> Row:
        """The next row, or one with an ``error`` when there will be none."""
        while True:
            ended = self.process.poll() is not None
            try:
                line = self._lines.get(timeout=max(0.0, min(_TICK, deadline - time.monotonic())))
            except queue.Empty:
                if ended:
                    return {"error": f"exit code {self.process.returncode}: {self._last_words()}"}
                if time.monotonic() >= deadline:
                    return _cut(f"no result within the time limit; it printed last: {self._said or 'nothing'}")
                continue
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            self._said = line.strip()[:300] or self._said

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no message"

    def end(self) -> None:
        """Kill it with all that it has started; libraries' threads may hang at a normal exit."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def run_jobs(jobs: Sequence[Job], *, limit: float, budget: float, ahead: bool) -> Iterator[Row]:
    """Every row of every job, one job after the other; a missing one has an ``error``.

    Args:
        jobs: what to run.
        limit: seconds for one job, from its turn on.
        budget: seconds for all; jobs whose turn would come later are not run.
        ahead: start a job while the one before it runs, so that it has imported what it needs when its turn comes. A
            job that computes on the CPU would disturb the one before.
    """
    end, waiting = time.monotonic() + budget, _Child(jobs[0]) if jobs else None
    try:
        for i, job in enumerate(jobs):
            if time.monotonic() >= end:
                yield from (key | _cut(f"not run: {budget:.0f} s are over") for key in job.rows)
                continue
            child = waiting or _Child(job)
            waiting = _Child(jobs[i + 1]) if ahead and i + 1 < len(jobs) else None
            child.go()
            deadline = min(end, time.monotonic() + limit)
            try:
                yield from (key | child.row(deadline) for key in job.rows)
            finally:
                child.end()
    finally:
        if waiting is not None:
            waiting.end()
