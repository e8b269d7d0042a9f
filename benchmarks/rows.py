"""Where rows of a benchmark go: a Markdown table on the screen, JSON lines in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


class Record:
    """JSON lines of rows, appended to a file as they come.

    Args:
        path: the file, or ``None`` to keep nothing.
        benchmark: what the rows belong to.
    """

    def __init__(self, path: Path | None, benchmark: str) -> None:
        self._path, self._start = path, {"benchmark": benchmark}
        self._started, self._failed = time.perf_counter(), False

    def add(self, row: Mapping[str, Any]) -> None:
        """Append ``row`` with its date."""
        self._failed |= "error" in row and "cut" not in row
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._start | {"date": date} | dict(row)) + "\n")

    def end(self) -> None:
        """Print how long all took; a row that failed, other than by a time limit, ends the program with status 1."""
        print(f"\n{time.perf_counter() - self._started:.0f} s", flush=True)
        if self._failed:
            raise SystemExit(1)


class Table:
    """A Markdown table, printed as it grows.

    Args:
        columns: their titles; the last one takes what went wrong.
    """

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._print(columns)
        self._print(["---"] * len(columns))

    def row(self, *cells: object) -> None:
        """A number below 10 is printed with three digits, a larger one without decimals, ``None`` as nothing."""
        self._print([_text(cell) for cell in cells])

    def _print(self, cells: Sequence[str]) -> None:
        assert len(cells) == len(self._columns)
        print("| " + " | ".join(cells) + " |", flush=True)


def _text(cell: object) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.2f}" if abs(cell) < 10 else f"{cell:.1f}" if abs(cell) < 100 else f"{cell:.0f}"
    return str(cell).replace("|", "/")
