"""Triton's interpreter, which must be chosen before triton is imported: checks run in a process of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


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


def mend_interpreter() -> None:
    """Make up for what Triton's interpreter lacks.

    Loop bounds that are loaded fail on numpy from 2.4 on. Products go through BLAS, whose fp32 sums depend on a row's
    place; in float64 that is below the rounding to fp32.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self, a, b, d, precision, imprecise):
        if d.data.dtype != np.float32:
            return dot(self, a, b, d, precision, imprecise)
        wide = [x.data for x in (a, b)]
        if a.dtype.primitive_bitwidth == 8:
            wide = [interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16) for x in (a, b)]
        product = np.matmul(*(x.astype(np.float64) for x in wide)) + d.data
        return interpreter.TensorHandle(product.astype(np.float32), d.dtype.scalar)

    interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot = patch_lang_tensor, create_dot
