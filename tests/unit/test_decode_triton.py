"""The Triton kernels of decode steps: interpreted on the CPU, compiled on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decode_cases import CHECKS
from interpreter import needs_triton

CASES = Path(__file__).with_name("decode_cases.py")


@needs_triton
@pytest.mark.parametrize("name", list(CHECKS))
def test_interpreted_kernels_do_what_they_stand_for(name, interpreted):
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("name", list(CHECKS))
def test_compiled_kernels_do_what_they_stand_for(name):
    CHECKS[name](torch.device("cuda"))
