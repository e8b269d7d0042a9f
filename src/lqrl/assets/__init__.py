"""Files that ship with the package: a starting policy small enough for a CPU."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

PREFIX = "asset:"
"""Marks the name of a shipped model where a directory or hub name is expected: ``asset:countdown_policy``."""


def path(name: str) -> Path:
    """Directory of the shipped asset ``name``.

    Raises:
        FileNotFoundError: when no such asset ships; the message lists those that do.
    """
    root = Path(str(files(__name__)))
    shipped = sorted(p.name for p in root.iterdir() if p.is_dir() and p.name != "__pycache__")
    if name not in shipped:
        raise FileNotFoundError(f"no shipped asset {name!r}; there are: {', '.join(shipped)}")
    return root / name


def resolve(source: str | Path) -> str:
    """``source`` with ``asset:NAME`` replaced by the asset's directory; anything else is returned as it is.

    Raises:
        FileNotFoundError: see `path`.
    """
    source = str(source)
    return str(path(source.removeprefix(PREFIX))) if source.startswith(PREFIX) else source
