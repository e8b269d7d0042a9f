"""JSON over HTTP to one server, which is asked again, with growing pauses, while its fault may pass."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock
from typing import Any
from urllib.parse import urlsplit


class PeerLost(RuntimeError):
    """A server did not answer, or only with faults of its own, however often it was asked; the text has no URL."""


class PeerRefusal(RuntimeError):
    """A server will not take a request, so that asking again is of no use; the text has no URL.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Passing(Exception):
    """What may be over when the server is asked again."""


@dataclass(frozen=True)
class Patience:
    """How long a server is waited for.

    Attributes:
        timeout_s: seconds without a byte, until an attempt has failed.
        attempts: times that a request is sent.
        backoff_s: seconds before the second attempt; each further pause is twice as long.
    """

    timeout_s: float = 600.0
    attempts: int = 4
    backoff_s: float = 0.5


class Peer:
    """One server. Threads may ask it at the same time; each request has a connection of its own.

    Args:
        url: ``http://host:port`` or ``https://host:port``, a path in front of the routes included.
        patience: how long it is waited for.
        gone: whether it is known to be no more; asked between attempts.

    Raises:
        ValueError: for another URL.
    """

    def __init__(self, url: str, patience: Patience, gone: Callable[[], bool] = lambda: False) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server; write it as http://host:port")
        self.url, self.patience = url.rstrip("/"), patience
        self._gone = gone
        self._parts = parts
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = Lock()

    def get(self, path: str, *, attempts: int | None = None) -> Any:
        """The JSON that ``GET path`` answers; see `post`."""
        return self._ask("GET", path, None, attempts, None)

    def post(self, path: str, body: Any = None, *, attempts: int | None = None, give_up: Event | None = None) -> Any:
        """The JSON that ``POST path`` answers; ``None`` for an empty answer.

        Args:
            path: route, its query included.
            body: what is sent as JSON.
            attempts: instead of those of `Patience`.
            give_up: ends the pauses between attempts.

        Raises:
            PeerLost: on a connection that fails or is cut, no answer in time, one that is no JSON, or a status from 500
                on, in every attempt.
            PeerRefusal: on a status from 400 to 499.
        """
        return self._ask("POST", path, body, attempts, give_up)

    def interrupt(self) -> None:
        """Cut all connections, whose requests then fail."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    if connection.sock is not None:
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, body: Any, attempts: int | None, give_up: Event | None) -> Any:
        give_up, attempts = give_up or Event(), attempts or self.patience.attempts
        fault, sent = "it was not asked", 0
        for attempt in range(attempts):
            if attempt and (self._gone() or give_up.wait(self.patience.backoff_s * 2 ** (attempt - 1))):
                break
            if give_up.is_set():
                break
            try:
                sent += 1
                return self._once(method, path, body)
            except _Passing as error:
                fault = str(error)
        raise PeerLost(f"{path} failed in {sent} attempts: {fault}")

    def _once(self, method: str, path: str, body: Any) -> Any:
        headers = {"Accept": "application/json", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if key := os.environ.get("VLLM_API_KEY", "").strip():  # of the end of its line
            headers["Authorization"] = f"Bearer {key}"
        connection = self._connect()
        try:
            payload = None if body is None else json.dumps(body, allow_nan=False)
            connection.request(method, self._parts.path.rstrip("/") + path, payload, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        return self._judged(path, status, answer)

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self.patience.timeout_s)
        with self._lock:
            self._open.add(connection)
        return connection

    def _judged(self, path: str, status: int, answer: bytes) -> Any:
        if status >= 400:
            said = answer.decode("utf-8", "replace")[:500]
            if status >= 500:
                raise _Passing(f"status {status}: {said}")
            raise PeerRefusal(f"{path} was refused with status {status}: {said}", status)
        try:
            return json.loads(answer) if answer else None
        except ValueError as error:
            raise _Passing(f"no JSON: {answer[:100]!r}") from error
