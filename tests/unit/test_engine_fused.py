"""The engine's fused kernels: interpreted on the CPU, compiled on the GPU; and what decides whether they are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact_sides import prompts
from fused_cases import CHECKS
from interpreter import needs_triton
from transformers import Qwen3Config

from lqrl.engines.base import EngineSpec
from lqrl.engines.fused_decoder import FusedDecoder
from lqrl.engines.probe import Probe, deviation
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.attention import PackedContext
from lqrl.modeling.backbone import attention_shapes, load_model, run_decoder
from lqrl.quant.export import export_weights
from lqrl.quant.kv import prepare_kv_
from lqrl.quant.scheme import QuantScheme
from lqrl.types import SamplingParams

CASES = Path(__file__).with_name("fused_cases.py")
WIDE = Qwen3Config(
    vocab_size=9000, hidden_size=512, intermediate_size=2304, num_hidden_layers=2, num_attention_heads=16,
    num_key_value_heads=2, head_dim=128, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
pytestmark = pytest.mark.timeout(900)  # the interpreter is slow


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", list(CHECKS))
def test_interpreted_kernels_do_what_pytorch_does(name, interpreted):
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("name", list(CHECKS))
def test_compiled_kernels_do_what_pytorch_does(name):
    CHECKS[name](torch.device("cuda"))


def wide_engine(scheme: str, dtype: torch.dtype, **options: int | bool) -> TorchEngine:
    parsed, device = QuantScheme.parse(scheme), torch.device("cuda")
    policy = load_model(WIDE, dtype=torch.float32, device=device, seed=0)
    prepare_kv_(policy, parsed)
    built = TorchEngineFactory(max_num_seqs=70, **options)(EngineSpec(WIDE, parsed, dtype, device, 512, ()))
    built.update_weights(export_weights(policy, parsed, export_dtype=dtype), policy_version=0)
    return built


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("none", torch.float32),
        ("none", torch.bfloat16),
        ("none+kv_int8", torch.bfloat16),
        ("none+kv_fp8", torch.bfloat16),
        ("fp8_per_channel+kv_fp8_static", torch.bfloat16),
        ("int8_w8a8+kv_int8", torch.bfloat16),
    ],
)
def test_captured_fused_steps_draw_what_plain_ones_do(scheme: str, dtype: torch.dtype):
    """Fewer slots than samples, prompts up to 200 tokens: several key blocks, slots that are left and taken again."""
    fused, steps = (wide_engine(scheme, dtype, cuda_graphs=on) for on in (True, False))
    plain = wide_engine(scheme, dtype, fused=False)
    full = wide_engine("none", dtype, fused=False)
    assert isinstance(fused.decoder.lean, FusedDecoder)
    assert not isinstance(plain.decoder.lean, FusedDecoder)
    parsed = QuantScheme.parse(scheme)
    asked, params = prompts(25, 200, 9000), SamplingParams(n=4, max_tokens=40, temperature=0)
    drawn = [e.generate(asked, params, seed=0) for e in (fused, steps, plain, full)]
    assert fused._stepper.captured > 0
    tokens = [torch.stack([c.token_ids for group in groups for c in group]) for groups in drawn]
    logprobs = [torch.stack([c.logprobs for group in groups for c in group]) for groups in drawn]

    def apart(i: int, j: int) -> tuple[float, float]:
        """Share of equal tokens and mean gap, of each row up to its first other token: what follows is another text."""
        equal = (tokens[i] == tokens[j]).int().cumprod(1).bool()
        return float(equal.float().mean()), float((logprobs[i] - logprobs[j])[equal].abs().mean())

    noise = apart(2, 3)[1]
    for i, name in ((1, "not captured"), (2, "plain")):
        share, error = apart(0, i)
        if i == 2 and parsed.activation is not None:
            # A rounding that flips one code becomes the noise of the format within a few layers.
            assert 0 < error < 2 * noise, (name, share, error, noise)
            continue
        assert share > (0.999 if dtype == torch.float32 else 0.5), (name, share, error)
        assert error < (1e-5 if dtype == torch.float32 else 3e-2), (name, share, error)


def test_rounding_moves_hidden_states_by_little_and_another_rotation_by_much():
    model = load_model(WIDE, dtype=torch.bfloat16, seed=0)

    def run(tokens, positions, context):
        return run_decoder(model, tokens[None], positions[None], context)

    def turned(tokens, positions, context):
        return run_decoder(model, tokens[None], positions[None] + positions[None] % 2, context)

    probe = Probe((9, 1, 4), 8, WIDE.vocab_size, torch.device("cpu"), exact=False)
    with torch.no_grad():
        expected = probe.packed(run)
        assert torch.equal(probe.packed(run), expected)
        rounding = deviation(probe.shaken(run, 0), expected)
        shapes = [shape for _, shape in sorted(attention_shapes(model).items())]
        in_slots = deviation(probe.in_slots(run, shapes, torch.bfloat16), expected)
        other = deviation(probe.packed(turned), expected)
    assert expected.shape == (13, 512)
    assert 1e-3 < rounding < 3e-2
    assert in_slots < 3e-2
    assert other > 8 * rounding


def test_deviation_by_hand():
    expected = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert deviation(expected + torch.tensor([[0.0, 1.0], [0.1, 0.0]]), expected) == pytest.approx(0.2)
    assert deviation(expected * torch.nan, expected) == float("inf")


def test_fused_layers_need_a_slot_cache():
    model = load_model(WIDE, dtype=torch.float32, seed=0)
    decoder = FusedDecoder(model, attention_shapes(model), 8)
    with pytest.raises(TypeError, match="attend over a slot cache, not through PackedContext"):
        decoder(torch.tensor([1, 2]), torch.arange(2), PackedContext([2]))
