"""Starting and stopping vLLM servers on this machine."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from lqrl.engines.base import EngineUnavailableError
from lqrl.engines.vllm.arguments import with_hint
from lqrl.engines.vllm.peer import Patience, Peer, PeerLost, PeerRefusal

_LOGGER = logging.getLogger(__name__)

HOST = "127.0.0.1"
_EXTENSION = "lqrl.engines.vllm.worker.ServedWorker"
_ERROR = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?(?:[\w.]+: error|[\w.]*(?:Error|Exception|Exit))(?::|$)")
"""A line of a log that says what was raised: of Python, with vLLM's words in front of it or not, or of its flags."""
_TRACE = re.compile(r"Traceback|^\s*(\([^)]*\))?\s*$|\bFile \"|\b(INFO|WARNING|ERROR) \d\d-\d\d")
"""A line that no longer belongs to what was raised."""
_ERROR_LINES = 5
_LOG_LINES = 15
_STOP_S = 10.0


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of ``vllm.LLM`` as flags of its server; ``None`` is left out."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            flags += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def first_error(log: str) -> list[str]:
    """Lines of a log from the first error on, which others follow from; its last ones when there is none."""
    lines = log.splitlines()
    for i, line in enumerate(lines):
        if _ERROR.match(line):
            rest = takewhile(lambda each: not _TRACE.search(each), lines[i + 1 : i + _ERROR_LINES])
            return [line, *rest]
    return lines[-_LOG_LINES:]


class ServerProcess:
    """A vLLM server in a process group of its own, which ends with this process.

    Args:
        arguments: of ``vllm.LLM``.
        log: file for what it prints; a copy of it beside its directory stays when the server does not start.
        cards: its ``CUDA_VISIBLE_DEVICES``; ``None`` leaves those of this process.
    """

    def __init__(self, arguments: Mapping[str, Any], log: Path, cards: str | None = None) -> None:
        self._arguments, self._log, self._cards = arguments, log, cards
        self._log_start = 0  # what is before comes from an earlier start
        self._no_start = ""  # why there is no process
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """Where it answers once it is up."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it, after stopping what is left of it; on another port where its own has been taken meanwhile.

        What keeps it from starting is what `wait` raises.
        """
        self.stop()
        if not _is_free(self.port):
            self.port = free_port()
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
        if key := environment.get("VLLM_API_KEY"):
            environment["VLLM_API_KEY"] = key.strip()  # as it is sent
        if self._cards is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._cards
        # A training process that is itself part of a torch.distributed run must not make the server part of it.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        flags = command_line({**self._arguments, "host": HOST, "port": self.port, "worker_extension_cls": _EXTENSION})
        self._no_start = ""
        try:
            with self._log.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "lqrl.engines.vllm.keeper", *flags],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._no_start = str(error)
            return
        _LOGGER.info("starting a vLLM server at %s; it logs to %s", self.url, self._log)

    @property
    def ended(self) -> bool:
        """Whether it is not running."""
        return self._process is None or self._process.poll() is not None

    @property
    def group(self) -> int:
        """Its process group.

        Raises:
            RuntimeError: when it was not started.
        """
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    def wait(self, deadline: float) -> None:
        """Wait until it answers.

        Args:
            deadline: of `time.monotonic`.

        Raises:
            EngineUnavailableError: when it ends before, or is not ready in time; with the first error of its log, which
                is kept.
        """
        if self._no_start:
            raise EngineUnavailableError(f"the vLLM server on port {self.port} cannot be started: {self._no_start}")
        while not self._answers():
            if self.ended:
                raise self._failure(f"the vLLM server on port {self.port} ended while it started")
            if time.monotonic() > deadline:
                raise self._failure(f"the vLLM server on port {self.port} is not up in time; raise start_timeout_s")
            time.sleep(0.2)

    def _failure(self, what: str) -> EngineUnavailableError:
        said = self._log.read_bytes()[self._log_start :].decode("utf-8", "replace")
        kept = self._log.parent.with_name(f"{self._log.parent.name}-{self._log.name}")
        try:
            shutil.copyfile(self._log, kept)  # the directory goes with the engine
            where = f"its log is {kept}"
        except OSError as error:
            where = f"its log could not be kept ({error})"
        return EngineUnavailableError(f"{what}; {where}:\n" + with_hint("\n".join(first_error(said))))

    def _answers(self) -> bool:
        try:
            Peer(self.url, Patience(timeout_s=5)).get("/health", attempts=1)
        except (PeerLost, PeerRefusal):
            return False
        return True

    def end(self) -> None:
        """Ask it to end, and its workers."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """End it and its workers; does nothing when that has been done."""
        self.end()
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        # Workers may outlive the server that was killed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended take no port
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
