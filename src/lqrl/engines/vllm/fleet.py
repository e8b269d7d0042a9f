"""All replicas of an engine: work is shared among those that serve, and weights go to all of them or to none."""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from threading import Event
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from lqrl.engines.base import EngineUnavailableError, RefreshError
from lqrl.engines.vllm.dispatch import asking, share
from lqrl.engines.vllm.parts import ReadersEnded
from lqrl.engines.vllm.peer import BRIEF_S, AnswerError, PeerLost, PeerRefusal
from lqrl.engines.vllm.replica import Loaded, Replica
from lqrl.engines.vllm.transfer import Route, under_way
from lqrl.engines.vllm.weight_folder import weight_folder

log = logging.getLogger(__name__)

T = TypeVar("T")

_NEW = "it was not asked yet"
_ATTEMPTS = re.compile(r"\d+ attempts")  # fewer of one that was lost before
_CLOSED = "the engine was closed by another thread; build a new one"


class ReplicasLostError(EngineUnavailableError):
    """No replica is left that could generate."""


class ReplicasGoneError(RefreshError):
    """Replicas were lost in a refresh, in which nothing else failed, and others are left."""


class Fleet:
    """The replicas, and which of them are lost.

    Args:
        start_timeout_s: seconds for a server that is started here.
    """

    def __init__(self, start_timeout_s: float) -> None:
        self.replicas: list[Replica] = []
        self.lost: dict[Replica, str] = {}
        self._check: Callable[[Mapping[str, Any]], None] = lambda facts: None
        self._start_timeout_s = start_timeout_s
        self._said: dict[Replica, str] = {}  # why which were lost at the last refresh
        self._closed = False

    def add(self, replicas: Sequence[Replica], check: Callable[[Mapping[str, Any]], None]) -> None:
        """Take in replicas, which are lost until `revive` finds them.

        Args:
            replicas: all of them.
            check: gets what a replica says of itself, and raises for one that serves something else.
        """
        self.replicas, self._check = list(replicas), check
        self.lost = dict.fromkeys(replicas, _NEW)

    @property
    def serving(self) -> list[Replica]:
        """Those that are not lost."""
        return [replica for replica in self.replicas if replica not in self.lost]

    def why(self) -> str:
        """What became of the lost ones."""
        return "; ".join(f"{replica.url}: {reason}" for replica, reason in self.lost.items())

    def _lose(self, replica: Replica, reason: str, redone: int) -> None:
        if self._closed:
            raise RuntimeError(_CLOSED)
        self.lost[replica] = reason
        left = len(self.serving)
        warnings.warn(
            f"replica {replica.url} is lost ({reason}); {redone} of its requests are to be redone, {left} of "
            f"{len(self.replicas)} replicas are left",
            stacklevel=2,
        )

    # ---------------------------------------------------------------- start and return

    def revive(self) -> None:
        """Look at all replicas before a refresh.

        One that does not answer, or serves something else by now, is lost. Lost ones that answer are taken back; those
        of this machine that do not are started anew. One that comes back has no weights. One that does not stays lost,
        with a new reason.
        """
        for replica, fault in self._faults().items():
            if replica not in self.lost:
                if fault:
                    self._lose(replica, fault, 0)
            else:
                self._found(replica, fault)
        starting = [replica for replica in self.lost if not self._closed and replica.start()]
        deadline = time.monotonic() + self._start_timeout_s
        for replica in starting:
            try:
                replica.wait(deadline)
            except RuntimeError as error:
                self.lost[replica] = str(error)
            else:
                self._found(replica, self._fault(replica, brief=False))
        said, self._said = self._said, {each: _ATTEMPTS.sub("", reason) for each, reason in self.lost.items()}
        for replica, reason in self._said.items():
            if said.get(replica) != reason:  # or a long run would say it at every refresh
                log.warning("replica %s is lost: %s", replica.url, self.lost[replica])

    def _faults(self) -> dict[Replica, str]:
        """What `_fault` says of each; they are asked at the same time."""
        gone = [replica for replica, reason in self.lost.items() if reason != _NEW]  # need not be waited for again
        with asking(self.replicas, "lqrl-look") as pool:
            futures = {each: pool.submit(self._fault, each, brief=each in gone) for each in self.replicas}
            return {replica: future.result() for replica, future in futures.items()}

    def _fault(self, replica: Replica, *, brief: bool) -> str:
        """Why it cannot be used as it is; nothing when it can."""
        if (replica in self.lost or replica.broken) and not replica.usable():
            return self.lost.get(replica, "a load that was interrupted left it broken")
        try:
            with replica.peer.briefly() if brief else nullcontext():
                self._check(replica.facts())
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    def _found(self, replica: Replica, fault: str) -> None:
        """Note what became of a lost replica; without a fault it is lost no longer."""
        if fault:
            self.lost[replica] = fault
        elif self.lost.pop(replica) == _NEW:
            log.info("replica %s answers", replica.url)
        else:
            log.warning(
                "replica %s is back; %d of %d replicas serve", replica.url, len(self.serving), len(self.replicas)
            )

    def interrupt(self) -> None:
        """Have a call of another thread fail, since the engine is being closed: what it asks now is cut off."""
        self._closed = True
        for replica in self.replicas:
            replica.interrupt()

    def close(self) -> None:
        """Stop the servers that were started here; others go on, also where a call that failed left them paused."""
        self._closed = True
        for replica in self.replicas:
            replica.end()  # all at once: each has its time to do so
        for replica in self.replicas:
            replica.stop()
            self.lost[replica] = "it is closed"
        deadline = time.monotonic() + BRIEF_S
        for replica in self.replicas:  # in turn: threads cannot be started when the process ends
            if time.monotonic() < deadline:
                with suppress(RuntimeError), replica.peer.briefly():
                    replica.go_on()

    # ---------------------------------------------------------------- generation

    def answers(
        self,
        bodies: Sequence[Mapping[str, Any]],
        read: Callable[[Any, Mapping[str, Any]], T],
        version: str,
        due: Callable[[Mapping[int, T]], bool] | None = None,
    ) -> dict[int, T]:
        """What the replicas say to each of ``bodies``, by its place, by weights of ``version`` and no other.

        A replica of another version is lost, and so is one that has another version when it has answered, or none
        because it does not answer any more: what it said is not used.

        Args:
            bodies: of the requests.
            read: what an answer to a body says; raises `lqrl.engines.vllm.peer.AnswerError` for one of another form.
            version: see `seal`.
            due: whether the answers so far are enough. What is under way is cut off then, and answered with what there
                is; what was not begun has no answer.

        Raises:
            ReplicasLostError: when none is left.
            RuntimeError: when one does not take a request, or answers something else; it names the replica.
        """
        found: dict[int, T] = {}
        self._drop_other_versions(version, {})
        while missing := [i for i in range(len(bodies)) if i not in found]:
            serving = self.serving
            if not serving:
                raise ReplicasLostError(
                    f"{len(found)} of {len(bodies)} requests were answered and no replica is left: {self.why()}"
                )

            def ask(server: int, request: int, over: Event, serving: list[Replica] = serving) -> T:
                try:
                    return read(serving[server].complete(bodies[request], over), bodies[request])
                except (PeerRefusal, AnswerError) as error:
                    raise RuntimeError(f"{serving[server].url}: {error}") from error

            shares = share(missing, serving, ask, due if due is None else partial(_with, due, dict(found)))
            sources = {i: serving[server] for i, server in shares.sources.items()}
            for server, loss in shares.lost.items():
                answered = sum(source is serving[server] for source in sources.values())
                self._lose(serving[server], loss.reason, loss.requests + answered)
            self._drop_other_versions(version, sources)
            found |= {i: answer for i, answer in shares.answers.items() if sources[i] not in self.lost}
            if shares.cut:
                break
        return found

    def _drop_other_versions(self, version: str, sources: Mapping[int, Replica]) -> None:
        for replica in self.serving:
            redone = sum(source is replica for source in sources.values())
            try:
                replica.go_on()
                found = replica.version()
            except (PeerLost, PeerRefusal, AnswerError) as error:
                self._lose(replica, str(error), redone)
                continue
            if found != version:
                self._lose(replica, f"its weights are version {found!r}, wanted is {version!r}", redone)

    # ---------------------------------------------------------------- refresh

    def load(self, weights: Iterable[tuple[str, Tensor]], probe: Sequence[int], route: Route) -> Loaded:
        """Have all replicas that serve load ``weights``.

        Args:
            weights: a complete set, by the names of a checkpoint.
            probe: tokens to compute something with.
            route: how they go.

        Returns:
            What each of them holds.

        Raises:
            ReplicasGoneError: when some are lost, and the others may try again.
            RefreshError: when one fails, or they hold different weights; none has a version then.
        """
        serving = self.serving
        readers = sum(replica.workers for replica in serving)
        patience_s = max((replica.peer.patience.timeout_s for replica in serving), default=0)
        try:
            with (
                weight_folder(route.directory) as directory,
                under_way(weights, directory, route, readers=readers, patience_s=patience_s) as send,
            ):
                loaded = self._all("refresh", lambda replica: replica.load(directory, probe), send)
        except (OSError, SafetensorError) as error:
            raise RefreshError(f"the weights cannot be written to files ({error}); set transfer_directory") from error
        digests = {each.digest for each in loaded}
        if len(digests) > 1:
            raise RefreshError("the replicas hold different tensors after the same weights; serve all of them alike")
        return loaded[0]

    def seal(self, version: str) -> None:
        """Say to all replicas that serve which weights they have.

        Raises:
            ReplicasGoneError, RefreshError: when one does not take it, or has others by now; see `load`.
        """
        self._all("version", lambda replica: replica.seal(version))

    def _all(self, what: str, do: Callable[[Replica], T], send: Callable[..., None] | None = None) -> list[T]:
        """Do something with all replicas that serve, at the same time, and beside it ``send``."""
        serving = self.serving
        if not serving:
            raise RefreshError(f"no replica answers: {self.why()}")

        def attempt(replica: Replica) -> T | Exception:
            try:
                return do(replica)
            except RuntimeError as error:
                return error

        stopped: Exception | None = None
        with asking(serving, "lqrl-refresh") as pool:
            futures = {replica: pool.submit(attempt, replica) for replica in serving}
            first: list[Replica] = []  # that ended, while there was still something to send

            def ended() -> bool:
                first[:] = [replica for replica, future in futures.items() if future.done()]
                return bool(first)

            try:
                if send is not None:
                    send(ended=ended)
            except ReadersEnded:
                pass  # the reader's own words are in its outcome
            except Exception as error:
                stopped = error
            outcomes = [future.result() for future in futures.values()]
        if self._closed:
            raise RefreshError(_CLOSED)
        failures = {r: o for r, o in zip(serving, outcomes, strict=True) if isinstance(o, Exception)}
        for replica, failure in failures.items():
            if isinstance(failure, PeerLost) or replica.broken:
                self.lost[replica] = str(failure)
        if stopped is not None:
            raise stopped
        if failures:
            reasons = "; ".join(f"{replica.url}: {failure}" for replica, failure in failures.items())
            # where some ended first, the others failed because nothing came any more
            causes = [failure for replica, failure in failures.items() if not first or replica in first]
            gone = self.serving and all(isinstance(failure, PeerLost) for failure in causes)
            raised = ReplicasGoneError if gone else RefreshError
            raise raised(f"the {what} failed on {len(failures)} of {len(serving)} replicas: {reasons}")
        return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]


def _with(due: Callable[[Mapping[int, Any]], bool], earlier: dict[int, Any], new: Mapping[int, Any]) -> bool:
    return due(earlier | dict(new))
