"""JSON over HTTP to one server, which is asked again, with growing pauses, while its fault may pass."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock
from types import NoneType
from typing import Any
from urllib.parse import urlsplit

_WITHOUT_KEY = (401, 403)


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

    @property
    def wants_key(self) -> bool:
        """Whether it is the API key that the server did not take."""
        return self.status in _WITHOUT_KEY


class AnswerError(RuntimeError):
    """A server answered something of another form than it should; the text has no URL."""


class _Passing(Exception):
    """What may be over when the server is asked again."""


def fields(answer: Any, route: str, kinds: Mapping[str, tuple[type, ...]]) -> Mapping[str, Any]:
    """``answer`` as a JSON object that has certain fields.

    Args:
        answer: what came.
        route: where it came from, for the error.
        kinds: types that each field may have; one that may be ``None`` may be absent.

    Raises:
        AnswerError: for anything else.
    """
    fault = "" if type(answer) is dict else "which is no object"
    for name, types in kinds.items():
        if not fault and type(answer.get(name)) not in types:  # not isinstance: True is no number in JSON
            wanted = " or ".join("null" if each is NoneType else each.__name__ for each in types)
            fault = f"in which {name!r} is no {wanted}"
    if fault:
        raise AnswerError(
            f"{route} answered {str(answer)[:200]}, {fault}; take a tested vLLM, with the learner's lqrl where its "
            "workers run"
        )
    return answer


def checked_url(url: str) -> str:
    """``url`` of a server, without a slash at its end.

    Raises:
        ValueError: for one that is none, or has something in it that would not be used.
    """
    parts = urlsplit(url)
    try:
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        whole = False
    if not whole or any(each in "?#@" or each.isspace() for each in url):
        raise ValueError(f"{url!r} is no URL of a server; write it as http://host:port")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{url!r}: leave /v1 out; lqrl asks routes of the server that are not below it, too")
    return url.rstrip("/")


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
        ValueError: see `checked_url`.
    """

    def __init__(self, url: str, patience: Patience, gone: Callable[[], bool] = lambda: False) -> None:
        self.url, self.patience = checked_url(url), patience
        self._gone = gone
        self._parts = urlsplit(self.url)
        self._host = self._parts.hostname or ""
        self._port = self._parts.port or (443 if self._parts.scheme == "https" else 80)
        self._open: set[socket.socket] = set()
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
        """Cut all connections, those that are being made included; their requests then fail."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

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
                return self._once(method, path, body, give_up)
            except _Passing as error:
                fault = str(error)
        raise PeerLost(f"{path} failed in {sent} attempts: {fault}")

    def _once(self, method: str, path: str, body: Any, give_up: Event) -> Any:
        headers = {"Accept": "application/json", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if key := os.environ.get("VLLM_API_KEY", "").strip():  # of the end of its line
            headers["Authorization"] = f"Bearer {key}"
        payload = None if body is None else json.dumps(body, allow_nan=False)
        try:
            with self._connected(give_up) as connection:
                connection.request(method, self._parts.path + path, payload, headers)
                response = connection.getresponse()
                status, answer = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        return self._judged(path, status, answer)

    @contextmanager
    def _connected(self, give_up: Event) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self._host, self._port)
        made: list[socket.socket] = []
        try:
            connection.sock = self._dialled(made, give_up)
            yield connection
        finally:
            connection.close()
            with self._lock:
                self._open.difference_update(made)
            for each in made:
                each.close()

    def _dialled(self, made: list[socket.socket], give_up: Event) -> socket.socket:
        """An open socket; those that are made on the way are put into ``made``, and known to `interrupt` at once."""

        def known(each: socket.socket) -> socket.socket:
            made.append(each)
            with self._lock:
                self._open.add(each)
            return each

        failure = OSError("its name has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            dialled = known(socket.socket(family, kind, protocol))
            dialled.settimeout(self.patience.timeout_s)
            if give_up.is_set():  # an interrupt may have come before it was known
                raise ConnectionAbortedError("no answer is wanted any more")
            try:
                dialled.connect(address)
            except OSError as error:
                failure = error
                continue
            dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._parts.scheme == "http":
                return dialled
            context = ssl.create_default_context()
            wrapped = context.wrap_socket(dialled, server_hostname=self._host, do_handshake_on_connect=False)
            known(wrapped).settimeout(self.patience.timeout_s)
            wrapped.do_handshake()
            return wrapped
        raise failure

    def _judged(self, path: str, status: int, answer: bytes) -> Any:
        if status >= 400:
            said = answer.decode("utf-8", "replace")[:500]
            if status >= 500:
                raise _Passing(f"status {status}: {said}")
            key = "; set VLLM_API_KEY to the key that it was started with" if status in _WITHOUT_KEY else ""
            raise PeerRefusal(f"{path} was refused with status {status}: {said}{key}", status)
        try:
            return json.loads(answer) if answer else None
        except ValueError as error:
            raise _Passing(f"no JSON: {answer[:100]!r}") from error
