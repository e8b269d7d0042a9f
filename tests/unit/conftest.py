"""Fixtures of the tests of Triton kernels, and of those of GPU memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from interpreter import interpreted_checks


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """What the checks of the test module's ``CASES`` say under the interpreter."""
    return interpreted_checks(request.module.CASES)


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`fake_cuda.c`, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture
def whole_card() -> None:
    """Free memory is the card's: another process would be measured, and starved."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("needs the GPU for itself: run this file without -n")
