"""``lqrl`` as a fixture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_runs import LESS, QUICKSTART

from lqrl import cli


class Outcome:
    """Of one command: its exit status, what it printed last, and what it left."""

    def __init__(self, status: object, folder: Path, out: str, err: str) -> None:
        self.failed, self.out = status not in (0, None), out
        self.err = err + (status if isinstance(status, str) else "")  # SystemExit prints a string to stderr
        self.last = self.err.strip().splitlines()[-1] if self.err.strip() else ""
        self.files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture
def lqrl(tmp_path, monkeypatch, capsys):
    """``lqrl(command, option, ...)`` on the quickstart, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(command: str, *options: str, before: tuple[str, ...] = ("--config", str(QUICKSTART), *LESS)) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["lqrl", command, *before, *options])
        status: object = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code
        return Outcome(status, tmp_path, *capsys.readouterr())

    return call
