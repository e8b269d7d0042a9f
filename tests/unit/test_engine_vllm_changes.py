"""Servers that are not what they were, or cannot do what a refresh needs: against peers in this process."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import test_engine_vllm_server
from test_engine_vllm_server import drawn, engine_on, refreshed, wanted, weights
from vllm_peers import PATIENCE, VLLMPeer

from lqrl.engines.base import EngineUnavailableError, RefreshError, StaleEngineError
from lqrl.engines.vllm.fleet import ReplicasLostError

Start = Callable[..., VLLMPeer]
start = test_engine_vllm_server.start


@pytest.mark.parametrize("how", ["started anew", "loaded by another"])
def test_a_replica_whose_weights_change_before_it_gets_its_version_is_lost(start: Start, how: str) -> None:
    changing, slow = start(), start()
    engine, loaded = engine_on(changing, slow), threading.Event()

    def other() -> VLLMPeer:
        if how == "loaded by another":
            engine_on(changing).update_weights(weights(1).items(), policy_version=9)
            return changing
        changing.close()
        return start(port=changing.port)

    def hold(route: str) -> None:
        if route == "/pause" and not loaded.is_set():
            loaded.set()
            while not changing.asked["/v1/completions"]:  # its probe: it has loaded
                time.sleep(0.01)
            time.sleep(0.1)
            other()

    slow.before = hold
    with pytest.warns(UserWarning, match=rf"{changing.url}: its weights have become version .*again with the other 1"):
        engine.update_weights(weights().items(), policy_version=4)
    assert engine.serving == [slow.url]
    assert drawn(engine) == wanted()


def test_a_replica_that_starts_anew_as_it_gets_its_version_has_none(start: Start) -> None:
    server = start()
    engine = engine_on(server)

    def restart(route: str) -> tuple[int, None] | None:
        if route == "/update_weight_version" and server.asked[route] == 2:  # its answer is lost, and it is asked again
            server.version, server.stamped = "default", ""
            return -1, None
        return None

    server.before = restart
    engine.update_weights(weights().items(), policy_version=4)
    assert server.version is not None
    assert server.version.startswith("4-")
    with (
        pytest.warns(UserWarning, match=rf"{server.url} is lost \(its weights are version ' or 4-"),
        pytest.raises(ReplicasLostError),
    ):
        drawn(engine)


def test_of_two_engines_that_refresh_one_server_at_once_the_one_that_loads_last_has_it(start: Start) -> None:
    server = start()
    first, second = engine_on(server), engine_on(server)
    loading, seals = threading.Event(), threading.Event()

    def before(route: str) -> None:
        if route == "/pause" and server.asked[route] == 1:  # the first has said that it loads
            loading.set()
            assert seals.wait(PATIENCE)  # the second has loaded
        if route == "/v1/completions" and server.asked["lqrl_load"] == 1:
            seals.set()
            while server.asked["lqrl_load"] == 1:  # the first loads, too
                time.sleep(0.01)

    server.before = before
    with ThreadPoolExecutor() as pool:
        refreshing = pool.submit(first.update_weights, weights(0).items(), policy_version=4)
        assert loading.wait(PATIENCE)
        with pytest.raises(RefreshError, match="its weights have become version"):
            second.update_weights(weights(1).items(), policy_version=4)
        with pytest.raises(RefreshError, match="its weights have become version"):
            refreshing.result(PATIENCE)
    server.before = lambda route: None
    for engine in (first, second):
        with pytest.raises(StaleEngineError):
            drawn(engine)


def test_a_server_with_other_settings_is_lost_at_the_next_refresh(start: Start) -> None:
    changed, good = start(), start()
    engine = refreshed(changed, good)
    plain, changed.facts = changed.facts, start(served={"dtype": "torch.bfloat16"}).facts
    held = changed.held
    with pytest.warns(UserWarning, match=rf"{changed.url} is lost \(.*torch.bfloat16.*1 of 2 replicas are left"):
        engine.update_weights(weights(1).items(), policy_version=5)
    assert engine.serving == [good.url]
    assert changed.held == held
    changed.facts = plain
    engine.update_weights(weights(1).items(), policy_version=6)
    assert engine.serving == [changed.url, good.url]
    assert drawn(engine) == wanted()


def test_a_server_that_has_died_since_the_last_refresh_is_not_said_to_be_another(start: Start) -> None:
    dying, good = start(), start()
    engine = refreshed(dying, good)
    dying.before = lambda route: dying.die() if route == "/collective_rpc" else None
    with pytest.warns(UserWarning, match=rf"{dying.url} is lost \(/health failed in 1 attempts"):
        engine.update_weights(weights(1).items(), policy_version=5)
    assert drawn(engine) == wanted()


def test_a_return_is_logged_as_a_loss_is(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server, other = start(), start()
    engine = refreshed(server, other)
    assert not caplog.messages
    server.version = "default"
    with pytest.warns(UserWarning, match="is lost"):
        drawn(engine)
    engine.update_weights(weights(1).items(), policy_version=5)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "WARNING",
        f"replica {server.url} is back; 2 of 2 replicas serve",
    )


def test_a_server_that_stays_lost_is_said_to_be_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    gone, other = start(), start()
    engine = refreshed(gone, other)
    gone.close()
    with pytest.warns(UserWarning, match=f"{gone.url} is lost"):
        engine.update_weights(weights(1).items(), policy_version=5)
    for version in (6, 7):
        engine.update_weights(weights(1).items(), policy_version=version)
    assert len([each for each in caplog.messages if f"{gone.url} is lost" in each]) == 1


def test_a_passing_fault_at_the_start_is_waited_for(start: Start) -> None:
    server, faults = start(), iter([(503, {"error": "busy"})] * 2)
    server.before = lambda route: next(faults, None) if route == "/health" else None
    assert engine_on(server).serving == [server.url]


def test_a_refresh_that_no_worker_answers_fails(start: Start) -> None:
    peer = start()
    engine = refreshed(peer)
    peer.before = lambda route: (200, {"results": []}) if route == "/collective_rpc" and peer.paused else None
    with pytest.raises(RefreshError, match="0 of its 1 workers loaded the weights"):
        engine.update_weights(weights(1).items(), policy_version=5)


def test_caches_of_a_connector_are_dropped_or_the_server_is_refused(start: Start) -> None:
    drops, plain = start(connected=True, keeps=""), start()
    refreshed(drops, plain)
    assert "/reset_prefix_cache?reset_external=true" in drops.paths
    assert not any("reset" in path for path in plain.paths)
    with pytest.raises(EngineUnavailableError, match="ExampleConnector cannot drop what it keeps"):
        engine_on(start(connected=True, keeps="ExampleConnector cannot drop what it keeps"))


def test_a_full_disk_fails_the_refresh(start: Start, tmp_path: Path) -> None:
    engine = refreshed(start(), transfer_directory=str(tmp_path))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(RefreshError, match=r"cannot be written to files .*set transfer_directory"):
            engine.update_weights(weights(1).items(), policy_version=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())


def test_two_servers_with_room_for_all_requests_share_them(start: Start) -> None:
    peers = start(), start()
    engine, asked = refreshed(*peers, max_num_seqs=64), (threading.Event(), threading.Event())

    def meet(place: int, route: str) -> None:
        if route == "/v1/completions":
            asked[place].set()
            assert asked[1 - place].wait(PATIENCE)

    for place, peer in enumerate(peers):
        peer.before = partial(meet, place)
    assert drawn(engine) == wanted()
