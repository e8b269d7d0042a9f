"""`VLLMEngine` on a real vLLM: log-probs, seeds, stopping, truncation, scoring, sleep."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
from vllm_models import (
    DEVICE,
    EOS,
    KV_BYTES,
    LOW_BIT_DTYPE,
    build,
    full_logits,
    policy_of,
    refreshed,
    shared,
    weights_of,
)

from lqrl.engines.base import StaleEngineError
from lqrl.engines.vllm import VLLMEngine, VLLMEngineFactory
from lqrl.engines.vllm.patches import PATCHES
from lqrl.learner.scorer import Scorer
from lqrl.quant.prepare import prepare_
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, SamplingParams

pytestmark = pytest.mark.vllm

PROMPTS = [Prompt(id=10 * i + 3, input_ids=tuple(range(4, 6 + 3 * i))) for i in range(4)]  # 2, 5, 8, 11 tokens
COUNTS = (3, 5, 1, 4)
NONE = QuantScheme.preset("none")
# On a GPU another number of rows is another kernel, which adds in another order.
ANOTHER_BATCH = 1e-5 if DEVICE.type == "cpu" else 1e-4


def same(a: Completion, b: Completion) -> bool:
    return torch.equal(a.token_ids, b.token_ids) and torch.allclose(a.logprobs, b.logprobs, rtol=0, atol=ANOTHER_BATCH)


def rows(groups: list[list[Completion]]) -> list[tuple[Prompt, Completion]]:
    return [(prompt, c) for prompt, group in zip(PROMPTS, groups, strict=True) for c in group]


def expected(family: str, prompt: Prompt, c: Completion, temperature: float, **options) -> torch.Tensor:
    """Transformers' log-probs of the sampled tokens."""
    logits = full_logits(family, [*prompt.input_ids, *c.token_ids.tolist()], **options)
    logits = logits[len(prompt.input_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, c.token_ids[:, None]).squeeze(1)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_fp32_logprobs_equal_transformers(family: str) -> None:
    params = SamplingParams(n=COUNTS, max_tokens=9, temperature=0.8, ignore_eos=True)
    groups = refreshed(family).generate(PROMPTS, params, seed=1)
    assert [len(g) for g in groups] == list(COUNTS)
    for prompt, c in rows(groups):
        assert (c.prompt_id, c.policy_version, c.finish_reason) == (prompt.id, 5, "length")
        assert c.token_ids.dtype == torch.int64
        assert c.logprobs.dtype == torch.float32
        assert c.log_mass.tolist() == [0.0] * 9
        torch.testing.assert_close(c.logprobs, expected(family, prompt, c, 0.8), rtol=0, atol=1e-4)
    assert [c.sample_index for c in groups[1]] == list(range(5))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_bf16_logprobs_are_as_near_to_transformers_as_bf16_is(family: str) -> None:
    engine = refreshed(family, dtype=torch.bfloat16, spread=0.02)
    groups = engine.generate(PROMPTS, SamplingParams(n=COUNTS, max_tokens=9, ignore_eos=True), seed=1)
    gaps, noise = [], []
    for prompt, c in rows(groups):
        theirs, exact = (
            expected(family, prompt, c, 1.0, dtype=dtype, spread=0.02) for dtype in (torch.bfloat16, torch.float32)
        )
        gaps.append((c.logprobs - theirs).abs())
        noise.append((exact - theirs).abs())
    assert 0 < torch.cat(gaps).mean() < 0.005
    assert torch.cat(gaps).mean() < 1.5 * torch.cat(noise).mean()


@pytest.mark.parametrize("preset", ["int8_w8a8", "fp8_per_channel", "fp8_per_tensor", "int8_w8a8+lm_head"])
def test_low_bit_logprobs_equal_the_aligned_learner(preset: str) -> None:
    """In fp32 the layers are equal up to rounding, which now and then moves an activation to the next code.

    In bf16, all there is on a GPU, the roundings of the two differ nearly half as much as the codes from the weights.
    """
    engine, scheme = refreshed("qwen2", preset, LOW_BIT_DTYPE), QuantScheme.preset(preset)
    groups = engine.generate(PROMPTS, SamplingParams(n=COUNTS, max_tokens=9, ignore_eos=True), seed=1)
    learner = copy.deepcopy(policy_of("qwen2"))
    prepare_(learner, scheme, export_dtype=LOW_BIT_DTYPE)
    gaps, unaligned = [], []
    for prompt, c in rows(groups):
        ids = torch.tensor([[*prompt.input_ids, *c.token_ids.tolist()]])
        with torch.no_grad():
            scores = Scorer(learner, 1.0, LOW_BIT_DTYPE).score(ids, torch.ones_like(ids, dtype=torch.bool))
        gaps.append((c.logprobs - scores[0, len(prompt.input_ids) :]).abs())
        unaligned.append((c.logprobs - expected("qwen2", prompt, c, 1.0, dtype=LOW_BIT_DTYPE)).abs())
    if DEVICE.type == "cpu":
        assert torch.cat(gaps).median() < 1e-5
        assert torch.cat(gaps).mean() < 0.1 * torch.cat(unaligned).mean()
    else:
        assert torch.cat(gaps).mean() < 0.75 * torch.cat(unaligned).mean()


def test_the_seed_the_prompt_and_the_sample_change_the_draw() -> None:
    engine, params = refreshed(), SamplingParams(n=3, max_tokens=12, ignore_eos=True)
    group, again, other_seed = (engine.generate(PROMPTS[:1], params, seed=s)[0] for s in (1, 1, 2))
    renamed = engine.generate([replace(PROMPTS[0], id=99)], params, seed=1)[0]
    later = engine.generate(PROMPTS[:1], replace(params, n=1, first_sample=2), seed=1)[0][0]
    assert all(same(a, b) for a, b in zip(group, again, strict=True))
    assert same(group[2], later)
    assert later.sample_index == 2
    for c in (group[1], other_seed[0], renamed[0]):
        assert not torch.equal(group[0].token_ids, c.token_ids)


def test_a_sample_does_not_depend_on_order_or_company() -> None:
    engine, params = refreshed(), SamplingParams(n=COUNTS, max_tokens=12)
    groups = engine.generate(PROMPTS, params, seed=9)
    backwards = engine.generate(PROMPTS[::-1], replace(params, n=COUNTS[::-1]), seed=9)[::-1]
    assert all(same(a, b) for g, h in zip(groups, backwards, strict=True) for a, b in zip(g, h, strict=True))
    for prompt, c in rows(groups)[::4]:
        one = SamplingParams(max_tokens=12, first_sample=c.sample_index)
        assert same(c, engine.generate([prompt], one, seed=9)[0][0])


def test_more_prompts_than_a_batch_has_tokens_for_are_drawn_whole() -> None:
    """A prompt that vLLM cuts needs a generator that can go back, which a CPU does not have."""
    engine = build(max_num_seqs=VLLMEngineFactory().max_num_seqs, kv_cache_bytes=4 * KV_BYTES)
    engine.update_weights(weights_of("qwen3", NONE, torch.float32), policy_version=1)
    prompts = [Prompt(id=i, input_ids=tuple(4 + (i + j) % 60 for j in range(37 + i % 3))) for i in range(64)]
    groups = engine.generate(prompts, SamplingParams(n=8, max_tokens=3, ignore_eos=True), seed=5)  # 19,448 tokens
    assert [len(group) for group in groups] == [8] * 64
    for i in (0, 29, 63):
        alone = SamplingParams(max_tokens=3, ignore_eos=True, first_sample=7)
        assert same(groups[i][7], engine.generate([prompts[i]], alone, seed=5)[0][0])
    engine.close()


def test_a_stop_token_ends_a_completion_and_belongs_to_it() -> None:
    engine = refreshed()
    params = SamplingParams(n=24, max_tokens=24, temperature=1.5, stop_token_ids=(9,))
    found = engine.generate(PROMPTS[:2], params, seed=3)
    ends = set()
    for c in (c for group in found for c in group):
        stops = [t for t in c.token_ids.tolist() if t in (*EOS, 9)]
        assert stops == ([c.token_ids[-1].item()] if c.finish_reason == "stop" else [])
        assert len(c.token_ids) == 24 or c.finish_reason == "stop"
        ends.update(stops)
    assert ends == {*EOS, 9}
    ignored = engine.generate(PROMPTS[:2], replace(params, ignore_eos=True), seed=3)
    through = [c.token_ids.tolist() for group in ignored for c in group]
    assert any(set(EOS) & set(tokens[:-1]) for tokens in through)
    assert all(9 not in tokens[:-1] for tokens in through)


def test_greedy_takes_the_most_likely_token_and_reports_temperature_one() -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for prompt, c in rows(refreshed("qwen2").generate(PROMPTS, params, seed=0)):
        logits = full_logits("qwen2", [*prompt.input_ids, *c.token_ids.tolist()])[len(prompt.input_ids) - 1 : -1]
        assert torch.equal(logits.argmax(-1), c.token_ids)
        torch.testing.assert_close(c.logprobs, logits.log_softmax(-1).amax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, 0), (1.0, 5), (0.8, 6)])
def test_truncation_reports_the_mass_it_keeps(top_p: float, top_k: int) -> None:
    engine = refreshed("qwen2", record_log_mass=True)
    params = SamplingParams(n=COUNTS, max_tokens=9, temperature=1.3, top_p=top_p, top_k=top_k, ignore_eos=True)
    for prompt, c in rows(engine.generate(PROMPTS, params, seed=1)):
        logits = full_logits("qwen2", [*prompt.input_ids, *c.token_ids.tolist()])[len(prompt.input_ids) - 1 : -1] / 1.3
        for t, token in enumerate(c.token_ids.tolist()):
            p, order = logits[t].softmax(-1).sort(descending=True)
            kept = p[: top_k or None]
            kept = kept[: int((kept.cumsum(0) - kept < top_p * kept.sum()).sum())]
            assert token in order[: len(kept)].tolist()
            assert c.log_mass[t].item() == pytest.approx(kept.sum().log().item(), abs=1e-4)
        full = expected("qwen2", prompt, c, 1.3)
        torch.testing.assert_close(c.logprobs + c.log_mass, full, rtol=0, atol=1e-4)
    assert all(c.log_mass.max() < 0 for _, c in rows(engine.generate(PROMPTS, params, seed=1)))
    whole = engine.generate(PROMPTS, SamplingParams(max_tokens=4), seed=1)
    assert all(c.log_mass.count_nonzero() == 0 for group in whole for c in group)


def test_truncation_needs_its_option() -> None:
    with pytest.raises(ValueError, match="record_log_mass: true"):
        refreshed().generate(PROMPTS, SamplingParams(top_p=0.9), seed=0)


def test_given_tokens_are_scored_at_temperature_one() -> None:
    sequences = [[5, 9, 4, 30, 2, 8], [7, 7], [9]]
    for ids, scores in zip(sequences, refreshed("llama").score(sequences), strict=True):
        logits = full_logits("llama", ids)
        wanted = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
        assert scores.shape == (len(ids),)
        assert scores[0] == 0
        torch.testing.assert_close(scores[1:], wanted, rtol=0, atol=1e-4)


def test_nothing_asked_is_nothing_answered() -> None:
    engine = refreshed("llama")
    assert engine.generate([], SamplingParams(), seed=0) == engine.score([]) == []


def test_an_interrupted_call_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, params = refreshed(), SamplingParams(n=COUNTS, max_tokens=12)
    whole = engine.generate(PROMPTS, params, seed=9)
    core = engine._llm.llm_engine
    step, steps = core.step, iter(range(3))

    def interrupted() -> list:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, params, seed=9)
    assert core.get_num_unfinished_requests() == 0
    again = engine.generate(PROMPTS, params, seed=9)
    assert all(same(a, b) for g, h in zip(whole, again, strict=True) for a, b in zip(g, h, strict=True))


def test_the_random_numbers_of_the_process_are_left_alone() -> None:
    states = torch.get_rng_state(), random.getstate()
    engine = build()
    engine.update_weights(weights_of("qwen3", NONE, torch.float32), policy_version=0)
    engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=4), seed=0)
    engine.close()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_closed_engine_refuses_and_the_others_go_on() -> None:
    closed, other = build(), refreshed()
    closed.update_weights(weights_of("qwen3", NONE, torch.float32), policy_version=0)
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        closed.generate(PROMPTS, SamplingParams(), seed=0)
    assert closed.policy_version == -1
    assert other.generate(PROMPTS, SamplingParams(max_tokens=2), seed=0)


def test_an_engine_asleep_refuses() -> None:
    engine = refreshed()
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(PROMPTS, SamplingParams(), seed=0)
    engine.wake()
    assert engine.generate(PROMPTS, SamplingParams(max_tokens=2), seed=0)
    assert engine.policy_version == 5


def test_tokens_and_seconds_are_counted() -> None:
    engine = refreshed()
    before = engine.stats
    engine.generate(PROMPTS[:2], SamplingParams(n=3, max_tokens=5, ignore_eos=True), seed=0)
    after = engine.stats
    assert after.prompt_tokens - before.prompt_tokens == 2 + 5
    assert after.generated_tokens - before.generated_tokens == 2 * 3 * 5
    assert after.seconds > before.seconds


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (Prompt(1, ()), SamplingParams(), "prompt 1 is empty"),
        (Prompt(1, (64,)), SamplingParams(), "outside the model's vocabulary of 64"),
        (Prompt(1, (5,) * 120), SamplingParams(max_tokens=9), "do not fit max_model_len=128"),
        (Prompt(1, (5,)), SamplingParams(stop_token_ids=(64,)), r"stop tokens \[64\]"),
        (Prompt(1, (5,)), SamplingParams(temperature=0.005), "vLLM samples at 0.01"),
    ],
)
def test_what_would_be_changed_on_the_way_is_refused(prompt: Prompt, params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refreshed().generate([prompt], params, seed=0)


def test_an_engine_without_weights_refuses() -> None:
    engine = shared("llama", "fp8_per_channel", LOW_BIT_DTYPE)
    assert engine.policy_version == -1
    with pytest.raises(StaleEngineError, match="no weights yet"):
        engine.generate(PROMPTS, SamplingParams(), seed=0)


def test_tokens_are_drawn_from_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NaN logits the kernel gives the number of a lane beyond them."""
    (patch,) = (p for p in PATCHES if p.name == "draw-from-the-vocabulary")
    assert patch.applies("0.26.0", "cuda")
    assert not patch.applies("0.26.0", "cpu")
    from vllm.v1.worker.gpu.sample import sampler

    monkeypatch.setattr(sampler, "gumbel_sample", lambda logits, shift: torch.tensor([5, 64, 1023]) + shift)
    patch.install()
    assert sampler.gumbel_sample(torch.zeros(3, 64), shift=-1).tolist() == [4, 63, 63]


def test_logits_may_be_computed_in_fp32() -> None:
    plain, engine = (refreshed("llama", dtype=torch.bfloat16, spread=0.05, fp32_head=fp32) for fp32 in (False, True))
    assert engine._llm.llm_engine.vllm_config.model_config.head_dtype == torch.float32
    (a,), (b,) = (each.score([[5, 9, 4, 30, 2, 8]]) for each in (plain, engine))
    assert 0 < (a - b).abs().max() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_memory_given_up_in_sleep_comes_back(level: int) -> None:
    """In a process of its own: vLLM takes one engine with sleep a process."""
    torch.multiprocessing.spawn(sleep_and_wake, args=(level,), nprocs=1)


def sleep_and_wake(_: int, level: int) -> None:
    engine, params = build(sleep_level=level), SamplingParams(n=2, max_tokens=8)
    weights = list(weights_of("qwen3", NONE, torch.float32))
    digest = engine.update_weights(weights, policy_version=3).digest
    before, free = engine.generate(PROMPTS, params, seed=0), torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] > free
    assert engine.policy_version == (3 if level == 1 else -1)
    engine.wake()
    if level == 2:
        with pytest.raises(StaleEngineError, match="gave up its weights"):
            engine.generate(PROMPTS, params, seed=0)
        assert engine.update_weights(weights, policy_version=3).digest == digest
    after = engine.generate(PROMPTS, params, seed=0)
    assert all(same(a, b) for g, h in zip(before, after, strict=True) for a, b in zip(g, h, strict=True))
    with pytest.raises(ValueError, match="one engine with sleep a process"):
        build(sleep_level=level)
    engine.close()


def test_engine_args_reach_vllm() -> None:
    engine = build(engine_args={"block_size": 64})
    assert isinstance(engine, VLLMEngine)
    assert engine._llm.llm_engine.vllm_config.cache_config.block_size == 64
    engine.close()


def test_separate_prefill_and_decode_engines_pass_through(tmp_path: Path) -> None:
    """A connector of the user's keeps files, and drops them at a refresh."""
    script = Path(__file__).with_name("vllm_connector_run.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    old, new = torch.load(tmp_path / "said.pt", weights_only=True)
    prompt, params = Prompt(1, tuple(5 + i % 50 for i in range(70))), SamplingParams(n=2, max_tokens=4)
    fresh = refreshed().generate([prompt], params, seed=0)[0]
    for before, after, c in zip(old, new, fresh, strict=True):
        torch.testing.assert_close(after, c.logprobs, rtol=0, atol=1e-5)
        assert not torch.allclose(before, c.logprobs, rtol=0, atol=1e-3)
