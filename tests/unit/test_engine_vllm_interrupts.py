"""`VLLMServerEngine` against silent servers of this process: interrupts, short waits, calls of several threads."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_engine_vllm_server
from test_engine_vllm_server import PROMPTS, drawn, engine_on, refreshed, wanted, weights
from vllm_peers import PATIENCE, VLLMPeer, loading

from lqrl.engines.base import RefreshError
from lqrl.engines.vllm import VLLMServerEngine, peer
from lqrl.engines.vllm.partial import Partial
from lqrl.engines.vllm.peer import Patience, Peer, PeerLost, PeerRefusal
from lqrl.types import SamplingParams

Start = Callable[..., VLLMPeer]
start = test_engine_vllm_server.start

HALF = Partial(limit_fraction=0.5)
TWO = SamplingParams(n=2, max_tokens=12)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A process in the background ignores SIGINT, and so does what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set at the end of the test: what ends the silence of servers."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brief waits are over at once."""
    monkeypatch.setattr(peer, "BRIEF_S", 0.1)


def silent(over: threading.Event, *routes: str, then: Callable[[], Any] = lambda: None) -> Callable[[str], None]:
    """Does something and does not answer, on ``routes``, or on all of them when none is given."""

    def before(route: str) -> None:
        if not over.is_set() and (not routes or route in routes):
            then()
            over.wait(4 * PATIENCE)

    return before


def interrupt() -> None:
    """As Ctrl-C does, which wakes the main thread from whatever it waits for."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def holding_back(body: Any) -> int:
    """The samples of the first prompt are held back until they are cut off."""
    return 1 if body["prompt"] == list(PROMPTS[0].input_ids) else body["max_tokens"]


# ---------------------------------------------------------------- interrupts


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("route", ["/update_weight_version", "/pause", "/reset_prefix_cache", "/v1/completions"])
@pytest.mark.parametrize("streams", [False, True])
def test_an_interrupted_refresh_does_not_wait_for_silent_servers(
    start: Start, over: threading.Event, route: str, streams: bool
) -> None:
    server, other = start(), start()
    engine = engine_on(server, other, backoff_s=2 * PATIENCE, stream_refresh=streams, count_changes=not streams)
    server.before = silent(over, route, then=interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights(weights().items(), policy_version=4)
    assert time.monotonic() - started < PATIENCE
    server.before = lambda route: None
    engine.update_weights(weights().items(), policy_version=5)
    assert engine.serving == [server.url, other.url]
    assert drawn(engine) == wanted()


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_while_lost_servers_are_asked_does_not_wait(start: Start, over: threading.Event) -> None:
    server, other = start(), start()
    engine = refreshed(server, other)
    server.before = silent(over, "/health", then=interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights(weights().items(), policy_version=5)
    assert time.monotonic() - started < PATIENCE
    server.before = lambda route: None


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("route", ["/pause", "/resume"])
def test_an_interrupted_cut_does_not_wait_for_silent_servers(
    start: Start, over: threading.Event, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "BRIEF_S", 2.0 * PATIENCE)
    server = start()
    server.says = holding_back
    engine = refreshed(server, partial=HALF, max_num_seqs=8, backoff_s=2 * PATIENCE)
    server.before = silent(over, route, then=interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.generate_some(PROMPTS, TWO, seed=1)
    assert time.monotonic() - started < PATIENCE
    server.before, server.says = lambda route: None, lambda body: body["max_tokens"]
    assert drawn(engine) == wanted()
    assert not server.paused


# ---------------------------------------------------------------- short waits


@pytest.mark.usefixtures("_soon")
def test_a_cut_does_not_wait_long_for_a_server_that_says_nothing_of_it(start: Start) -> None:
    """It cuts, but says so late; the next cut, or the end of the call, has it go on."""
    server = start()
    server.says = holding_back
    engine = refreshed(server, partial=HALF, max_num_seqs=8)
    again = threading.Event()

    def late(route: str) -> None:
        if route == "/resume" and not again.is_set():
            again.set()
        elif route == "/pause" and not again.is_set():
            assert again.wait(PATIENCE)

    server.before = late
    started = time.monotonic()
    groups = engine.generate_some(PROMPTS, TWO, seed=1)
    assert time.monotonic() - started < PATIENCE
    assert {prompt.id for prompt, _ in groups} == {9, 11}
    assert engine.serving == [server.url]
    assert not server.paused


@pytest.mark.usefixtures("_soon")
def test_lost_servers_that_are_silent_hold_no_refresh_up(start: Start, over: threading.Event) -> None:
    lost, good = [start(), start()], start()
    engine = refreshed(*lost, good)
    for each in lost:
        each.version = "another"
    with pytest.warns(UserWarning, match="another', wanted is"):
        drawn(engine)
    both = threading.Barrier(2)
    for each in lost:
        each.before = silent(over, then=lambda: both.wait(PATIENCE))  # they are asked at the same time
    started = time.monotonic()
    engine.update_weights(weights(1).items(), policy_version=5)
    assert time.monotonic() - started < PATIENCE
    assert engine.serving == [good.url]
    assert not both.broken
    for each in lost:
        each.before = lambda route: None
    engine.update_weights(weights().items(), policy_version=6)
    assert engine.serving == [*(each.url for each in lost), good.url]


@pytest.mark.usefixtures("_soon")
def test_a_broken_server_that_is_silent_holds_no_refresh_up(start: Start, over: threading.Event) -> None:
    broken, good = start(), start()
    engine = refreshed(broken, good, backoff_s=2 * PATIENCE)
    broken.load_result = {"error": "RuntimeError: half", "broken": True}
    with pytest.raises(RefreshError, match="half"):
        engine.update_weights(weights().items(), policy_version=5)
    asked = broken.asked.total()
    broken.before = silent(over)
    started = time.monotonic()
    engine.update_weights(weights().items(), policy_version=6)
    assert time.monotonic() - started < PATIENCE
    assert (engine.serving, broken.asked.total()) == ([good.url], asked + 1)


# ---------------------------------------------------------------- several threads


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread, and what ``call`` returned or raised there."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(call())
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, came


CALLS: dict[str, Callable[[VLLMServerEngine], Any]] = {
    "generate": drawn,
    "generate_some": lambda engine: engine.generate_some(PROMPTS, TWO, seed=1),
    "score": lambda engine: engine.score([[5, 6, 7]]),
    "update_weights": lambda engine: engine.update_weights(weights(1).items(), policy_version=5),
    "take_up": lambda engine: engine.take_up([]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("running", "route"), [("generate", "/v1/completions"), ("update_weights", "/pause")])
def test_a_second_call_is_refused_while_one_runs(
    start: Start, over: threading.Event, name: str, running: str, route: str
) -> None:
    server = start()
    engine = refreshed(server, partial=HALF)
    begun = threading.Event()
    server.before = silent(over, route, then=begun.set)
    thread, came = in_thread(lambda: CALLS[running](engine))
    assert begun.wait(PATIENCE)
    with pytest.raises(RuntimeError, match=f"{name} was called while {running} runs in another thread; wait for"):
        CALLS[name](engine)
    over.set()
    thread.join(PATIENCE)
    assert not any(isinstance(each, Exception) for each in came)
    assert len(came) == 1
    assert drawn(engine) == wanted()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("running", "route"), [("generate", "/v1/completions"), ("update_weights", "/pause")])
def test_closing_ends_a_call_of_another_thread(start: Start, over: threading.Event, running: str, route: str) -> None:
    servers = start(), start()
    engine = refreshed(*servers, backoff_s=2 * PATIENCE)
    begun = threading.Event()
    for each in servers:
        each.before = silent(over, route, then=begun.set)
    thread, came = in_thread(lambda: CALLS[running](engine))
    assert begun.wait(PATIENCE)
    engine.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert "the engine was closed by another thread; build a new one" in str(came[0])
    with pytest.raises(RuntimeError, match="closed; build a new one"):
        drawn(engine)


# ---------------------------------------------------------------- what is left paused


def test_closing_leaves_no_server_paused(start: Start) -> None:
    server, other = start(), start()
    engine = refreshed(server, other)
    server.before = lambda route: (400, {"error": "no"}) if route == "/reset_prefix_cache" else None
    with pytest.raises(RefreshError, match="/reset_prefix_cache was refused"):
        engine.update_weights(weights(1).items(), policy_version=5)
    assert (server.paused, other.paused, loading(server)) == (True, False, True)
    engine.close()
    assert not server.paused


@pytest.mark.usefixtures("_soon")
def test_closing_does_not_wait_for_a_paused_server_that_is_silent(start: Start, over: threading.Event) -> None:
    server = start()
    engine = refreshed(server, backoff_s=2 * PATIENCE)
    server.before = lambda route: (400, {}) if route == "/reset_prefix_cache" else None
    with pytest.raises(RefreshError, match="/reset_prefix_cache was refused"):
        engine.update_weights(weights(1).items(), policy_version=5)
    server.before = silent(over)
    asked, started = server.asked["/resume"], time.monotonic()
    engine.close()
    assert time.monotonic() - started < PATIENCE
    assert server.asked["/resume"] == asked + 1


# ---------------------------------------------------------------- what an answer's status says


@pytest.mark.parametrize("status", [101, 304, 301, 302, 307, 308])
def test_a_status_that_is_no_success_is_none(start: Start, status: int) -> None:
    server = start()
    server.before = lambda route: (status, b"")
    with pytest.raises(PeerRefusal, match=f"/weight_info was refused with status {status}: ; .* the url of the server"):
        Peer(server.url, Patience(PATIENCE, 3, 0)).get("/weight_info")
    assert server.asked["/weight_info"] == 1


@pytest.mark.parametrize("status", [408, 429])
def test_a_server_that_is_busy_is_asked_again(start: Start, status: int) -> None:
    server = start()
    busy = [status] * 2
    server.before = lambda route: (busy.pop(), {}) if busy else None
    assert Peer(server.url, Patience(PATIENCE, 3, 0)).get("/weight_info") == {"weight_version": "default"}
    server.before = lambda route: (status, {"error": "later"})
    with pytest.raises(PeerLost, match=f"/weight_info failed in 3 attempts: status {status}: .*later"):
        Peer(server.url, Patience(PATIENCE, 3, 0)).get("/weight_info")
