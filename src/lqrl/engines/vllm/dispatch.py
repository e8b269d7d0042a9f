"""Sharing requests among servers: each takes the next one when it is free, and what a lost server had goes back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Event, Thread
from typing import Any, Protocol

from lqrl.engines.vllm.peer import PeerLost

_LOOK_S = 0.1  # between two looks at what has been answered


class Server(Protocol):
    """What `share` needs of a server."""

    @property
    def width(self) -> int:
        """Requests that it has at a time."""
        ...

    def interrupt(self) -> None:
        """Make all requests that are under way fail."""
        ...

    def cut(self) -> None:
        """Make all requests that are under way end with what they have; raises when it never can."""
        ...


@dataclass
class Loss:
    """A server that was lost while it had work.

    Attributes:
        reason: what its first failure said.
        requests: how many requests it gave back.
    """

    reason: str
    requests: int = 0


@dataclass
class Shares:
    """What came of a list of requests.

    Attributes:
        answers: by request; not complete when all servers were lost, or it was cut.
        sources: which server answered, by request.
        lost: by server.
        cut: whether it was told to end before all was answered.
    """

    answers: dict[int, Any] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    lost: dict[int, Loss] = field(default_factory=dict)
    cut: bool = False


class _Work:
    """The requests that nobody has, and the answers; every one is in one place at any time."""

    def __init__(self, requests: Sequence[int]) -> None:
        self.shares = Shares()
        self.over = Event()  # all answered, or nothing more is to be asked
        self.failure: BaseException | None = None
        self._waiting, self._all, self._taken = deque(requests), len(requests), 0
        self._changed = Condition()

    def take(self, server: int) -> int | None:
        """A request for ``server``; waits while the others have all that is left, since they may give it back."""
        with self._changed:
            while not self.over.is_set() and server not in self.shares.lost:
                if self._waiting and not self.shares.cut:
                    self._taken += 1
                    return self._waiting.popleft()
                self._changed.wait()
            return None

    def answer(self, server: int, request: int, answer: Any) -> None:
        with self._changed:
            if self.over.is_set():
                return
            self.shares.answers[request], self.shares.sources[request] = answer, server
            self._returned()

    def give_back(self, server: int, request: int, reason: str) -> None:
        with self._changed:
            if not self.over.is_set():
                self._waiting.appendleft(request)
                self.shares.lost.setdefault(server, Loss(reason)).requests += 1
                self._returned()
                self._changed.notify_all()

    def _returned(self) -> None:
        self._taken -= 1
        if len(self.shares.answers) == self._all or (self.shares.cut and not self._taken):
            self.stop()

    def answered(self) -> dict[int, Any]:
        """The answers so far."""
        with self._changed:
            return dict(self.shares.answers)

    def cut(self) -> None:
        """Give out no more requests; those that somebody has are still waited for."""
        with self._changed:
            self.shares.cut = True
            if not self._taken:
                self.stop()

    def stop(self, failure: BaseException | None = None) -> None:
        with self._changed:
            self.failure = self.failure or failure
            self.over.set()
            self._changed.notify_all()


def share(
    requests: Sequence[int],
    servers: Sequence[Server],
    ask: Callable[[int, int, Event], Any],
    due: Callable[[Mapping[int, Any]], bool] | None = None,
) -> Shares:
    """Have every request answered once, by whichever server is free.

    Args:
        requests: their numbers, each once.
        servers: at least one.
        ask: ``ask(server, request, over)`` gives the answer, or raises `PeerLost` when that server is lost; another
            error ends everything and is raised here. ``over`` is set when no answer is wanted any more.
        due: whether the answers so far are enough. What is under way is cut then, and what waits is not asked.

    Returns:
        The answers. They are complete unless all servers were lost, or they were enough before.
    """
    work = _Work(requests)
    if not requests:
        return work.shares

    def serve(server: int) -> None:
        while (request := work.take(server)) is not None:
            try:
                work.answer(server, request, ask(server, request, work.over))
            except PeerLost as error:
                work.give_back(server, request, str(error))
            except BaseException as error:
                work.stop(error)

    def look() -> None:
        if due is not None and not work.over.is_set() and (work.shares.cut or due(work.answered())):
            work.cut()
            _cut_all(servers, work)

    # Each takes a request as it starts: by turns, or the first server's would take them all.
    widths = [min(server.width, len(requests)) for server in servers]
    threads = [i for turn in range(max(widths)) for i, width in enumerate(widths) if turn < width]
    with ThreadPoolExecutor(len(threads), "lqrl-replica") as pool:
        try:
            for future in _started(pool, serve, threads, work, look):
                while not work.over.is_set() and not future.done():
                    work.over.wait(_LOOK_S)
                    look()
        finally:
            # also on an interrupt, or the threads would be waited for until their servers answer
            work.stop()
            for server in servers:
                server.interrupt()
    if work.failure is not None:
        raise work.failure
    return work.shares


def _started(
    pool: ThreadPoolExecutor,
    serve: Callable[[int], None],
    threads: Sequence[int],
    work: _Work,
    look: Callable[[], None],
) -> list[Future[None]]:
    """A thread for each of ``threads``, as long as there is something to ask.

    Hundreds take seconds to start beside those that are at work already, so that there is a look in between.
    """
    futures: list[Future[None]] = []
    looks = 0.0
    for server in threads:
        if work.over.is_set() or work.shares.cut:
            break
        futures.append(pool.submit(serve, server))
        if time.monotonic() >= looks:
            look()
            looks = time.monotonic() + _LOOK_S
    return futures


def _cut_all(servers: Sequence[Server], work: _Work) -> None:
    """Once more every time: a request may reach its server when that has been told."""
    left = [server for i, server in enumerate(servers) if i not in work.shares.lost]
    with asking(left, "lqrl-cut") as pool:
        for each in [pool.submit(server.cut) for server in left]:
            each.result()


@contextmanager
def asking(servers: Collection[Server], name: str) -> Iterator[ThreadPoolExecutor]:
    """A thread for each of ``servers``; an error in the block, an interrupt first of all, does not wait for answers.

    Args:
        servers: that the threads ask.
        name: of the threads.
    """
    over = Event()

    def cut() -> None:
        while True:
            for server in servers:  # once more every time: a thread may have been between two requests
                server.interrupt()
            if over.wait(_LOOK_S):
                break

    with ThreadPoolExecutor(max(1, len(servers)), name) as pool:
        try:
            yield pool
        except BaseException:
            # Not by their futures: an interrupt in `submit` loses one.
            Thread(target=cut, name="lqrl-interrupt", daemon=True).start()
            try:
                pool.shutdown(cancel_futures=True)
            finally:
                over.set()
            raise
