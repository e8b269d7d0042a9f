"""The parts of `VLLMServerEngine` that need no vLLM: retries, sharing, files, flags, logs, options."""

from __future__ import annotations

import _thread
import itertools
import math
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_peers import PATIENCE, VLLMPeer

from lqrl.engines.base import EngineUnavailableError, RefreshError
from lqrl.engines.vllm import VLLMServerEngineFactory
from lqrl.engines.vllm.dispatch import share
from lqrl.engines.vllm.launch import ServerProcess, command_line, first_error
from lqrl.engines.vllm.peer import Patience, Peer, PeerLost, PeerRefusal
from lqrl.engines.vllm.transfer import read_weights, write_weights

FAST = Patience(timeout_s=PATIENCE, attempts=3, backoff_s=0.01)


@pytest.fixture
def server() -> Iterator[VLLMPeer]:
    peer = VLLMPeer()
    yield peer
    peer.close()


# ---------------------------------------------------------------- one server


def failing(times: int, answer: tuple[int, Any]) -> Callable[[str], tuple[int, Any] | None]:
    left = iter([answer] * times)
    return lambda route: next(left, None)


@pytest.mark.parametrize(
    "fault", [(503, {"error": "busy"}), (-1, None), (200, b"<html>")], ids=["status 503", "cut", "no JSON"]
)
def test_a_passing_fault_is_asked_again(server: VLLMPeer, fault: tuple[int, Any]) -> None:
    server.before = failing(2, fault)
    assert Peer(server.url, FAST).get("/weight_info") == {"weight_version": "default"}
    assert server.asked["/weight_info"] == 3
    server.before = failing(3, fault)
    with pytest.raises(PeerLost, match=r"/weight_info failed in 3 attempts"):
        Peer(server.url, FAST).get("/weight_info")
    assert server.asked["/weight_info"] == 6


def test_pauses_grow(server: VLLMPeer) -> None:
    moments: list[float] = []
    server.before = lambda route: moments.append(time.monotonic()) or (500, {})
    with pytest.raises(PeerLost, match="status 500"):
        Peer(server.url, Patience(5, attempts=4, backoff_s=0.1)).get("/weight_info")
    pauses = [b - a for a, b in itertools.pairwise(moments)]
    assert all(pause >= wait for pause, wait in zip(pauses, (0.1, 0.2, 0.4), strict=True))


def test_a_refused_request_is_not_asked_again(server: VLLMPeer) -> None:
    with pytest.raises(PeerRefusal, match=r"/nowhere was refused with status 404: .*Not Found") as caught:
        Peer(server.url, FAST).get("/nowhere")
    assert (caught.value.status, server.asked["/nowhere"]) == (404, 1)


def test_a_server_that_is_gone_or_silent_is_lost(server: VLLMPeer) -> None:
    released = threading.Event()
    server.before = lambda route: (released.wait(PATIENCE), None)[1] if route == "/health" else None
    with pytest.raises(PeerLost, match="timed out"):
        Peer(server.url, Patience(timeout_s=0.1, attempts=2, backoff_s=0)).get("/health")
    released.set()
    server.close()
    with pytest.raises(PeerLost, match=r"in 3 attempts: ConnectionRefusedError"):
        Peer(server.url, FAST).get("/weight_info")
    with pytest.raises(PeerLost, match="in 1 attempts"):  # a process that has ended is not waited for
        Peer(server.url, FAST, gone=lambda: True).get("/weight_info")


def test_an_interrupt_cuts_a_request_and_its_retries(server: VLLMPeer) -> None:
    over, released = threading.Event(), threading.Event()
    peer = Peer(server.url, Patience(timeout_s=2 * PATIENCE, attempts=5, backoff_s=2 * PATIENCE))

    def interrupt(route: str) -> None:
        over.set()
        peer.interrupt()
        released.wait(2 * PATIENCE)

    server.before = interrupt
    started = time.monotonic()
    with pytest.raises(PeerLost):
        peer.post("/pause", {}, give_up=over)
    assert time.monotonic() - started < PATIENCE
    released.set()


def test_an_interrupt_cuts_a_connection_that_is_being_made() -> None:
    over, outcome = threading.Event(), []
    with socket.socket() as listener, ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):  # more than it keeps: the next one is not answered
            other = waiting.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        peer = Peer(f"http://127.0.0.1:{listener.getsockname()[1]}", Patience(2 * PATIENCE, 1, 0))

        def ask() -> None:
            with pytest.raises(PeerLost) as caught:
                peer.post("/pause", {}, give_up=over)
            outcome.append(caught.value)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        deadline = time.monotonic() + PATIENCE
        while not peer._open and time.monotonic() < deadline:
            time.sleep(0.001)
        over.set()
        peer.interrupt()
        asking.join(PATIENCE)
        assert not asking.is_alive()
    assert len(outcome) == 1
    assert not peer._open


def test_https_is_spoken_where_it_is_asked_for(server: VLLMPeer) -> None:
    with pytest.raises(PeerLost, match="SSL"):
        Peer(server.url.replace("http:", "https:"), FAST).get("/health")
    assert not server.asked


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://host:8000/?a=b",
        "http://host:8000#a", "http://me:secret@host:8000", "http://a host:8000",
    ],
)  # fmt: skip
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL of a server; write it as http://host:port"):
        VLLMServerEngineFactory(urls=[url])


def test_a_url_names_the_server_and_not_its_api() -> None:
    with pytest.raises(ValueError, match=r"'http://host:8000/v1/': leave /v1 out"):
        VLLMServerEngineFactory(urls=["http://host:8000/v1/"])
    VLLMServerEngineFactory(urls=["http://host:8000/behind/a/proxy/"])


# ---------------------------------------------------------------- sharing


class Mortal:
    """A server that is lost after some answers."""

    def __init__(self, width: int, answers: int) -> None:
        self.width, self.left, self.lock = width, answers, threading.Lock()
        self.interrupts = 0

    def ask(self) -> None:
        with self.lock:
            self.left -= 1
            if self.left < 0:
                raise PeerLost("it died")

    def interrupt(self) -> None:
        self.interrupts += 1


@given(
    count=st.integers(0, 30),
    servers=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_every_request_is_answered_once_or_nobody_is_left(count: int, servers: list[tuple[int, int]]) -> None:
    mortals, asked = [Mortal(*each) for each in servers], Counter()
    lock = threading.Lock()

    def ask(server: int, request: int, over: threading.Event) -> tuple[int, int]:
        mortals[server].ask()
        with lock:
            asked[request] += 1
        return server, request

    shares = share(range(count), mortals, ask)
    assert set(asked.values()) <= {1}
    assert shares.answers == {request: (shares.sources[request], request) for request in asked}
    if sum(answers for _, answers in servers) >= count:
        assert len(shares.answers) == count
    else:
        assert len(shares.lost) == len(servers)
        assert len(shares.answers) == sum(answers for _, answers in servers)
    assert all(1 <= loss.requests <= mortals[server].width for server, loss in shares.lost.items())


def test_requests_that_a_lost_server_had_go_to_one_that_waits() -> None:
    """The second has answered everything else when the first is lost."""
    has_one, asked = threading.Event(), Counter()

    def ask(server: int, request: int, over: threading.Event) -> int:
        asked[server] += 1
        if server == 1:
            assert has_one.wait(PATIENCE)
            return 1
        has_one.set()
        while asked[1] < 3:
            time.sleep(0.001)
        time.sleep(0.1)  # until the other waits
        raise PeerLost("it hung")

    shares = share(range(4), [Mortal(1, 0), Mortal(1, 0)], ask)
    assert shares.answers == dict.fromkeys(range(4), 1)
    assert (shares.lost[0].requests, shares.lost[0].reason) == (1, "it hung")


def test_another_error_ends_everything() -> None:
    mortals = [Mortal(2, 9), Mortal(2, 9)]

    def ask(server: int, request: int, over: threading.Event) -> int:
        if request == 2:
            raise RuntimeError("a bad request")
        over.wait(2 * PATIENCE)
        return 0

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="a bad request"):
        share(range(8), mortals, ask)
    assert time.monotonic() - started < PATIENCE
    assert all(mortal.interrupts for mortal in mortals)


def test_a_limit_is_looked_at_while_the_threads_start() -> None:
    """They are as many as a server has by default, and cannot all be there when it is reached at once."""
    cut, begun = threading.Event(), []

    class Cuttable(Mortal):
        def cut(self) -> None:
            cut.set()

    def ask(server: int, request: int, over: threading.Event) -> int:
        begun.append(request)
        assert cut.wait(PATIENCE)
        return request

    width = VLLMServerEngineFactory().max_num_seqs
    shares = share(range(width), [Cuttable(width, 0)], ask, due=lambda answers: True)
    assert shares.cut
    assert sorted(shares.answers) == sorted(begun)
    assert len(begun) < width


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A process in the background ignores SIGINT, and so does what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_does_not_wait_for_answers() -> None:
    mortals = [Mortal(2, 9), Mortal(2, 9)]
    begun = threading.Barrier(4)

    def ask(server: int, request: int, over: threading.Event) -> bool:
        if begun.wait(PATIENCE) == 0:
            _thread.interrupt_main()
        return over.wait(2 * PATIENCE)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        share(range(8), mortals, ask)
    assert time.monotonic() - started < PATIENCE
    assert all(mortal.interrupts for mortal in mortals)


# ---------------------------------------------------------------- files, flags, logs


def test_weights_keep_names_order_and_bits_through_files(tmp_path: Path) -> None:
    tied = torch.randn(3, 4)
    stream = [
        ("b", tied),
        ("a", torch.tensor([1.0]).expand(5, 1)),
        ("c", torch.arange(6, dtype=torch.int8).view(2, 3).t()),
        ("head", tied),
        ("d", torch.randn(7).to(torch.float8_e4m3fn)),
    ]
    write_weights(stream, tmp_path, file_bytes=60)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    found = list(read_weights(tmp_path))
    assert [name for name, _ in found] == [name for name, _ in stream]
    for (_, before), (_, after) in zip(stream, found, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after.float(), before.float())


def test_half_a_set_of_files_is_no_set(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the learner has gone"):
        write_weights(broken_stream(), tmp_path, file_bytes=1)
    assert list(tmp_path.glob("*.safetensors"))
    with pytest.raises(RefreshError, match=r"no complete set of weights.*set transfer_directory"):
        list(read_weights(tmp_path))


def broken_stream() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(3)
    yield "b", torch.zeros(3)
    raise RuntimeError("the learner has gone")


def test_arguments_become_flags() -> None:
    arguments = {"max_num_seqs": 3, "enforce_eager": True, "async_scheduling": False, "seed": None, "a": {"b": 1}}
    assert command_line(arguments | {"sizes": [1, 2]}) == [
        "--max-num-seqs", "3", "--enforce-eager", "--no-async-scheduling", "--a", '{"b": 1}', "--sizes", "1", "2",
    ]  # fmt: skip


LOG = """\
INFO 11-29 08:33:27 [api_server.py:1] starting
(EngineCore pid=7) ERROR 11-29 08:33:30 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-29 08:33:30 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 08:33:30 [core.py:1510]     raise ValueError(
(EngineCore pid=7) ERROR 11-29 08:33:30 [core.py:1510] ValueError: No available memory for the cache blocks.
(EngineCore pid=7) ERROR 11-29 08:33:33 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_first_error_of_a_log_is_found() -> None:
    (reason,) = first_error(LOG)  # what follows is no part of it
    assert reason.endswith("ValueError: No available memory for the cache blocks.")
    assert first_error("usage: api_server\napi_server: error: unrecognized arguments: --a")[0].startswith(
        "api_server: e"
    )
    assert first_error("a\ntorch.OutOfMemoryError: CUDA out of memory\nb")[0].startswith("torch.Out")
    assert first_error("a\nAssertionError\nb") == ["AssertionError", "b"]
    assert first_error("\n".join(map(str, range(30)))) == [str(i) for i in range(15, 30)]
    assert first_error("") == []


def test_a_server_that_does_not_start_leaves_its_log(tmp_path: Path) -> None:
    log = tmp_path / "engine" / "0.log"
    log.parent.mkdir()
    log.write_text("ValueError: of an earlier start\n")
    server = ServerProcess({"model": "/nowhere"}, log)
    server.start()
    with pytest.raises(EngineUnavailableError, match="ended while it started; its log is") as caught:
        server.wait(math.inf)
    server.stop()
    kept = tmp_path / "engine-0.log"
    said, error, *_ = str(caught.value).splitlines()
    assert said.endswith(f"{kept}:")
    assert "Error: " in error
    assert "earlier" not in str(caught.value)
    assert kept.read_bytes() == log.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"attempts": 0}, "attempts must be at least 1"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"cards": ["0"], "replicas": 2}, "cards lists 1 servers, replicas is 2"),
        ({"urls": ["http://a:1"], "replicas": 2}, "replicas has no effect on servers that run already"),
        ({"urls": ["http://a:1"], "engine_args": {"block_size": 32}}, "engine_args has no effect"),
        ({"urls": ["http://a:1", "http://a:1"]}, "names a server twice"),
        ({"urls": ["http://a:1", "http://a:1/"]}, "names a server twice"),
        ({"timeout_s": math.inf}, r"timeout_s must be above 0 and at most 2,000,000, got inf"),
        ({"timeout_s": math.nan}, "timeout_s must be above 0 and at most 2,000,000, got nan"),
        ({"timeout_s": -1.0}, "timeout_s must be above 0"),
        ({"start_timeout_s": math.nan}, "start_timeout_s must be above 0"),
        ({"backoff_s": math.nan}, "backoff_s must be at least 0"),
        ({"engine_args": {"worker_extension_cls": "a.B"}}, "engine_args.worker_extension_cls is not free"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMServerEngineFactory(**options)
