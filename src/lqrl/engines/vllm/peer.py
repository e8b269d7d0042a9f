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
from threading import Event, Lock, local
from types import NoneType
from typing import Any
from urllib.parse import urlsplit

BRIEF_S = 10.0
"""Seconds that `Peer.briefly` waits at most."""

_WITHOUT_KEY = (401, 403)
_BUSY = (408, 429)  # a proxy's timeout, a limit of a rate


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


def _api_key() -> str:
    return os.environ.get("VLLM_API_KEY", "").strip()  # of the end of its line


class _OfThread(local):
    patience: Patience | None = None  # instead of the server's


class Peer:
    """One server. Threads may ask it at the same time; each request has a connection of its own.

    Args:
        url: ``http://host:port`` or ``https://host:port``, a path in front of the routes included.
        patience: how long it is waited for.
        gone: whether it is known to be no more; asked between attempts.

    Raises:
        ValueError: see `checked_url`; or for an API key that is none.
    """

    def __init__(self, url: str, patience: Patience, gone: Callable[[], bool] = lambda: False) -> None:
        if any(map(str.isspace, _api_key())):
            raise ValueError("VLLM_API_KEY has white space in it, which no key has; set it to the key alone")
        self.url, self.patience = checked_url(url), patience
        self._gone = gone
        self._parts = urlsplit(self.url)
        self._host = self._parts.hostname or ""
        self._port = self._parts.port or (443 if self._parts.scheme == "https" else 80)
        self._open: set[socket.socket] = set()
        self._asking: set[Event] = set()  # one for each request, set when it is interrupted
        self._own = _OfThread()
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
            give_up: when it is set nothing is sent any more; `interrupt` ends what is under way.

        Raises:
            PeerLost: on a connection that fails or is cut, no answer in time, one that is no JSON, or a status of 408,
                429 or from 500 on, in every attempt.
            PeerRefusal: on any other status that is not of success, a redirection included.
        """
        return self._ask("POST", path, body, attempts, give_up)

    @contextmanager
    def briefly(self) -> Iterator[None]:
        """In the block this thread's requests are sent once, and waited for `BRIEF_S` at most."""
        before = self._own.patience
        self._own.patience = Patience(min(self.patience.timeout_s, BRIEF_S), 1, 0)
        try:
            yield
        finally:
            self._own.patience = before

    def interrupt(self) -> None:
        """Cut all connections, those that are being made included; their requests fail, and are not sent again."""
        with self._lock:
            for each in self._asking:
                each.set()
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, body: Any, attempts: int | None, give_up: Event | None) -> Any:
        patience, stop = self._own.patience or self.patience, Event()

        def over() -> bool:
            return stop.is_set() or (give_up is not None and give_up.is_set())

        fault, sent = "it was not asked", 0
        with self._lock:
            self._asking.add(stop)
        try:
            for attempt in range(attempts or patience.attempts):
                if attempt and (self._gone() or stop.wait(patience.backoff_s * 2 ** (attempt - 1))):
                    break
                if over():
                    break
                try:
                    sent += 1
                    return self._once(method, path, body, over, patience.timeout_s)
                except _Passing as error:
                    fault = str(error)
        finally:
            with self._lock:
                self._asking.remove(stop)
        raise PeerLost(f"{path} failed in {sent} attempts: {fault}")

    def _once(self, method: str, path: str, body: Any, over: Callable[[], bool], timeout_s: float) -> Any:
        headers = {"Accept": "application/json", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if key := _api_key():
            headers["Authorization"] = f"Bearer {key}"
        payload = None if body is None else json.dumps(body, allow_nan=False)
        try:
            with self._connected(over, timeout_s) as connection:
                connection.request(method, self._parts.path + path, payload, headers)
                response = connection.getresponse()
                status, answer = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        return self._judged(path, status, answer)

    @contextmanager
    def _connected(self, over: Callable[[], bool], timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self._host, self._port)
        made: list[socket.socket] = []
        try:
            connection.sock = self._dialled(made, over, timeout_s)
            yield connection
        finally:
            connection.close()
            with self._lock:
                self._open.difference_update(made)
            for each in made:
                each.close()

    def _dialled(self, made: list[socket.socket], over: Callable[[], bool], timeout_s: float) -> socket.socket:
        """An open socket; those that are made on the way are put into ``made``, and known to `interrupt` at once."""

        def known(each: socket.socket) -> socket.socket:
            made.append(each)
            with self._lock:
                self._open.add(each)
            return each

        failure = OSError("its name has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            dialled = known(socket.socket(family, kind, protocol))
            dialled.settimeout(timeout_s)
            if over():  # an interrupt may have come before it was known
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
            known(wrapped).settimeout(timeout_s)
            wrapped.do_handshake()
            return wrapped
        raise failure

    def _judged(self, path: str, status: int, answer: bytes) -> Any:
        if not 200 <= status < 300:
            said = answer.decode("utf-8", "replace")[:500]
            if status >= 500 or status in _BUSY:
                raise _Passing(f"status {status}: {said}")
            remedy = ""
            if status in _WITHOUT_KEY:
                remedy = "; set VLLM_API_KEY to the key that it was started with"
            elif status < 400:
                remedy = "; no vLLM answers so: give the url of the server itself, to which this one may lead"
            raise PeerRefusal(f"{path} was refused with status {status}: {said}{remedy}", status)
        try:
            return json.loads(answer) if answer else None
        except ValueError as error:
            raise _Passing(f"no JSON: {answer[:100]!r}") from error
