"""Exact mode by the number: as many sampled tokens as a test can afford, and not one whose log-prob differs."""

from __future__ import annotations

import pytest
import torch
from exact_sides import both, compared, prompts
from transformers import LlamaConfig

from lqrl import assets
from lqrl.quant.native_build import BuildError
from lqrl.quant.scheme import PRESETS
from lqrl.testing import tiny_config
from lqrl.types import SamplingParams

try:
    both(tiny_config("llama", layers=1), "none")
except BuildError:
    pytest.skip("no C compiler", allow_module_level=True)

FP32, BF16 = torch.float32, torch.bfloat16
POLICY = str(assets.path("countdown_policy"))


def llama(hidden: int, inner: int, heads: int, kv_heads: int, vocab_size: int) -> LlamaConfig:
    """Two layers with random weights, whose logits have a deviation of about 2.5: far from a fair choice."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    config.initializer_range = 2.5 * hidden**-0.5
    return config


# The shipped policy's layers, 64 and 160 wide, cannot hold groups of 128 or blocks of 64.
WIDE = {name: llama(128, 256, 4, 2, 64) for name in ("int4_w4a16", "nf4")}


def test_a_hundred_thousand_tokens_of_the_shipped_policy():
    # Fewer slots than samples: they are refilled, and most tokens are drawn in other company than they are scored in.
    case = both(POLICY, "int8_w8a8", max_num_seqs=200, max_num_batched_tokens=1000)
    made = compared(case, prompts(512, 24, 64), SamplingParams(n=8, max_tokens=32), rows=64)
    assert made == (512 * 8 * 32, 0)  # 131072


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scheme", [name for name in PRESETS if name != "bf16"])
def test_four_thousand_tokens_of_every_format(scheme: str, dtype: torch.dtype):
    case = both(WIDE.get(scheme, POLICY), scheme, dtype, max_num_seqs=20, max_num_batched_tokens=300)
    made = compared(case, prompts(64, 24, 64), SamplingParams(n=2, max_tokens=32), rows=32)
    assert made == (64 * 2 * 32, 0)  # 4096


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "dtype"), [("int8_w8a8", FP32), ("int8_w8a8", BF16), ("fp8_per_channel", BF16), ("none", FP32)]
)
def test_ten_thousand_tokens_in_the_shape_of_smollm2(scheme: str, dtype: torch.dtype):
    case = both(llama(576, 1536, 9, 3, 1024), scheme, dtype, max_num_seqs=48, max_num_batched_tokens=500)
    made = compared(case, prompts(80, 60, 1024), SamplingParams(n=4, max_tokens=32), rows=24)
    assert made == (80 * 4 * 32, 0)  # 10240
