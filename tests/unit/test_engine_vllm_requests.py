"""What the vLLM engine asks, what it is told and what it is sent, as far as no vLLM is needed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lqrl.engines.base import RefreshError
from lqrl.engines.sampling import sample, uniforms
from lqrl.engines.vllm.coverage import changed_fractions, checked
from lqrl.engines.vllm.requests import Generated, Sample, completion, grouped, samples, sampling_fields
from lqrl.engines.vllm.truncation import MassRecord, truncate_
from lqrl.quant.stream import StableTensors
from lqrl.types import Completion, Prompt, SamplingParams

# ---------------------------------------------------------------- requests and completions


PROMPTS = [Prompt(7, (1, 2)), Prompt(9, (3,))]


def test_seeds_depend_on_seed_prompt_and_sample_alone() -> None:
    drawn = samples(PROMPTS, SamplingParams(n=(2, 3), first_sample=4), seed=5)
    assert [(s.prompt.id, s.index) for s in drawn] == [(7, 4), (7, 5), (9, 4), (9, 5), (9, 6)]
    assert len({s.seed for s in drawn}) == 5
    assert all(0 <= s.seed < 2**63 for s in drawn)
    alone = samples(PROMPTS[1:], SamplingParams(first_sample=6), seed=5)
    assert alone[0].seed == drawn[-1].seed
    assert samples(PROMPTS[1:], SamplingParams(first_sample=6), seed=6)[0].seed != drawn[-1].seed


def test_our_stop_tokens_replace_vllms_own() -> None:
    params = SamplingParams(temperature=0.7, max_tokens=9, stop_token_ids=(5, 2))
    fields = sampling_fields(params, eos=(2, 3))
    assert fields["stop_token_ids"] == [2, 3, 5]
    assert fields["ignore_eos"] is True
    assert (fields["temperature"], fields["max_tokens"]) == (0.7, 9)
    assert sampling_fields(replace(params, ignore_eos=True), eos=(2, 3))["stop_token_ids"] == [5, 2]


def made(**changes) -> Completion:
    generated = Generated(
        **({"token_ids": [4, 5], "logprobs": [-1.5, -0.5], "log_mass": None, "finish_reason": "stop"} | changes)
    )
    return completion(Sample(PROMPTS[0], 3, 11), generated, policy_version=8)


def test_a_completion_holds_what_was_sampled() -> None:
    c = made(log_mass=[-0.25, 0.0])
    assert (c.prompt_id, c.sample_index, c.policy_version, c.finish_reason) == (7, 3, 8, "stop")
    assert c.token_ids.tolist() == [4, 5]
    assert c.logprobs.tolist() == [-1.5, -0.5]
    assert c.log_mass.tolist() == [-0.25, 0.0]
    assert made().log_mass.tolist() == [0.0, 0.0]
    assert made(finish_reason="length").finish_reason == "length"


@pytest.mark.parametrize(
    "changes",
    [{"finish_reason": "abort"}, {"finish_reason": None}, {"logprobs": [-1.0]}, {"logprobs": [-1.0, math.nan]},
     {"token_ids": [], "logprobs": []}],
)  # fmt: skip
def test_a_broken_completion_is_an_error(changes: dict) -> None:
    with pytest.raises(RuntimeError, match="vLLM"):
        made(**changes)


def test_completions_are_grouped_by_prompt() -> None:
    done = [replace(made(), sample_index=i) for i in range(5)]
    assert [[c.sample_index for c in group] for group in grouped(done, [2, 0, 3])] == [[0, 1], [], [2, 3, 4]]


# ---------------------------------------------------------------- what is received


def expected_set() -> dict[str, Tensor]:
    return {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int8)}


def test_a_complete_set_is_held_in_order() -> None:
    sent = [("b", torch.ones(4, dtype=torch.int8)), ("a", torch.ones(2, 3))]
    held, kept, copied = (
        dict(checked(stream, expected_set(), {}, keep=keep))
        for stream, keep in ((StableTensors(sent), False), (StableTensors(sent), True), (sent, False))
    )
    assert list(held) == ["b", "a"]
    assert all(held[name].data_ptr() == tensor.data_ptr() for name, tensor in sent)
    for copies in (kept, copied):
        assert all(copies[name].data_ptr() != tensor.data_ptr() for name, tensor in sent)
        assert all(torch.equal(copies[name], tensor) for name, tensor in sent)


def test_the_missing_elements_are_counted() -> None:
    with pytest.raises(RefreshError, match="4 of 10 elements came; missing: a"):
        dict(checked([("b", torch.ones(4, dtype=torch.int8))], expected_set(), {}, keep=False))


def test_changed_fractions_by_hand() -> None:
    before = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int8)}
    after = {"a": before["a"].clone(), "b": before["b"].clone()}
    after["a"][1, 2], after["b"][:3] = -0.0, 1
    assert changed_fractions(before, after) == (1 / 6, 3 / 4)
    assert changed_fractions(before, before) == (0.0, 0.0)
    assert changed_fractions({}, after) == (1.0, 1.0)
    assert changed_fractions({}, {"a": after["a"]}) == (1.0, 0.0)


# ---------------------------------------------------------------- truncation


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (5, 0.8), (99, 0.3), (1, 1.0)])
def test_truncation_follows_the_embedded_engine(top_k: int, top_p: float) -> None:
    """Every token that one keeps the other draws, with the same mass."""
    torch.manual_seed(3)
    logits = torch.randn(4, 12) * 2
    params = SamplingParams(top_k=top_k, top_p=top_p)
    truncated = logits.clone()
    log_mass = truncate_(truncated, top_k, top_p)
    drawn = sample(
        logits.repeat_interleave(400, 0),
        uniforms(torch.arange(1600), torch.zeros(1, dtype=torch.int64)).squeeze(1),
        params,
    )
    assert drawn.log_mass is not None
    torch.testing.assert_close(drawn.log_mass.view(4, 400)[:, 0], log_mass, rtol=0, atol=1e-6)
    for row, tokens in enumerate(drawn.tokens.view(4, 400)):
        kept = truncated[row].isfinite().nonzero().squeeze(1)
        assert set(tokens.tolist()) <= set(kept.tolist())
        # a token whose share is below 1 % may not come up in 400 draws
        likely = kept[truncated[row].softmax(0)[kept] > 0.02]
        assert set(likely.tolist()) <= set(tokens.tolist())
    assert torch.equal(truncated[truncated.isfinite()], logits[truncated.isfinite()])


def test_masses_are_found_by_sample_and_position() -> None:
    record = MassRecord()
    record.note([(0, 0), (1, 0)], torch.tensor([-0.5, -0.25]))
    record.note([(1, 0), (0, 1)], torch.tensor([-0.125, -1.0]))  # sample 1's prompt came in two chunks
    assert record.of_samples([2, 1]) == [[-0.5, -1.0], [-0.125]]
    with pytest.raises(RuntimeError, match="async_scheduling: false"):
        record.of_samples([3, 1])
    record.clear()
    assert record.of_samples([0]) == [[]]
