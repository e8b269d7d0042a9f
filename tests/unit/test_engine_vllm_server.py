"""`VLLMServerEngine` against servers of this process: lost replicas, versions, the two phases of a refresh."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from vllm_peers import PATIENCE, VLLMPeer, loading, sampled

from lqrl.engines.base import EngineSpec, EngineUnavailableError, RefreshError, StaleEngineError
from lqrl.engines.digest import digest
from lqrl.engines.vllm import VLLMServerEngine, VLLMServerEngineFactory
from lqrl.engines.vllm.fleet import ReplicasLostError
from lqrl.engines.vllm.requests import samples
from lqrl.engines.vllm.served import ServedModel
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
# The learner is on the CPU; the servers say that they are not.
SPEC = EngineSpec(CONFIG, QuantScheme.preset("none"), torch.float32, torch.device("cpu"), 64, (2,))
PROMPTS = [Prompt(7, (5, 6, 7)), Prompt(9, (8,)), Prompt(11, (9, 10))]
PARAMS = SamplingParams(n=(8, 3, 9), max_tokens=3)
Start = Callable[..., VLLMPeer]


def weights(seed: int = 0) -> dict[str, Tensor]:
    policy = load_model(CONFIG, dtype=torch.float32, seed=seed)
    return dict(export_weights(policy, SPEC.scheme, export_dtype=SPEC.dtype))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers that end with the test."""
    started: list[VLLMPeer] = []

    def one(**options: Any) -> VLLMPeer:
        started.append(VLLMPeer(ServedModel(SPEC, unties=False), **options))
        return started[-1]

    yield one
    for peer in started:
        peer.close()


def engine_on(*peers: VLLMPeer, **options: Any) -> VLLMServerEngine:
    options = {"timeout_s": 2 * PATIENCE, "attempts": 3, "backoff_s": 0.01, "max_num_seqs": 2} | options
    return VLLMServerEngineFactory(urls=[peer.url for peer in peers], **options)(SPEC)


def refreshed(*peers: VLLMPeer, **options: Any) -> VLLMServerEngine:
    engine = engine_on(*peers, **options)
    engine.update_weights(weights().items(), policy_version=4)
    return engine


def drawn(engine: VLLMServerEngine, seed: int = 3) -> list[tuple[int, int, list[int]]]:
    groups = engine.generate(PROMPTS, PARAMS, seed=seed)
    assert [len(group) for group in groups] == list(PARAMS.counts(3))
    assert {c.policy_version for group in groups for c in group} == {engine.policy_version}
    return [(c.prompt_id, c.sample_index, c.token_ids.tolist()) for group in groups for c in group]


def wanted(seed: int = 3) -> list[tuple[int, int, list[int]]]:
    return [(s.prompt.id, s.index, sampled(s.seed, PARAMS.max_tokens)) for s in samples(PROMPTS, PARAMS, seed)]


def after(completions: int, then: Callable[[], Any]) -> Callable[[str], None]:
    """Does something once, when so many completions were asked."""
    left = iter([lambda: None] * completions + [then])
    return lambda route: next(left, lambda: None)() if route == "/v1/completions" else None


def waiting(event: threading.Event, then: Callable[[], Any] = lambda: None) -> Callable[[str], None]:
    """Holds completions back until ``event``, and does something ahead of that."""

    def before(route: str) -> None:
        if route == "/v1/completions":
            then()
            assert event.wait(PATIENCE)

    return before


# ---------------------------------------------------------------- generation


def test_samples_are_shared_and_come_back_in_order(start: Start) -> None:
    peers = start(), start()
    engine = refreshed(*peers)
    before = [peer.asked["/v1/completions"] for peer in peers]  # a probe each
    begun = threading.Event(), threading.Event()
    for peer, mine, other in zip(peers, begun, reversed(begun), strict=True):
        peer.before = waiting(other, lambda mine=mine: mine.set())
    assert drawn(engine) == wanted()
    shares = [peer.asked["/v1/completions"] - n for peer, n in zip(peers, before, strict=True)]
    assert sum(shares) == 20
    assert min(shares) > 0
    assert (engine.stats.prompt_tokens, engine.stats.generated_tokens) == (6, 60)
    assert engine.generate([], PARAMS, seed=0) == engine.score([]) == []


def test_given_tokens_are_scored(start: Start) -> None:
    engine = refreshed(start())
    assert [each.tolist() for each in engine.score([[5, 9, 4], [7]])] == [[0.0, -2.25, -1.0], [0.0]]


def test_a_replica_that_dies_is_reported_and_nothing_of_it_is_used(start: Start) -> None:
    dying, healthy = start(), start()
    engine = refreshed(dying, healthy)
    dead = threading.Event()
    dying.before = after(4, lambda: (dying.die(), dead.set()))
    healthy.before = waiting(dead)
    with pytest.warns(UserWarning, match=rf"{dying.url} is lost .* [4-6] of its requests are to be redone, 1 of 2"):
        assert drawn(engine) == wanted()
    assert engine.serving == [healthy.url]
    assert healthy.asked["/v1/completions"] == 1 + 20  # a probe, and every sample once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drawn(engine, seed=5) == wanted(5)


def test_all_replicas_lost_is_an_error_and_the_engine_refuses(start: Start) -> None:
    peers = start(), start()
    engine = refreshed(*peers)
    for peer in peers:
        peer.before = after(3, peer.die)
    with pytest.warns(UserWarning, match="is lost"), pytest.raises(ReplicasLostError, match="no replica is left") as e:
        drawn(engine)
    assert all(peer.url in str(e.value) for peer in peers)
    assert (engine.policy_version, engine.serving) == (-1, [])
    with pytest.raises(StaleEngineError, match=r"no replica is left.*start servers again and call update_weights"):
        drawn(engine)
    with pytest.raises(RefreshError, match="no replica answers"):
        engine.update_weights(weights().items(), policy_version=5)


def test_a_passing_fault_costs_no_replica(start: Start) -> None:
    server = start()
    engine = refreshed(server)
    faults = iter([(503, {})] * 2)
    server.before = lambda route: next(faults, None) if route == "/v1/completions" else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drawn(engine) == wanted()


def test_a_replica_of_another_version_is_not_asked(start: Start) -> None:
    stale, good = start(), start()
    engine = refreshed(stale, good)
    before = stale.asked["/v1/completions"]
    stale.version = "default"  # it was started anew
    with pytest.warns(UserWarning, match=rf"{stale.url} is lost \(its weights are version '.*default', wanted is '4-"):
        assert drawn(engine) == wanted()
    assert stale.asked["/v1/completions"] == before
    good.version = "5-other"
    with pytest.warns(UserWarning, match="or 5-other'"), pytest.raises(ReplicasLostError, match="0 of 20 requests"):
        drawn(engine)


def test_what_a_replica_says_while_its_version_changes_is_redone(start: Start) -> None:
    changing, good = start(), start()
    engine = refreshed(changing, good)
    changed = threading.Event()
    changing.before = after(3, lambda: (setattr(changing, "version", "9-other"), changed.set()))
    good.before = waiting(changed)
    with pytest.warns(
        UserWarning, match=rf"{changing.url} is lost \(its weights are version '.* or 9-other'.*; \d+ of its"
    ):
        assert drawn(engine) == wanted()
    assert good.asked["/v1/completions"] == 1 + 20


def test_a_request_that_is_refused_is_an_error(start: Start) -> None:
    server = start()
    engine = refreshed(server)
    server.before = lambda route: (400, {"error": "no such field"}) if route == "/v1/completions" else None
    with pytest.raises(RuntimeError, match=rf"{server.url}: /v1/completions .* 400: .*no such field"):
        drawn(engine)


def test_truncation_is_refused(start: Start) -> None:
    with pytest.raises(ValueError, match="do not report the mass"):
        refreshed(start()).generate(PROMPTS, SamplingParams(top_p=0.9), seed=0)


# ---------------------------------------------------------------- refresh


def test_a_refresh_reaches_all_replicas_and_is_stamped_last(start: Start) -> None:
    peers = start(), start()
    engine = engine_on(*peers)
    assert engine.policy_version == -1
    with pytest.raises(StaleEngineError, match="no weights yet"):
        drawn(engine)
    versions: list[str | None] = []
    peers[0].before = lambda route: versions.append(peers[0].version) if peers[0].asked["/pause"] else None
    report = engine.update_weights(weights().items(), policy_version=4)
    assert len(set(versions)) == 1  # from before the load until the end
    assert str(versions[0]).startswith("none-")
    assert [peer.held for peer in peers] == [digest(weights().items())] * 2
    assert [peer.version for peer in peers] == [f"4-{report.digest[:16]}"] * 2
    assert not any(peer.paused for peer in peers)
    assert (report.tensors, report.policy_version, engine.policy_version) == (len(weights()), 4, 4)
    again, other = (engine.update_weights(weights(seed).items(), policy_version=5 + seed) for seed in (0, 1))
    assert again.elements_changed_fraction == 0 < other.elements_changed_fraction
    assert report.digest == again.digest != other.digest


def test_a_vllm_without_the_version_route_keeps_it_in_its_worker(start: Start) -> None:
    server = start()
    server.version = None
    engine = refreshed(server)
    assert server.stamped.startswith("4-")
    assert drawn(engine) == wanted()
    server.stamped = ""
    with pytest.warns(UserWarning, match="version ''"), pytest.raises(ReplicasLostError):
        drawn(engine)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "load": ({"load_result": {"error": "OutOfMemoryError: full", "broken": False}}, "failed while it loaded.*full"),
    "moved": ({"load_result": {"moved": ["a.weight"]}}, r"storage moved during the refresh: a\.weight"),
    "missed": ({"load_result": {"missed": ["model.norm.weight"]}}, r"vLLM did not load model\.norm\.weight"),
    "other tensors": ({"load_result": {"digest": "0"}}, "hold different tensors"),
    "prefixes": ({"keeps_prefixes": True}, "kept prefixes of the old weights"),
    "NaN": ({"says_nan": True}, "gives NaN or inf log-probs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refresh_that_fails_on_one_replica_fails(start: Start, fault: str) -> None:
    faulty, good = start(), start()
    engine = refreshed(faulty, good)
    changes, message = FAULTS[fault]
    plain = {name: getattr(faulty, name) for name in changes}
    vars(faulty).update(changes)
    with pytest.raises(RefreshError, match=message):
        engine.update_weights(weights(1).items(), policy_version=5)
    assert all(map(loading, (faulty, good)))
    assert engine.policy_version == -1
    with pytest.raises(StaleEngineError, match="its last refresh failed"):
        drawn(engine)
    vars(faulty).update(plain)
    engine.update_weights(weights(1).items(), policy_version=6)
    assert drawn(engine) == wanted()
    assert len(engine.serving) == 2


def test_a_parameter_that_is_tied_may_be_missed(start: Start) -> None:
    server = start()
    server.load_result = {"missed": ["lm_head.weight"]}
    assert refreshed(server).policy_version == 4


def test_an_incomplete_stream_reaches_no_replica(start: Start) -> None:
    server = start()
    engine = refreshed(server)
    before = server.held, server.version, server.asked.copy()
    with pytest.raises(RefreshError, match=r"elements came; missing: model\.norm\.weight"):
        engine.update_weights([w for w in weights(1).items() if w[0] != "model.norm.weight"], policy_version=5)
    assert (server.held, server.version, server.asked) == before
    with pytest.raises(StaleEngineError):
        drawn(engine)


@pytest.mark.parametrize("route", ["/pause", "/collective_rpc", "/resume", "/update_weight_version"])
def test_a_refresh_is_done_again_without_a_replica_that_dies_in_it(start: Start, route: str) -> None:
    dying, good = start(), start()
    engine = refreshed(dying, good)
    loads, before = good.asked["lqrl_load"], dying.asked[route]
    # its version is taken away first, and given last; its workers say ahead of that what they serve
    survived = route in ("/update_weight_version", "/collective_rpc")
    dying.before = lambda asked: dying.die() if asked == route and dying.asked[route] - before > survived else None
    with pytest.warns(UserWarning, match=rf"failed on 1 of 2 replicas: {dying.url}: {route}.* again with the other 1"):
        engine.update_weights(weights(1).items(), policy_version=5)
    assert engine.serving == [good.url]
    assert good.asked["lqrl_load"] == loads + 2
    assert drawn(engine) == wanted()
    assert good.version is not None
    assert good.version.startswith("5-")
    # the same place, a new server
    dying.gone()
    back = start(port=dying.port)
    engine.update_weights(weights(1).items(), policy_version=7)
    assert engine.serving == [dying.url, good.url]
    assert back.held == good.held
    assert back.version == good.version


def test_a_refresh_in_which_all_replicas_die_fails(start: Start) -> None:
    peers = start(), start()
    engine = refreshed(*peers)
    for peer in peers:
        peer.before = lambda route, peer=peer: peer.die() if route == "/pause" else None
    with pytest.raises(RefreshError, match="failed on 2 of 2 replicas"):
        engine.update_weights(weights(1).items(), policy_version=5)
    assert (engine.policy_version, engine.serving) == (-1, [])
    with pytest.raises(StaleEngineError, match="its last refresh failed"):
        drawn(engine)


def test_a_replica_that_a_load_left_broken_is_used_again_only_when_it_is_new(start: Start) -> None:
    broken, good = start(), start()
    engine = refreshed(broken, good)
    broken.load_result = {"error": "RuntimeError: half", "broken": True}
    with pytest.raises(RefreshError, match="half"):
        engine.update_weights(weights().items(), policy_version=5)
    broken.load_result = {}
    engine.update_weights(weights().items(), policy_version=6)
    assert engine.serving == [good.url]
    broken.version = "default"
    engine.update_weights(weights().items(), policy_version=7)
    assert engine.serving == [broken.url, good.url]


def test_a_directory_that_cannot_be_written_is_named_as_the_fault(start: Start) -> None:
    with pytest.raises(RefreshError, match="set transfer_directory"):
        refreshed(start(), transfer_directory="/nowhere/at/all")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("facts", "error", "message"),
    [
        ({"vllm": "0.99.0"}, RuntimeError, "found 0.99.0"),
        ({"max_model_len": 32}, RuntimeError, "max_model_len 32; start it with at least 64"),
        ({"served": {"dtype": "torch.bfloat16"}}, RuntimeError, 'serves dtype "torch.bfloat16", the recipe has'),
        ({"served": {"quantization_config": {"a": 1}}}, RuntimeError, "serves a quantization"),
        ({"served": {"tie_word_embeddings": False}}, RuntimeError, "serves tie_word_embeddings false"),
        ({"served": {"logprobs_mode": "raw_logprobs"}}, RuntimeError, 'the recipe has "processed_logprobs"'),
        ({"served": {"generation_config": "auto"}}, RuntimeError, "serves generation_config"),
        ({"served": {"speculative": True}}, RuntimeError, "serves speculative true"),
    ],
)
def test_a_server_of_another_model_is_refused(
    start: Start, facts: dict[str, Any], error: type[Exception], message: str
) -> None:
    server = start(**facts)
    with pytest.raises(error, match=message):
        engine_on(start(), server)


def test_servers_that_lqrl_cannot_refresh_are_refused(start: Start) -> None:
    plain = start()
    plain.before = lambda route: (404, {}) if route == "/collective_rpc" else None
    with pytest.raises(ValueError, match=rf"^{plain.url}: .*VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls"):
        engine_on(plain)
    with pytest.raises(RuntimeError, match=r"1 of 2 vLLM servers cannot be used.*--worker-extension-cls"):
        engine_on(start(), plain)
    gone = start()
    gone.close()
    with pytest.raises(EngineUnavailableError, match=rf"no vLLM server answers at {gone.url} .*correct urls"):
        engine_on(gone)


def test_what_no_vllm_does_is_refused(start: Start) -> None:
    with pytest.raises(NotImplementedError, match="exact: true needs TorchEngineFactory"):
        VLLMServerEngineFactory(urls=[start().url])(replace(SPEC, exact=True))


def test_a_closed_engine_does_nothing(start: Start) -> None:
    server = start()
    engine = refreshed(server)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed; build a new one"):
        drawn(engine)
    with pytest.raises(RefreshError, match="closed"):
        engine.update_weights(weights().items(), policy_version=5)
    assert server.version is not None
    assert server.version.startswith("4-")  # not ours to stop
