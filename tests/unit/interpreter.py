"""Triton's interpreter, which must be chosen before triton is imported: checks run in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def interpreted_checks(script: Path) -> dict[str, str | None]:
    """What each check of ``script`` says under the interpreter; ``script`` ends with `print_checks`."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def print_checks(checks: Mapping[str, Callable[[torch.device], None]]) -> None:
    """Run ``checks`` on the CPU and print ``{check: what went wrong}`` as JSON."""
    found: dict[str, str | None] = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            check(torch.device("cpu"))
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()[-1500:]
    print(json.dumps(found))
