"""The Triton kernels of exact mode: interpreted on the CPU, compiled on the GPU; and what needs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact_cases import CHECKS
from exact_sides import both, compared, prompts
from interpreter import needs_triton
from transformers import Qwen3Config

from lqrl.engines.fused_decoder import FusedDecoder
from lqrl.quant import exact, triton_use
from lqrl.quant.kv import METHODS, Cached
from lqrl.types import Prompt, SamplingParams

CASES = Path(__file__).with_name("exact_cases.py")
pytestmark = pytest.mark.timeout(900)  # the interpreter is slow


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", list(CHECKS))
def test_interpreted_kernels_are_right_row_by_row(name, interpreted):
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("name", list(CHECKS))
def test_compiled_kernels_are_right_row_by_row(name):
    CHECKS[name](torch.device("cuda"))


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("none", torch.bfloat16),
        ("none", torch.float32),
        ("int8_w8a8+kv_int8", torch.bfloat16),
        ("int4_w4a16", torch.bfloat16),
        ("int8_w8a16+lm_head", torch.bfloat16),
        ("fp8_per_channel+lm_head+kv_fp8", torch.bfloat16),
        ("fp8_per_tensor+kv_fp8_static", torch.bfloat16),
        ("fp8_per_block", torch.bfloat16),
    ],
)
def test_a_model_that_meets_every_tile_is_exact(scheme: str, dtype: torch.dtype):
    """Heights of 1 to 300 rows in decoding, thousands in prefill and learner, contexts of several key blocks."""
    config = Qwen3Config(
        vocab_size=9000, hidden_size=512, intermediate_size=2304, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    options = {"max_num_batched_tokens": 4000, "device": "cuda", "positions": 512}
    for slots, samples, rows in ((300, 6, 64), (70, 2, 7), (1, 1, 1)):
        case = both(config, scheme, dtype, max_num_seqs=slots, **options)
        asked = prompts(1 if slots == 1 else 50, 200, 9000)
        params = SamplingParams(n=samples, max_tokens=40)
        assert isinstance(case.engine.decoder.lean, FusedDecoder)
        assert compared(case, asked, params, rows=rows) == (len(asked) * samples * 40, 0)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("scheme", ["none", "fp8_per_channel+lm_head", "int4_w4a16"])
def test_wide_layers_and_a_large_vocabulary_are_exact(scheme: str):
    """The tiles of 129 to 256 rows for 16384 and 65536 outputs; more rows than a packed weight is read for."""
    config = Qwen3Config(
        vocab_size=66000, hidden_size=512, intermediate_size=8448, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    case = both(config, scheme, torch.bfloat16, max_num_seqs=256, device="cuda", positions=256)
    assert isinstance(case.engine.decoder.lean, FusedDecoder)
    asked, params = prompts(40, 100, 66000), SamplingParams(n=6, max_tokens=20)
    assert compared(case, asked, params, rows=64) == (40 * 6 * 20, 0)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("scheme", ["none", "int8_w8a8+kv_int8"])
def test_long_contexts_are_exact_however_many_programs_read_them(scheme: str):
    """Contexts of up to three parts: a few sequences are split between programs, many are not."""
    config = Qwen3Config(
        vocab_size=9000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=3000, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    asked = [Prompt(p.id, p.input_ids * 10) for p in prompts(6, 280, 9000)]
    for slots, samples in ((2, 1), (180, 30)):
        case = both(config, scheme, torch.bfloat16, max_num_seqs=slots, device="cuda", positions=3000)
        params = SamplingParams(n=samples, max_tokens=8)
        assert compared(case, asked, params, rows=4) == (len(asked) * samples * 8, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", list(METHODS.values()), ids=list(map(str, METHODS)))
def test_what_a_cache_holds_is_attended_to_as_its_values(method, dtype):
    q, k, v = torch.randn(3, 9, 2, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    key, value = (method.quantize(x, torch.tensor([0.0061])) for x in (k, v))
    sequences = exact.packed_sequences([2, 7])
    expected = exact.attention(q, key.values(dtype), value.values(dtype), sequences, 0.2)
    assert torch.equal(exact.attention(q, key, value, sequences, 0.2), expected)
    assert not torch.equal(exact.attention(q, k, v, sequences, 0.2), expected)
    with pytest.raises(TypeError, match=r"codes of int8 or float8_e4m3fn, not torch\.int16"):
        exact.attention(q, Cached(key.codes.to(torch.int16), key.scale), value, sequences, 0.2)


def test_cuda_without_triton_is_refused_by_name(monkeypatch):
    monkeypatch.setenv(triton_use.VARIABLE, "0")
    triton_use.available.cache_clear()
    with pytest.raises(NotImplementedError, match=r"exact mode on cuda needs Triton .* leave LQRL_TRITON unset"):
        exact.check_device("cuda")
    triton_use.available.cache_clear()
