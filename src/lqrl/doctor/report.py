"""What the doctor found: rows with a status and a remedy, in sections, as a plain table or as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from lqrl.extras import pip_install

Status = Literal["ok", "emulated", "missing", "FAILED"]
"""Works as it is meant to; gives the right results on a slower way; is not there; is there and gives wrong results."""

TRACEBACK_VARIABLE = "LQRL_TRACEBACK"
WHERE = f"{TRACEBACK_VARIABLE}=1 lqrl doctor shows where"
_LONGEST_ERROR = 160
_WIDEST_DETAIL = 80  # a longer one pushes its own remedy to the right, not those of all rows


class WrongResultError(RuntimeError):
    """A self-test ran and its result is not the expected one."""


@dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        status: see `Status`.
        detail: one line: what was found, and how it computes.
        remedy: one line: what to install or to change; empty where there is nothing to do.
        facts: the detail for machines, of JSON's types.
    """

    name: str
    status: Status
    detail: str = ""
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """Rows under one title."""

    title: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        """The title, then a line a row in aligned columns: name, status, detail, ``-> remedy``."""
        names = max((len(row.name) for row in self.rows), default=0)
        details = min(max((len(row.detail) for row in self.rows if row.remedy), default=0), _WIDEST_DETAIL)
        lines = [self.title]
        for row in self.rows:
            remedy = row.remedy and f"-> {row.remedy}"
            lines.append(f"  {row.name:<{names}}  {row.status:<8}  {row.detail:<{details}}  {remedy}".rstrip())
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The section in JSON's types."""
        return {"title": self.title, "rows": [asdict(row) for row in self.rows]}


def attempt(name: str, test: Callable[..., Row], *args: Any, remedy: str = WHERE) -> Row:
    """The row that ``test(name, *args)`` returns, or one that says in one line why there is none.

    A module that is not installed makes the row ``missing``, everything else that ``test`` raises makes it ``FAILED``.

    Args:
        name: of the row.
        test: raises when a result is wrong.
        args: see above.
        remedy: of a row that failed.

    Raises:
        Exception: what ``test`` raised, when ``LQRL_TRACEBACK`` is set and the row would be ``FAILED``.
    """
    try:
        return test(name, *args)
    except ModuleNotFoundError as error:
        package = _absent(error)
        if package is not None:
            return Row(name, "missing", f"needs {package}", pip_install(package))
        return _failed(name, error, remedy)
    except (Exception, SystemExit) as error:  # a package may give up the whole process when it is imported
        return _failed(name, error, remedy)


def _failed(name: str, error: Exception | SystemExit, remedy: str) -> Row:
    """Called while ``error`` is handled."""
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    kind = "" if isinstance(error, WrongResultError) else f"{type(error).__name__}: "
    return Row(name, "FAILED", kind + one_line(error), remedy)


def _absent(error: ModuleNotFoundError) -> str | None:
    """The package that is not installed; ``None`` when it is one of its modules that was not found."""
    cause = error if error.name or not isinstance(error.__cause__, ModuleNotFoundError) else error.__cause__
    package = (cause.name or "").partition(".")[0]
    return package if package and find_spec(package) is None else None


def one_line(error: BaseException) -> str:
    """What ``error`` says in its first line, and in the next one where that ends with a colon; the middle may go."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    half = _LONGEST_ERROR // 2
    return text if len(text) <= _LONGEST_ERROR else f"{text[:half]} ... {text[-half:]}"
