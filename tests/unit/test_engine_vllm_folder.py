"""The folder of a refresh goes away with what is in it, also when somebody still writes there."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

from lqrl.engines.vllm.weight_folder import weight_folder


def writer(folder: Path, seconds: float) -> None:
    """Makes files in a folder for a while, as fast as it can."""

    def write() -> None:
        until, number = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            number += 1
            try:
                (folder / f"part-{number % 200}").mkdir(exist_ok=True)
            except OSError:  # it is gone
                return

    threading.Thread(target=write).start()


def interrupted(parent: Path, seconds: float) -> None:
    """A refresh that is interrupted while a thread writes."""
    with weight_folder(parent) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")
        writer(folder, seconds)
        raise KeyboardInterrupt


def test_an_interrupt_is_not_replaced_and_nothing_stays(tmp_path):
    for _ in range(10):
        with pytest.raises(KeyboardInterrupt):
            interrupted(tmp_path, 0.2)
        assert list(tmp_path.iterdir()) == []


def test_what_stays_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as where a file is held open on some systems
    with weight_folder(tmp_path, patience_s=0.05) as folder:
        pass
    assert f"{folder}, which holds weights, could not be removed in 0.1 s: remove it by hand" in caplog.text


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    with pytest.raises(OSError, match="missing"), weight_folder(tmp_path / "missing"):
        pass
