"""Exact mode on a pretrained model of thirty layers, whose activations have outliers: SmolLM2-135M-Instruct.

Set ``LQRL_TEST_SMOLLM2`` to the folder that ``examples/convert_smollm2.py`` writes.
"""

from __future__ import annotations

import os

import pytest
import torch
from exact_sides import both, compared, prompts

from lqrl.types import SamplingParams

FOLDER = os.environ.get("LQRL_TEST_SMOLLM2", "")


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="LQRL_TEST_SMOLLM2 names no model")
def test_ten_thousand_tokens_of_smollm2():
    case = both(FOLDER, "int8_w8a8", torch.float32, max_num_seqs=48, max_num_batched_tokens=500)
    made = compared(case, prompts(80, 60, 49152), SamplingParams(n=4, max_tokens=32, ignore_eos=True), rows=24)
    assert made == (80 * 4 * 32, 0)  # 10240
