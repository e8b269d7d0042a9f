"""Exact mode: the engine's log-probs are the learner's, as bits, in any company; what cannot be exact is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import pytest
import torch
from exact_sides import Sides, both, compared, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig

from lqrl import assets
from lqrl.engines.torch import TorchEngineFactory
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import hidden_states, load_model, pack
from lqrl.modeling.exact import exact_learner_
from lqrl.quant import Lora, QuantScheme, export_weights, prepare_
from lqrl.quant.native_build import BuildError
from lqrl.quant.scheme import TensorFormat
from lqrl.testing import tiny_config, tiny_moe_config
from lqrl.types import SamplingParams

try:
    both(tiny_config("llama", layers=1), "none")
except BuildError:
    pytest.skip("no C compiler", allow_module_level=True)

FP32, BF16 = torch.float32, torch.bfloat16
_FP8 = TensorFormat("fp8_e4m3", "tensor")
in_dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
FORMATS = [
    ("none", FP32),
    ("none", BF16),
    ("int8_w8a8", FP32),
    ("int8_w8a8+lm_head", BF16),
    ("int4_w4a16_g32", FP32),
    ("int8_w8a16", BF16),
    ("fp8_per_channel", FP32),
    ("fp8_per_tensor+kv_fp8_static", BF16),
    ("mxfp8", FP32),
    ("nvfp4_w4a16", FP32),
    ("int4_w4a4", BF16),
    ("int8_w8a8+kv_int8", FP32),
    ("none+kv_fp8", BF16),
    ("int8_w8a8+kv_int8", BF16),
    ("int4_w4a16_g32+kv_fp8", BF16),
    ("mxfp4_w4a16", BF16),
    ("fp8_per_channel", BF16),
    ("fp8_per_block", BF16),
    ("nvfp4_w4a4", BF16),
]
formats = pytest.mark.parametrize(("scheme", "dtype"), FORMATS, ids=[f"{s}-{str(d)[6:]}" for s, d in FORMATS])
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
families = pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])


def fields(**changes: Any) -> dict[str, Any]:
    """The tiny Llama's config with changes."""
    return {k: v for k, v in tiny_config("llama").to_diff_dict().items() if k != "model_type"} | changes


@lru_cache
def sides(family: str, scheme: str, dtype: torch.dtype, device: str = "cpu") -> Sides:
    return both(tiny_config(family), scheme, dtype, max_num_seqs=5, max_num_batched_tokens=25, device=device)


@on_devices
@families
@formats
def test_every_log_prob_is_the_learners(family: str, scheme: str, dtype: torch.dtype, device: str):
    # 5 slots for 14 samples: they are refilled; prompts enter in several prefills; samples share a prefix.
    params = SamplingParams(n=2, max_tokens=12, temperature=0.8)
    assert compared(sides(family, scheme, dtype, device), prompts(7, 20, 64), params, rows=3) == (7 * 2 * 12, 0)


@on_devices
def test_the_inexact_path_does_differ(device: str):
    inexact = both(tiny_config("llama"), "int8_w8a8", exact=False, max_num_seqs=5, device=device)
    tokens, different = compared(inexact, prompts(7, 20, 64), SamplingParams(n=2, max_tokens=12), rows=3)
    assert different > tokens // 4


@on_devices
@settings(max_examples=12, deadline=None)
@given(
    count=st.integers(1, 9), longest=st.integers(1, 40), samples=st.integers(1, 4), tokens=st.integers(1, 20),
    slots=st.integers(1, 9), batched=st.sampled_from([1, 30, 1000]), rows=st.integers(1, 9), threads=st.integers(1, 2),
    temperature=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 2**31), bf16=st.booleans(),
)  # fmt: skip
def test_no_company_changes_a_bit(
    device, count, longest, samples, tokens, slots, batched, rows, threads, temperature, seed, bf16
):
    case = sides("qwen3", "int8_w8a8", BF16 if bf16 else FP32, device)
    options = TorchEngineFactory(max_num_seqs=slots, max_num_batched_tokens=batched)
    case.engine.options, before = options, case.engine.options
    torch.set_num_threads(threads)
    try:
        params = SamplingParams(n=1 if temperature == 0 else samples, max_tokens=tokens, temperature=temperature)
        made = compared(case, prompts(count, longest, 64, seed), params, rows=rows, seed=seed)
    finally:
        torch.set_num_threads(1)
        case.engine.options = before
    assert made == (count * params.counts(1)[0] * tokens, 0)


@on_devices
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.8}], ids=["whole", "top-k", "top-p"])
def test_samples_and_their_bits_do_not_depend_on_slots_or_company(truncation: dict[str, Any], device: str):
    asked, params = prompts(6, 20, 64), SamplingParams(n=3, max_tokens=15, **truncation)
    case = sides("llama", "int4_w4a16_g32", BF16, device)
    together = case.engine.generate(asked, params, seed=3)
    alone = [case.engine.generate([prompt], params, seed=3)[0] for prompt in reversed(asked)][::-1]
    for a, b in zip((c for g in together for c in g), (c for g in alone for c in g), strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.logprobs, b.logprobs)
        assert torch.equal(a.log_mass, b.log_mass)


@on_devices
@pytest.mark.parametrize("params", [SamplingParams(top_k=5), SamplingParams(top_p=0.8, temperature=1.3)])
def test_a_truncated_sample_has_the_learners_log_prob_in_two_parts(params: SamplingParams, device: str):
    params, case = replace(params, n=4, max_tokens=20), sides("qwen2", "int8_w8a8", FP32, device)
    assert compared(case, prompts(6, 20, 64), params, rows=4) == (6 * 4 * 20, 0)
    group = case.engine.generate(prompts(6, 20, 64), params, seed=0)[0]
    assert all((c.logprobs <= 0).all() and (c.log_mass <= 0).all() and (c.log_mass < 0).any() for c in group)


@on_devices
@in_dtypes
def test_a_sliding_window_is_exact(dtype: torch.dtype, device: str):
    case = both(MistralConfig(**fields(sliding_window=6)), "int8_w8a8", dtype, max_num_seqs=4, device=device)
    made = compared(case, prompts(6, 20, 64), SamplingParams(max_tokens=15), rows=4)
    assert made == (6 * 15, 0)


@on_devices
def test_ten_thousand_tokens_of_a_trained_policy(device: str):
    options = {"max_num_seqs": 50, "max_num_batched_tokens": 300, "device": device}
    case = both(str(assets.path("countdown_policy")), "int8_w8a8", BF16 if device == "cuda" else FP32, **options)
    made = compared(case, prompts(80, 24, 64), SamplingParams(n=4, max_tokens=32), rows=40)
    assert made == (80 * 4 * 32, 0)  # 10240


@on_devices
def test_after_a_step_and_a_refresh_both_are_equal_again(device: str):
    case = both(tiny_config("qwen2"), "int8_w8a16", BF16, device=device)
    ids = torch.arange(40, device=device).view(4, 10)
    optimizer = torch.optim.SGD(case.policy.parameters(), lr=0.3)
    case.scorer(1.0).score(ids, torch.ones_like(ids)).sum().backward()
    optimizer.step()
    params = SamplingParams(n=2, max_tokens=10)
    tokens, different = compared(case, prompts(4, 9, 64), params, rows=4)
    assert different > tokens // 2  # the engine is a step behind
    weights = export_weights(case.policy, case.scheme, export_dtype=BF16)
    case.engine.update_weights(weights, policy_version=1)
    assert compared(case, prompts(4, 9, 64), params, rows=4) == (tokens, 0)


@on_devices
@pytest.mark.parametrize("refresh", ["merge", "adapter"])
@pytest.mark.parametrize(("scheme", "dtype"), [("none", FP32), ("int8_w8a8", BF16), ("int4_w4a16_g32", FP32)])
def test_a_policy_with_adapters_is_exact(
    refresh: Literal["merge", "adapter"], scheme: str, dtype: torch.dtype, device: str
):
    lora = Lora(r=3, alpha=6, target_modules=("q_proj", "down_proj"), refresh=refresh)
    case = both(tiny_config("qwen2"), scheme, dtype, lora=lora, max_num_seqs=5, device=device)
    assert compared(case, prompts(6, 20, 64), SamplingParams(n=2, max_tokens=12), rows=5) == (6 * 2 * 12, 0)


@on_devices
@families
@pytest.mark.parametrize("scheme", ["none", "int8_w8a8", "int4_w4a16_g32"])
def test_the_gradient_is_the_plain_modules(family: str, scheme: str, device: str):
    ids = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(0)).to(device)
    mask = (torch.arange(12) < torch.tensor([12, 5, 9, 1])[:, None]).to(device)
    weights = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)).to(device)
    gradients, scores = [], []
    for exact in (True, False):
        case = both(tiny_config(family), scheme, exact=exact, device=device)
        out = case.scorer(0.7).score(ids, mask)
        (out * weights * mask).sum().backward()
        scores.append(out.detach())
        gradients.append({name: p.grad for name, p in case.policy.named_parameters()})
    # int8 codes that fall to the other side of a half move what follows by a code's width, in a few places.
    limit = 0.05 if scheme == "int8_w8a8" else 2e-4
    assert (scores[0] - scores[1]).abs().max() < limit
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[1].items():
        assert (gradients[0][name] - expected).norm() <= limit * expected.norm(), name


@on_devices
def test_the_hidden_states_are_transformers_up_to_rounding(device: str):
    ids = torch.arange(30, device=device).view(2, 15)
    both_ways = []
    for exact in (True, False):
        policy = load_model(tiny_config("qwen3"), dtype=FP32, device=device, seed=0)
        if exact:
            exact_learner_(policy, FP32)
        with torch.no_grad():
            both_ways.append(hidden_states(policy, pack(ids, torch.ones_like(ids), exact=exact)))
    assert 0 < (both_ways[0] - both_ways[1]).abs().max() < 1e-5


def test_names_of_parameters_and_exported_tensors_stay():
    plain, swapped = (load_model(tiny_config("qwen3"), dtype=FP32, seed=0) for _ in range(2))
    scheme = QuantScheme.preset("int8_w8a8+lm_head")
    for policy in (plain, swapped):
        prepare_(policy, scheme, export_dtype=BF16)
    before = {id(p) for p in swapped.parameters()}
    exact_learner_(swapped, BF16)
    assert {id(p) for p in swapped.parameters()} == before
    assert list(plain.state_dict()) == list(swapped.state_dict())
    exported = [dict(export_weights(policy, scheme, export_dtype=BF16)) for policy in (plain, swapped)]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


def test_what_cannot_be_exact_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="GemmaForCausalLM: exact mode runs Llama, Mistral, Qwen2 and Qwen3"):
        exact_learner_(load_model(tiny_config("gemma"), dtype=FP32, seed=0), FP32)
    with pytest.raises(NotImplementedError, match="Qwen3MoeForCausalLM"):
        exact_learner_(load_model(tiny_moe_config(), dtype=FP32, seed=0), FP32)
    config = LlamaConfig(**fields(hidden_act="gelu"))
    with pytest.raises(NotImplementedError, match=r"model\.layers\.0\.mlp\.act_fn \(GELUActivation\)"):
        exact_learner_(load_model(config, dtype=FP32, seed=0), FP32)
    policy = load_model(tiny_config("llama"), dtype=FP32, seed=0)
    prepare_(policy, QuantScheme("fp8", _FP8, replace(_FP8, dynamic=True)), export_dtype=FP32)
    with pytest.raises(NotImplementedError, match=r"no product for Fp8Tensor\(activation='tensor'\)"):
        exact_learner_(policy, FP32)
    with pytest.raises(ValueError, match="needs an exact policy"):
        Scorer(load_model(tiny_config("llama"), dtype=FP32, seed=0), 1.0, FP32, exact=True)
