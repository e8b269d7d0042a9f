"""Servers of this machine as processes: what keeps one from starting is said, and nobody else's is taken for it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lqrl.engines.base import EngineUnavailableError
from lqrl.engines.vllm.fleet import Fleet
from lqrl.engines.vllm.launch import HOST, ServerProcess
from lqrl.engines.vllm.peer import Patience
from lqrl.engines.vllm.replica import Replica
from lqrl.engines.vllm.server import _retire


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "servers").mkdir()
    return tmp_path / "servers" / "0.log"


@pytest.fixture
def server(log: Path) -> Iterator[ServerProcess]:
    made = ServerProcess({"model": "/nowhere"}, log)
    yield made
    made.stop()


def test_a_server_starts_on_another_port_where_its_own_is_taken(server: ServerProcess) -> None:
    replica, before = Replica(server.url, Patience(5), 1, server), server.port
    with socket.socket() as other:
        other.bind((HOST, before))
        other.listen()
        assert replica.start()
    assert server.port != before
    assert replica.url == replica.peer.url == server.url
    after = server.port
    replica.start()
    assert server.port == after


def test_a_log_that_cannot_be_written_is_an_error_of_the_start(tmp_path: Path) -> None:
    server = ServerProcess({"model": "/nowhere"}, tmp_path / "missing" / "0.log")
    server.start()
    assert server.ended
    with pytest.raises(EngineUnavailableError, match=r"cannot be started: .*No such file or directory"):
        server.wait(time.monotonic() + 60)


def test_a_log_that_cannot_be_kept_hides_no_error(server: ServerProcess, log: Path) -> None:
    log.parent.with_name("servers-0.log").mkdir()  # where its copy would go
    server.start()
    with pytest.raises(EngineUnavailableError, match=r"(?s)its log could not be kept .*Is a directory.*Error"):
        server.wait(time.monotonic() + 60)


def test_a_server_is_given_the_key_as_it_is_sent(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", " secret\n")
    server.start()
    environment = Path(f"/proc/{server.group}/environ")
    while not (said := environment.read_bytes()):  # it is filled after the process has begun
        assert not server.ended
    assert b"VLLM_API_KEY=secret" in said.split(b"\0")


def test_a_forked_child_that_ends_retires_nobodys_servers(server: ServerProcess, log: Path) -> None:
    fleet = Fleet(60)
    fleet.add([Replica(server.url, Patience(5), 1, server)], lambda facts: None)
    log.touch()
    _retire(fleet, log.parent, os.getpid() + 1)
    assert log.exists()
    _retire(fleet, log.parent, os.getpid())
    assert not log.parent.exists()
