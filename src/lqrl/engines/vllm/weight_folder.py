"""The folder in which weights lie until every reader has them."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "lqrl-weights-"
PATIENCE_S = 2.0
_PAUSE_S = 0.02


def _stays(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return folder.exists()


@contextmanager
def weight_folder(parent: Path | str | None, patience_s: float = PATIENCE_S) -> Iterator[Path]:
    """A new folder in ``parent``, removed at the end with all that is in it.

    After an error or an interrupt a thread may still write there, so it is removed until it stays away. What remains
    after ``patience_s`` seconds is named in a warning; the error that ended the work is never replaced by another.

    Raises:
        OSError: when it cannot be made.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        yield folder
    finally:
        until = time.monotonic() + patience_s
        while _stays(folder) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        if folder.exists():
            log.warning(
                "%s, which holds weights, could not be removed in %.1f s: remove it by hand", folder, patience_s
            )
