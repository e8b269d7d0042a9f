"""Of a prompt, one row of the last layer: interpreted, and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreter import needs_triton
from last_token_cases import CHECKS

CASES = Path(__file__).with_name("last_token_cases.py")
pytestmark = pytest.mark.timeout(900)  # the interpreter is slow


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", list(CHECKS))
def test_interpreted_kernels_do_what_they_stand_for(name, interpreted):
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("name", list(CHECKS))
def test_compiled_kernels_do_what_they_stand_for(name):
    CHECKS[name](torch.device("cuda"))
