"""The embedded engine against transformers: log-probs, greedy tokens, stopping, refill, order and company."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from engine_models import CONFIGS
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
)

from lqrl.engines.base import EngineSpec, StaleEngineError
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, SamplingParams

NONE, INT8 = QuantScheme.preset("none"), QuantScheme.preset("int8_w8a8")
PROMPTS = [Prompt(id=10 * i + 3, input_ids=tuple(range(1, 3 + 3 * i))) for i in range(4)]  # 2, 5, 8, 11 tokens
COUNTS = (3, 6, 1, 4)


@cache
def policy(family: str) -> PreTrainedModel:
    return load_model(CONFIGS[family], dtype=torch.float32, seed=0).eval()


CPU = torch.device("cpu")


def engine(
    family: str = "qwen3",
    scheme: QuantScheme = NONE,
    eos: tuple[int, ...] = (),
    device: torch.device = CPU,
    **options: int,
) -> TorchEngine:
    spec = EngineSpec(CONFIGS[family], scheme, torch.float32, device, 64, eos)
    built = TorchEngineFactory(**options)(spec)
    built.update_weights(export_weights(policy(family), scheme, export_dtype=torch.float32), policy_version=5)
    return built


def transformers_model(family: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict(policy(family).state_dict())
    return model


def same(a: Completion, b: Completion) -> bool:
    return torch.equal(a.token_ids, b.token_ids) and torch.allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_logprobs_equal_transformers_forward(family: str, device: torch.device) -> None:
    other = transformers_model(family)
    groups = engine(family, device=device, max_num_seqs=5, max_num_batched_tokens=9).generate(
        PROMPTS, SamplingParams(n=COUNTS, max_tokens=9, temperature=0.8), seed=1
    )
    assert [len(g) for g in groups] == list(COUNTS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert [c.sample_index for c in group] == list(range(len(group)))
        for c in group:
            assert c.prompt_id == prompt.id
            assert c.policy_version == 5
            assert c.finish_reason == "length"
            assert c.log_mass.tolist() == [0.0] * 9
            ids = torch.cat([torch.tensor(prompt.input_ids), c.token_ids])[None]
            with torch.no_grad():
                logits = other(ids).logits[0, len(prompt.input_ids) - 1 : -1] / 0.8
            expected = logits.log_softmax(-1).gather(1, c.token_ids[:, None]).squeeze(1)
            torch.testing.assert_close(c.logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_transformers_generate(family: str) -> None:
    other = transformers_model(family)
    groups = engine(family).generate(PROMPTS, SamplingParams(max_tokens=9, temperature=0), seed=0)
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        ids = torch.tensor(prompt.input_ids)[None]
        out = other.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0
        )
        assert completion.token_ids.tolist() == out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("scheme", [NONE, INT8], ids=lambda s: s.name)
def test_a_sample_does_not_depend_on_company_order_slots_or_chunks(scheme: QuantScheme, device: torch.device) -> None:
    params = SamplingParams(n=(8, 9, 6, 7), max_tokens=12)
    alone = engine(scheme=scheme, device=device, eos=(3, 4))
    crowded = engine(
        scheme=scheme, device=device, eos=(3, 4), max_num_seqs=7, max_num_batched_tokens=6, host_interval=5
    )
    groups = crowded.generate(PROMPTS, params, seed=9)
    assert len({c.token_ids.numel() for g in groups for c in g}) > 3  # they do end at different steps
    backwards = crowded.generate(PROMPTS[::-1], replace(params, n=(7, 6, 9, 8)), seed=9)[::-1]
    for i, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True)):
        for completion, other in list(zip(group, backwards[i], strict=True))[::2]:
            one = SamplingParams(max_tokens=12, first_sample=completion.sample_index)
            assert same(completion, alone.generate([prompt], one, seed=9)[0][0])
            assert same(completion, other)


def test_the_seed_the_prompt_and_the_sample_change_the_draw() -> None:
    built, params = engine(), SamplingParams(n=2, max_tokens=12)
    group, again, other_seed = (built.generate(PROMPTS[:1], params, seed=s)[0] for s in (1, 1, 2))
    renamed = built.generate([replace(PROMPTS[0], id=99)], params, seed=1)[0]
    assert torch.equal(group[0].token_ids, again[0].token_ids)
    for c in (group[1], other_seed[0], renamed[0]):
        assert not torch.equal(group[0].token_ids, c.token_ids)


def test_more_samples_continue_where_the_first_draw_ended() -> None:
    built = engine()
    whole = built.generate(PROMPTS[:1], SamplingParams(n=4, max_tokens=6), seed=1)[0]
    rest = built.generate(PROMPTS[:1], SamplingParams(n=2, max_tokens=6, first_sample=2), seed=1)[0]
    assert [c.sample_index for c in rest] == [2, 3]
    assert all(same(a, b) for a, b in zip(whole[2:], rest, strict=True))


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_stop_tokens_end_a_sample_and_belong_to_it(interval: int) -> None:
    free = engine().generate(PROMPTS, SamplingParams(n=6, max_tokens=12), seed=3)
    for built, params in (
        (engine(eos=(7, 8), host_interval=interval), SamplingParams(n=6, max_tokens=12)),
        (engine(eos=(7,), host_interval=interval), SamplingParams(n=6, max_tokens=12, stop_token_ids=(8,))),
    ):
        stopped = built.generate(PROMPTS, params, seed=3)
        reasons = set()
        for a, b in zip((c for g in free for c in g), (c for g in stopped for c in g), strict=True):
            hits = [i for i, t in enumerate(a.token_ids.tolist()) if t in (7, 8)]
            length = hits[0] + 1 if hits else 12
            assert b.token_ids.tolist() == a.token_ids[:length].tolist()
            assert b.finish_reason == ("stop" if hits else "length")
            reasons.add(b.finish_reason)
        assert reasons == {"stop", "length"}


def test_ignore_eos_samples_on() -> None:
    params = SamplingParams(n=6, max_tokens=12, ignore_eos=True)
    groups = engine(eos=tuple(range(50))).generate(PROMPTS, params, seed=3)
    assert {c.token_ids.numel() for g in groups for c in g} == {12}


@pytest.mark.parametrize("interval", [1, 3])
def test_one_token_budgets_and_immediate_stops_end_before_a_decode_step(interval: int) -> None:
    every = tuple(range(56))
    groups = engine(eos=every, max_num_seqs=3, host_interval=interval).generate(PROMPTS, SamplingParams(n=5), seed=0)
    assert {(c.token_ids.numel(), c.finish_reason) for g in groups for c in g} == {(1, "stop")}
    groups = engine(max_num_seqs=3).generate(PROMPTS, SamplingParams(n=5, max_tokens=1), seed=0)
    assert {(c.token_ids.numel(), c.finish_reason) for g in groups for c in g} == {(1, "length")}


def test_truncated_logprobs_plus_mass_are_the_full_logprobs() -> None:
    built, other = engine(), transformers_model("qwen3")
    (group,) = built.generate(PROMPTS[1:2], SamplingParams(n=4, max_tokens=8, top_k=9, top_p=0.8), seed=0)
    assert min(c.log_mass.max().item() for c in group) < 0
    for c in group:
        ids = torch.cat([torch.tensor(PROMPTS[1].input_ids), c.token_ids])[None]
        with torch.no_grad():
            full = other(ids).logits[0, 4:-1].log_softmax(-1).gather(1, c.token_ids[:, None]).squeeze(1)
        torch.testing.assert_close(c.logprobs + c.log_mass, full, rtol=0, atol=1e-5)


def test_a_small_cache_budget_gives_the_same_samples() -> None:
    params = SamplingParams(n=3, max_tokens=6)
    wide, narrow = (engine(**o).generate(PROMPTS, params, seed=4) for o in ({}, {"kv_cache_tokens": 40}))
    assert all(same(a, b) for x, y in zip(wide, narrow, strict=True) for a, b in zip(x, y, strict=True))


def test_autocast_outside_does_not_change_the_engine() -> None:
    built, params = engine(), SamplingParams(n=2, max_tokens=6)
    plain = built.generate(PROMPTS[:2], params, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = built.generate(PROMPTS[:2], params, seed=0)
    for a, b in zip((c for g in plain for c in g), (c for g in cast for c in g), strict=True):
        assert torch.equal(a.logprobs, b.logprobs)


def test_bf16_logprobs_are_near_the_fp32_forward() -> None:
    spec = EngineSpec(CONFIGS["qwen3"], NONE, torch.bfloat16, torch.device("cpu"), 64, ())
    built = TorchEngineFactory()(spec)
    built.update_weights(export_weights(policy("qwen3"), NONE, export_dtype=torch.bfloat16), policy_version=0)
    (group,) = built.generate(PROMPTS[1:2], SamplingParams(n=4, max_tokens=8), seed=0)
    for c in group:
        ids = torch.cat([torch.tensor(PROMPTS[1].input_ids), c.token_ids])[None]
        with torch.no_grad():
            full = transformers_model("qwen3")(ids).logits[0, 4:-1].log_softmax(-1)
        error = (full.gather(1, c.token_ids[:, None]).squeeze(1) - c.logprobs).abs()
        assert 0 < error.max() < 0.25


def test_stats_count_tokens() -> None:
    built = engine()
    built.generate(PROMPTS, SamplingParams(n=2, max_tokens=6), seed=0)
    assert (built.stats.prompt_tokens, built.stats.generated_tokens) == (26, 48)  # 2 + 5 + 8 + 11; 4 * 2 * 6
    assert built.stats.seconds > 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (Prompt(1, ()), SamplingParams(), "prompt 1 is empty"),
        (Prompt(1, (1,) * 60), SamplingParams(max_tokens=5), r"60 tokens and max_tokens=5 .* max_model_len=64"),
        (Prompt(1, (1, 56)), SamplingParams(), "vocabulary of 56"),
        (Prompt(1, (1,)), SamplingParams(stop_token_ids=(77,)), r"\[77\] are outside"),
        (Prompt(1, (1,)), SamplingParams(n=(1, 2)), "2 counts for 1 prompts"),
    ],
)
def test_bad_requests_name_the_fix(prompt: Prompt, params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine().generate([prompt], params, seed=0)


def test_a_cache_smaller_than_one_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="kv_cache_tokens=8 holds 8: raise it"):
        engine(kv_cache_tokens=8).generate(PROMPTS[:1], SamplingParams(max_tokens=7), seed=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("max_num_seqs", 2.5), ("max_num_batched_tokens", True), ("kv_cache_tokens", math.nan)],
)
def test_counts_that_are_none_are_errors(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {value}"):
        TorchEngineFactory(**{name: value})  # type: ignore[arg-type]


def test_tokens_that_are_no_integers_are_errors() -> None:
    with pytest.raises(ValueError, match=r"prompt 5 holds 3\.7, which is no token id"):
        engine().generate([Prompt(5, (3, 3.7))], SamplingParams(), seed=0)  # type: ignore[arg-type]
    other, same = Prompt(5, tuple(np.array([3, 4]))), Prompt(5, (3, 4))
    (drawn,), (again,) = (engine().generate([prompt], SamplingParams(), seed=0)[0] for prompt in (other, same))
    assert torch.equal(drawn.token_ids, again.token_ids)


def test_no_prompts_give_no_completions() -> None:
    assert engine().generate([], SamplingParams(), seed=0) == []


def test_an_engine_without_weights_refuses() -> None:
    built = TorchEngineFactory()(EngineSpec(CONFIGS["llama"], NONE, torch.float32, torch.device("cpu"), 64, ()))
    assert built.policy_version == -1
    with pytest.raises(StaleEngineError, match="no weights yet"):
        built.generate(PROMPTS, SamplingParams(), seed=0)
