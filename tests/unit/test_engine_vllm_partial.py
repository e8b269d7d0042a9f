"""Partial rollouts of `VLLMServerEngine` against servers of this process: what is cut is kept, and continued once."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import test_engine_vllm_server
import torch
from jsonargparse import ArgumentError, ArgumentParser
from test_engine_vllm_server import SPEC, engine_on, refreshed, weights
from vllm_peers import PATIENCE, VLLMPeer, sampled

from lqrl.data.budget import UniformBudget
from lqrl.engines.base import EngineFactory, StaleEngineError
from lqrl.engines.torch import TorchEngineFactory
from lqrl.engines.vllm import VLLMServerEngine
from lqrl.engines.vllm.fleet import ReplicasLostError
from lqrl.engines.vllm.partial import Draft, Partial
from lqrl.engines.vllm.requests import CUT, Generated, Sample
from lqrl.rewards import RewardFn, RewardSum, RewardTerm
from lqrl.rollouts import collect, rollout_metrics, to_train_batch
from lqrl.types import Advantages, Completion, Prompt, SamplingParams

Start = Callable[..., VLLMPeer]
start = test_engine_vllm_server.start

PARAMS = SamplingParams(n=2, max_tokens=12)
HALF = Partial(limit_fraction=0.5)
WIDTH = 5  # the four samples of two prompts that are held back, and one more at a time


def held(body: Any) -> int:
    """What a server says that holds the first two of `prompts` back until they are continued."""
    begins = len(body["prompt"]) == 3 and body["prompt"][0] in (5, 6)
    return 1 + body["seed"] % 11 if begins else body["max_tokens"]


def holding(peer: VLLMPeer) -> VLLMPeer:
    peer.says = held
    return peer


def prompts(first: int, count: int = 4) -> list[Prompt]:
    return [Prompt(first + i, (5 + i, 6, 7)) for i in range(count)]


def renew(engine: VLLMServerEngine, version: int) -> None:
    engine.update_weights(weights(version % 2).items(), policy_version=version)


def named(group: list[Completion]) -> list[tuple[int, int]]:
    return [(c.prompt_id, c.sample_index) for c in group]


def drafts(engine: VLLMServerEngine) -> list[dict[str, Any]]:
    return [draft for group in engine.unfinished() for draft in group["drafts"]]


# ---------------------------------------------------------------- limits and what is kept


def test_every_sample_is_returned_once_whatever_was_cut(start: Start) -> None:
    engine = refreshed(holding(start()), holding(start()), partial=HALF, max_num_seqs=WIDTH)
    returned: list[tuple[Prompt, list[Completion]]] = []
    left = []
    for call in range(4):
        renew(engine, 5 + call)
        returned += engine.generate_some(prompts(10 * call), PARAMS, seed=call)
        left.append(len(engine.unfinished()))
    engine = _finish(engine, returned)
    assert sorted(named([c for _, group in returned for c in group])) == [
        (10 * call + i, k) for call in range(4) for i in range(4) for k in range(2)
    ]
    assert all(named(group) == [(prompt.id, 0), (prompt.id, 1)] for prompt, group in returned)
    assert min(left) >= 2
    assert all(len(c.token_ids) == 12 and c.finish_reason == "length" for _, group in returned for c in group)
    mixed = [c for _, group in returned for c in group if c.token_versions is not None]
    assert mixed
    for c in mixed:
        versions = c.token_versions
        assert versions is not None
        assert len(versions) == 12
        assert sorted(set(versions.tolist())) == [c.policy_version, c.policy_version + 1]
        assert torch.equal(versions, versions.sort().values)


def _finish(engine: VLLMServerEngine, returned: list[tuple[Prompt, list[Completion]]]) -> VLLMServerEngine:
    while engine.unfinished():
        renew(engine, engine.policy_version + 1)
        returned += engine.generate_some([], PARAMS, seed=0)
    return engine


def test_a_bad_sample_leaves_what_was_begun_as_it_was(start: Start) -> None:
    peer = holding(start())
    engine = refreshed(peer, partial=HALF, max_num_seqs=WIDTH)
    engine.generate_some(prompts(0), PARAMS, seed=0)
    begun, stats = engine.unfinished(), engine.stats
    renew(engine, 5)
    peer.says_nan = True
    with pytest.raises(RuntimeError, match=rf"{peer.url}: .*NaN or missing"):
        engine.generate_some(prompts(10), PARAMS, seed=1)
    assert (engine.unfinished(), engine.stats) == (begun, stats)


@pytest.mark.parametrize(("reason", "message"), [("abort", "samples without a token"), (None, "a sample with None")])
def test_answers_that_bring_nothing_end_the_call(start: Start, reason: str | None, message: str) -> None:
    peer = start()
    engine = refreshed(peer, partial=HALF)

    def nothing(route: str) -> tuple[int, Any] | None:
        choice = {"finish_reason": reason, "prompt_token_ids": [5, 6, 7], "token_ids": []}
        said = {"choices": [choice | {"logprobs": {"token_logprobs": []}}]}
        return (200, said) if route == "/v1/completions" else None

    peer.before = nothing
    with pytest.raises(RuntimeError, match=message):
        engine.generate_some(prompts(0, 1), PARAMS, seed=0)


def test_a_server_that_does_not_go_on_after_a_cut_is_asked_again_or_lost(start: Start) -> None:
    peer = holding(start())
    engine = refreshed(peer, partial=HALF, max_num_seqs=WIDTH)
    refusals = [503] * 2  # in the cut, and once more
    peer.before = lambda route: (refusals.pop(), {}) if route == "/resume" and refusals else None
    assert len(engine.generate_some(prompts(0), PARAMS, seed=0)) >= 2
    assert not peer.paused
    renew(engine, 5)
    peer.before = lambda route: (503, {}) if route == "/resume" else None
    with pytest.warns(UserWarning, match="/resume failed in 3 attempts"), pytest.raises(ReplicasLostError):
        engine.generate_some(prompts(10), PARAMS, seed=1)


def test_what_is_continued_has_its_tokens_and_the_rest_of_its_length(start: Start) -> None:
    peer = holding(start())
    engine = refreshed(peer, partial=HALF, max_num_seqs=WIDTH)
    first = engine.generate_some(prompts(0), PARAMS, seed=3)
    kept = {(g["prompt"]["id"], draft["index"]): draft for g in engine.unfinished() for draft in g["drafts"]}
    renew(engine, 5)
    asked, before = len(peer.bodies), {p.id for p, _ in first}
    second = engine.generate_some([], PARAMS, seed=4)
    continued = [(c, kept[p.id, c.sample_index]) for p, group in second for c in group]
    assert before.isdisjoint(p.id for p, _ in second)
    cut = [(c, draft) for c, draft in continued if draft["finish_reason"] is None and draft["token_ids"]]
    assert len(cut) == 4
    for c, draft in cut:
        had = list(draft["token_ids"])
        (body,) = [b for b in peer.bodies[asked:] if b["prompt"][3:] == had and b["prompt"][0] == 5 + c.prompt_id]
        assert body["max_tokens"] == 12 - len(had)
        assert body["seed"] != draft["seed"]
        assert c.token_ids.tolist() == had + sampled(body["seed"], 12 - len(had))
        assert c.token_versions is not None
        assert c.token_versions.tolist() == [4] * len(had) + [5] * (12 - len(had))
        assert torch.equal(c.logprobs, torch.full((12,), -0.5))


def test_a_call_ends_in_time_but_with_a_whole_group(start: Start) -> None:
    peer = start()
    peer.says = lambda body: 12 if body["prompt"][0] == 5 else 3  # without a limit they would wait for ever
    engine = refreshed(peer, partial=Partial(limit_s=0.01), max_num_seqs=3)
    groups = engine.generate_some(prompts(0, count=8), PARAMS, seed=0)
    assert [named(group) for _, group in groups] == [[(0, 0), (0, 1)]]
    assert len(engine.unfinished()) == 7


def test_what_was_begun_long_ago_is_waited_for(start: Start) -> None:
    peer = start()
    # the first three of four prompts are cut off twice
    peer.says = lambda body: 2 if body["prompt"][0] < 8 and len(body["prompt"]) < 3 + 4 else body["max_tokens"]
    engine = refreshed(peer, partial=Partial(limit_s=0.01, max_lag=2), max_num_seqs=16)
    seen: list[set[int]] = []
    for version in (4, 5, 6):
        renew(engine, version)
        groups = engine.generate_some(prompts(10 * version), PARAMS, seed=version)
        seen.append({p.id for p, _ in groups})
        assert min(c.policy_version for _, group in groups for c in group) >= version - 2
    assert seen == [{43}, {53}, {40, 41, 42, 63}]


@pytest.mark.parametrize("versions", [(5, 6), (2,)])  # more than may lie between its tokens, or an earlier one
def test_what_cannot_be_continued_is_begun_anew(start: Start, caplog: Any, versions: tuple[int, ...]) -> None:
    peer = holding(start())
    engine = refreshed(peer, partial=HALF, max_num_seqs=WIDTH)
    engine.generate_some(prompts(0), PARAMS, seed=3)
    late = {(g["prompt"]["id"], draft["index"]): draft for g in engine.unfinished() for draft in g["drafts"]}
    assert any(draft["token_ids"] for draft in late.values())
    for version in versions:
        renew(engine, version)
    peer.says = lambda body: body["max_tokens"]
    returned = engine.generate_some(prompts(10), PARAMS, seed=4)
    assert "groups of partial rollouts are begun anew: more than max_lag = 1 versions" in caplog.text
    again = [c for prompt, group in returned for c in group if prompt.id < 10]
    assert {(c.prompt_id, c.sample_index) for c in again} == late.keys()
    for c in again:
        assert (c.policy_version, c.token_versions) == (versions[-1], None)
        assert c.token_ids.tolist() == sampled(late[c.prompt_id, c.sample_index]["seed"], 12)


def test_a_validation_asks_for_its_own_prompts_alone(start: Start) -> None:
    peer = holding(start())
    engine = refreshed(peer, partial=HALF, max_num_seqs=WIDTH)
    engine.generate_some(prompts(0), PARAMS, seed=0)
    kept = engine.unfinished()
    peer.says = lambda body: body["max_tokens"]
    assert [named(group) for group in engine.generate(prompts(50, 2), PARAMS, seed=1)] == [
        [(50, 0), (50, 1)], [(51, 0), (51, 1)],
    ]  # fmt: skip
    assert engine.unfinished() == kept != []


# ---------------------------------------------------------------- faults


def test_a_replica_that_dies_while_samples_are_cut_costs_nothing(start: Start) -> None:
    dying, good = holding(start()), holding(start())
    engine = refreshed(dying, good, partial=HALF, max_num_seqs=WIDTH)
    # it is told to stop, and does not answer
    dying.before = lambda route: dying.die() if route == "/pause" else None
    with pytest.warns(UserWarning, match=rf"{dying.url} is lost"):
        returned = engine.generate_some(prompts(0), PARAMS, seed=0)
    good.says = lambda body: body["max_tokens"]
    _finish(engine, returned)
    assert sorted(named([c for _, group in returned for c in group])) == [(i, k) for i in range(4) for k in range(2)]
    assert all(len(c.token_ids) == 12 for _, group in returned for c in group)


def test_a_server_that_cannot_cut_is_named(start: Start) -> None:
    peer = holding(start())
    engine = refreshed(peer, partial=HALF, max_num_seqs=WIDTH)
    peer.before = lambda route: (404, {"detail": "Not Found"}) if route == "/pause" else None
    with pytest.raises(RuntimeError, match=rf"{peer.url} .*/pause.* was refused .*VLLM_SERVER_DEV_MODE=1, or leave"):
        engine.generate_some(prompts(0), PARAMS, seed=0)


def test_a_call_that_fails_leaves_what_was_begun_as_it_was(start: Start) -> None:
    peer = holding(start())
    engine = refreshed(peer, partial=HALF, max_num_seqs=WIDTH)
    engine.generate_some(prompts(0), PARAMS, seed=0)
    kept = engine.unfinished()
    peer.before = lambda route: (500, {}) if route == "/v1/completions" else None
    with pytest.warns(UserWarning, match="is lost"), pytest.raises(ReplicasLostError):
        engine.generate_some(prompts(20), PARAMS, seed=1)
    assert engine.unfinished() == kept != []
    with pytest.raises(StaleEngineError):
        engine.generate_some([], PARAMS, seed=1)
    peer.before = lambda route: None
    renew(engine, 5)
    returned = engine.generate_some([], PARAMS, seed=1)
    assert {group["prompt"]["id"] for group in kept} == {p.id for p, _ in returned} | {
        group["prompt"]["id"] for group in engine.unfinished()
    }


def test_a_request_that_comes_late_is_cut_too(start: Start) -> None:
    """It is on its way while its server is told to stop."""
    peer = start()
    engine = refreshed(peer, partial=Partial(limit_fraction=0.25), max_num_seqs=8)
    told = threading.Event()
    peer.before = lambda route: told.set() if route == "/resume" else None

    def late(body: Any) -> int:
        if body["prompt"][0] == 5:
            return 12
        assert told.wait(PATIENCE)
        return 4

    peer.says = late
    engine.generate_some(prompts(0), PARAMS, seed=0)
    assert [(draft["finish_reason"], len(draft["token_ids"])) for draft in drafts(engine)] == [(None, 4)] * 6


# ---------------------------------------------------------------- drafts, checkpoints, options


def test_a_draft_grows_in_order_and_its_seed_with_it() -> None:
    draft = Draft(Sample(Prompt(3, (1, 2)), 0, 99))
    assert (draft.seed, draft.tokens) == (99, (1, 2))
    one = draft.continued(Generated([4, 5], [-1.0, -2.0], None, CUT), 7, max_tokens=4)
    assert (one.tokens, one.finish_reason) == ((1, 2, 4, 5), None)
    assert 0 <= one.seed < 2**63
    assert one.seed != 99
    same = one.continued(Generated([], [], None, CUT), 8, max_tokens=4)
    assert same == one
    two = same.continued(Generated([6], [-3.0], None, "stop"), 9, max_tokens=4)
    done = two.completion()
    assert done.token_ids.tolist() == [4, 5, 6]
    assert done.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert done.token_versions is not None
    assert done.token_versions.tolist() == [7, 7, 9]
    assert (done.policy_version, done.finish_reason) == (7, "stop")
    full = one.continued(Generated([6, 8], [-3.0, -1.0], None, CUT), 9, max_tokens=4)
    assert full.finish_reason == "length"  # nothing is left to ask for
    with pytest.raises(RuntimeError, match="1 tokens and 0 log-probs"):
        one.continued(Generated([6], [], None, CUT), 9, max_tokens=4)


def test_a_checkpoint_carries_what_was_begun(start: Start) -> None:
    engine = refreshed(holding(start()), partial=HALF, max_num_seqs=WIDTH)
    first = engine.generate_some([replace(p, fields={"level": 3}) for p in prompts(0)], PARAMS, seed=0)
    file = io.BytesIO()
    torch.save(engine.unfinished(), file)
    file.seek(0)
    resumed = refreshed(start(), partial=HALF)
    resumed.take_up(torch.load(file, weights_only=True))
    assert resumed.unfinished() == engine.unfinished()
    returned = [*first]
    _finish(resumed, returned)
    assert sorted(p.id for p, _ in returned) == [0, 1, 2, 3]
    assert all(p.fields == {"level": 3} for p, _ in returned)
    with pytest.raises(ValueError, match=r"3 groups of partial rollouts.*partial set"):
        refreshed(start()).take_up([{}] * 3)
    embedded = TorchEngineFactory()(SPEC)
    embedded.take_up([])
    with pytest.raises(ValueError, match="TorchEngine cannot continue"):
        embedded.take_up(engine.unfinished())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs limit_s or limit_fraction"),
        ({"limit_s": 0}, "limit_s must be above 0"),
        ({"limit_s": float("nan")}, "limit_s must be above 0"),
        ({"limit_fraction": 1.0}, r"limit_fraction must be in \(0, 1\)"),
        ({"limit_s": 1, "max_lag": 0}, "max_lag must be at least 1"),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partial(**options)


def test_without_limits_all_comes_at_once(start: Start) -> None:
    engine = engine_on(start())
    renew(engine, 4)
    assert [p.id for p, _ in engine.generate_some(prompts(0), PARAMS, seed=0)] == [0, 1, 2, 3]
    assert engine.unfinished() == []


# ---------------------------------------------------------------- what the learner sees


class SecondIsRight(RewardFn):
    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        return [float(c.sample_index) for c in completions]


def test_the_batch_says_which_weights_drew_each_token_and_old_ones_are_refused(start: Start) -> None:
    engine = refreshed(holding(start()), partial=HALF, max_num_seqs=WIDTH)
    reward = RewardSum([RewardTerm(SecondIsRight(), "right")])
    options: dict[str, Any] = {"decode": str, "budget": UniformBudget(2), "pad_token_id": 0, "seed": 1}
    first = collect(engine, prompts(0), PARAMS, reward, oldest_version=4, **options)
    none = rollout_metrics(first)["rollout/token_lag"]  # a logger repeats what was said last
    assert (float(none.total), bool(none.count > 0)) == (0.0, True)
    renew(engine, 5)
    second = collect(engine, prompts(10, 1), PARAMS, reward, oldest_version=4, **options)
    batch = second.batch
    assert batch.token_versions is not None
    assert (batch.token_versions == -1).equal(~batch.completion_mask)
    assert set(batch.token_versions[batch.completion_mask].tolist()) == {4, 5}
    oldest = batch.token_versions.masked_fill(~batch.completion_mask, 99).min(1).values
    assert torch.equal(batch.policy_versions, oldest)
    lag = rollout_metrics(second)["rollout/token_lag"]
    assert float(lag.total) == int((batch.token_versions == 4).sum())
    assert float(lag.count) == int(batch.completion_mask.sum())
    rows = torch.ones(len(batch), dtype=torch.bool)
    rows[0] = False
    trained = to_train_batch(batch, Advantages(torch.ones(len(batch)), rows))
    assert trained.token_versions is not None
    assert torch.equal(trained.token_versions, batch.token_versions[1:, : trained.input_ids.shape[1]])
    assert torch.equal(trained.rollout_logprobs, batch.rollout_logprobs[1:, : trained.input_ids.shape[1]])

    collect(engine, prompts(20), PARAMS, reward, oldest_version=4, **options)
    assert any(draft["token_ids"] for draft in drafts(engine))
    renew(engine, 6)
    with pytest.raises(StaleEngineError, match=r"version 5 began, the oldest allowed is 6; raise max_staleness by 1"):
        collect(engine, prompts(30), PARAMS, reward, oldest_version=6, **options)


def test_limits_come_from_a_config() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(EngineFactory, "engine")
    servers = {"urls": ["http://host:1"], "partial": {"limit_s": 60, "max_lag": 2}}
    chosen = {"class_path": "lqrl.engines.vllm.VLLMServerEngineFactory", "init_args": servers}
    built = parser.instantiate(parser.parse_object({"engine": chosen}))
    assert built.engine.partial == Partial(limit_s=60, max_lag=2)
    embedded = {"class_path": "lqrl.engines.TorchEngineFactory", "init_args": {"partial": {"limit_s": 60}}}
    with pytest.raises(ArgumentError, match="partial"):
        parser.parse_object({"engine": embedded})
