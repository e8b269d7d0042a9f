"""Persistent worker processes with a hard limit on the time of one request."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# run_path leaves sys.path alone; running the file itself would put its folder, and so its siblings, before the
# standard library
_BOOT = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"

Failure = Literal["timeout", "crash"]


class WorkerStartError(RuntimeError):
    """A worker process did not come up."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    errors: Any
    buffer: bytes = b""
    job: int | None = None
    deadline: float = field(default=math.inf)

    @property
    def output(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """The next reply if it has arrived whole; raises ``EOFError`` when the process has gone."""
        data = os.read(self.output, 65536)
        if not data:
            raise EOFError
        self.buffer += data
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return None
        self.buffer = rest
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.wait()
        self.errors.close()


class WorkerPool:
    """Processes that answer JSON requests, one line each way; a late one is killed and replaced.

    Nothing starts before the first request. Processes end with the pool, with the interpreter, and on their own when
    the interpreter is killed (their standard input closes).

    Args:
        script: a file whose first line of output is ``{"ready": true}``.
        arguments: command-line arguments of the script.
        workers: most processes.
        timeout: seconds for one request; then the process is killed.
        start_timeout: seconds for a process to report that it is ready.
    """

    def __init__(
        self, script: Path, arguments: Sequence[str], *, workers: int, timeout: float, start_timeout: float
    ) -> None:
        self.script = script
        self.arguments = tuple(arguments)
        self.size = workers
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.timeouts = 0
        self.crashes = 0
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that are up."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all processes; the next request starts new ones."""
        _kill_all(self._workers)

    def map(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any] | Failure]:
        """Replies in the order of ``requests``; ``"timeout"`` or ``"crash"`` where there is none.

        Raises:
            WorkerStartError: when a process does not come up; the message ends with what it wrote to standard error.
        """
        results: list[dict[str, Any] | Failure] = ["crash"] * len(requests)
        waiting = deque(range(len(requests)))
        try:
            while waiting or any(worker.job is not None for worker in self._workers):
                self._assign(requests, waiting)
                self._collect(results)
        except BaseException:
            self.close()  # a reply that is still under way must not answer the next call's request
            raise
        return results

    def _assign(self, requests: Sequence[dict[str, Any]], waiting: deque[int]) -> None:
        for worker in [worker for worker in self._workers if worker.job is None]:
            if worker.process.poll() is not None:  # it died while idle: no fault of the next request
                self._drop(worker)
        idle = [worker for worker in self._workers if worker.job is None]
        while waiting and (idle or len(self._workers) < self.size):
            fresh = not idle
            worker = self._start() if fresh else idle.pop()
            job = waiting.popleft()
            try:
                worker.send(requests[job])
            except OSError as error:
                self._drop(worker)
                if fresh:
                    raise WorkerStartError(
                        f"worker process {self.script.name} ended before its first request"
                    ) from error
                waiting.appendleft(job)
                continue
            worker.job, worker.deadline = job, time.monotonic() + self.timeout

    def _collect(self, results: list[dict[str, Any] | Failure]) -> None:
        busy = [worker for worker in self._workers if worker.job is not None]
        if not busy:
            return
        wait = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        for worker in _readable(busy, wait):
            job = worker.job
            assert job is not None
            try:
                reply = worker.receive()
            except EOFError:
                results[job] = "crash"
                self.crashes += 1
                self._drop(worker)
                continue
            if reply is not None:
                results[job] = reply
                worker.job, worker.deadline = None, math.inf
        now = time.monotonic()
        for worker in busy:
            if worker.job is not None and now >= worker.deadline and worker in self._workers:
                results[worker.job] = "timeout"
                self.timeouts += 1
                self._drop(worker)

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.kill()

    def _start(self) -> _Worker:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill()
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(self.script), *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for the trainer, which ends the workers itself
        )
        worker = _Worker(process, errors)
        self._workers.append(worker)
        deadline = time.monotonic() + self.start_timeout
        try:
            while (left := deadline - time.monotonic()) > 0:
                if _readable([worker], left) and worker.receive() is not None:
                    return worker
            reason = f"was not ready after {self.start_timeout} s"
        except EOFError:
            reason = "ended at once"
        errors.seek(0)
        tail = errors.read()[-2000:].decode(errors="replace").strip()
        self._drop(worker)
        raise WorkerStartError(f"worker process {self.script.name} {reason}: {tail or 'it wrote no error'}")


def _readable(workers: Sequence[_Worker], timeout: float) -> list[_Worker]:
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
        return [key.data for key, _ in selector.select(timeout)]


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
