"""One vLLM server, and what is done with it: which weights it has, new ones, completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

from lqrl.engines.base import RefreshError
from lqrl.engines.vllm import wire
from lqrl.engines.vllm.guard import PROBE_LOGPROBS
from lqrl.engines.vllm.launch import ServerProcess
from lqrl.engines.vllm.peer import Patience, Peer, PeerLost, PeerRefusal

UNSET = "none"
"""How the version of weights begins that are no complete set, or not yet one that all replicas hold."""

_PROBE = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True, "logprobs": PROBE_LOGPROBS}


@dataclass(frozen=True)
class Loaded:
    """What a replica holds after a load.

    Attributes:
        missed: parameters that were not loaded.
        digest: of all parameters and buffers, of every worker.
        said: log-probs of some tokens, computed with them.
    """

    missed: tuple[str, ...]
    digest: str
    said: tuple[float, ...]


class Replica:
    """One server. What its methods raise does not name it.

    Args:
        url: where it is.
        patience: how long it is waited for.
        width: requests that it has at a time.
        process: the server, when it was started here.

    Attributes:
        broken: a load could not be ended, so that none can follow.
        workers: processes that share its model; known after `facts`.
        paused: it was cut off, and may not go on yet.
    """

    def __init__(self, url: str, patience: Patience, width: int, process: ServerProcess | None = None) -> None:
        self._process, self.width = process, width
        self.peer = Peer(url, patience, self._ended)
        self.url = self.peer.url
        self.broken = self.paused = False
        self.workers = 1
        self._connected = False  # it hands caches on to a connector
        self._mark = ""  # its version while it loads, which nobody else gives it
        self._has_version_route = True

    def _ended(self) -> bool:
        return self._process is not None and self._process.ended

    # ---------------------------------------------------------------- its process

    def usable(self) -> bool:
        """Whether it may be asked: it was not seen to end, and is not what a load left broken."""
        if self._ended():
            return False
        if self.broken and self._process is None:
            try:
                self.broken = self.version() == self._mark  # one that was started anew has never had that version
            except RuntimeError:
                return False
        return not self.broken

    def start(self) -> None:
        """Start it anew, when it is a process of this machine."""
        if self._process is not None:
            self._process.start()
            self.broken = False

    def wait(self, deadline: float) -> None:
        """Wait until it answers, when it was started here; see `lqrl.engines.vllm.launch.ServerProcess.wait`."""
        if self._process is not None:
            self._process.wait(deadline)

    def stop(self) -> None:
        """End it, when it was started here."""
        if self._process is not None:
            self._process.stop()

    def interrupt(self) -> None:
        """Make all requests that are under way fail."""
        self.peer.interrupt()

    def cut(self) -> None:
        """End what it generates, each request with the tokens it has; one that does not answer ends nothing."""
        self.paused = True
        with suppress(PeerLost):
            self.peer.post("/pause?mode=abort", attempts=1)
        with suppress(PeerLost):  # also when the first answer was lost on its way
            self.go_on()

    def go_on(self) -> None:
        """Have it answer requests again, where a `cut` may have left it paused.

        Raises:
            PeerLost: when it does not answer.
        """
        if self.paused:
            self.peer.post("/resume")
            self.paused = False

    # ---------------------------------------------------------------- what it is

    def facts(self) -> dict[str, Any]:
        """What it serves; see `lqrl.engines.vllm.worker.ServedWorker.lqrl_facts`.

        Raises:
            PeerLost: when it does not answer.
            ValueError: when it has not the methods that a refresh needs.
        """
        self.peer.get("/health", attempts=1)
        try:
            facts = self._workers("lqrl_facts", attempts=1)
        except (PeerRefusal, PeerLost) as error:
            raise ValueError(
                f"it is no server that lqrl can refresh ({error}); start it with VLLM_SERVER_DEV_MODE=1 and "
                "--worker-extension-cls lqrl.engines.vllm.worker.ServedWorker, where lqrl is installed"
            ) from error
        if not facts:
            raise ValueError("none of its workers answers")
        self.workers, self._connected = len(facts), bool(facts[0].get("connected"))
        try:
            self.peer.get("/weight_info")
        except PeerRefusal as error:
            if error.status != 404:
                raise
            self._has_version_route = False  # a vLLM from before that route
        return facts[0]

    def version(self) -> str:
        """What `seal` said last; a server that started since then says something else.

        Raises:
            PeerLost: when it does not answer.
        """
        if self._has_version_route:
            return str(self.peer.get("/weight_info")["weight_version"])
        stamped = {each["version"] for each in self._workers("lqrl_version")}
        return stamped.pop() if len(stamped) == 1 else UNSET

    def seal(self, version: str) -> None:
        """Say which weights it has: those that `load` gave it.

        Raises:
            PeerLost: when it does not answer, or has been started anew or loaded by others since.
        """
        found = self.version()
        if found != self._mark:
            raise PeerLost(f"its weights have become version {found!r} since it loaded them")
        self.stamp(version)

    def stamp(self, version: str) -> None:
        """Give its weights a version, whatever they are.

        Raises:
            PeerLost: when it does not answer.
        """
        if self._has_version_route:
            self.peer.post("/update_weight_version", {"new_version": version})
        else:
            self._workers("lqrl_stamp", version)

    def _workers(self, method: str, *args: str, attempts: int | None = None) -> list[Any]:
        """What every worker's ``method`` returns."""
        return self.peer.post("/collective_rpc", {"method": method, "args": args}, attempts=attempts)["results"]

    # ---------------------------------------------------------------- refresh

    def load(self, directory: Path, probe: Sequence[int]) -> Loaded:
        """Load the complete set of weights in ``directory``; what was under way is ended, and its prefixes forgotten.

        Args:
            directory: as the server sees it.
            probe: tokens to compute something with.

        Raises:
            RefreshError: when it fails; the replica then has no version.
            PeerLost, PeerRefusal: when the server does not answer, or has not the routes.
        """
        self._mark = f"{UNSET}-{uuid4().hex[:16]}"
        self.stamp(self._mark)
        self.peer.post("/pause?mode=abort")
        answers = self._workers("lqrl_load", str(directory), attempts=1)
        if len(answers) != self.workers:
            raise RefreshError(f"{len(answers)} of its {self.workers} workers loaded the weights")
        self.broken = any(each.get("broken") for each in answers)
        if errors := dict.fromkeys(each["error"] for each in answers if "error" in each):
            raise RefreshError(f"it failed while it loaded the weights: {'; '.join(errors)}")
        for each in answers:
            if each["moved"]:
                raise RefreshError(f"storage moved during the refresh: {', '.join(each['moved'][:5])}")
        # Releases differ in what they say of a connector that is not there.
        caches = "/reset_prefix_cache?reset_external=true" if self._connected else "/reset_prefix_cache"
        if not self.peer.post(caches)["success"]:
            raise RefreshError("it kept prefixes of the old weights: a request was still running")
        self.peer.post("/resume")
        self.paused = False
        try:
            said = wire.top_logprobs(self.complete(wire.request_body(probe, _PROBE)), probe)
        except PeerRefusal as error:  # NaN has no JSON, says the server
            raise RefreshError(
                f"it gives NaN or inf log-probs with the weights, or cannot compute with them: {error}"
            ) from error
        if not all(math.isfinite(value) for value in said):
            raise RefreshError("it gives NaN or inf log-probs with the weights; fix the policy and refresh again")
        missed = {name for each in answers for name in each["missed"]}
        return Loaded(tuple(sorted(missed)), " ".join(each["digest"] for each in answers), tuple(said))

    # ---------------------------------------------------------------- completions

    def complete(self, body: Mapping[str, Any], give_up: Event | None = None) -> Any:
        """The answer to one request.

        Raises:
            PeerLost, PeerRefusal: see `lqrl.engines.vllm.peer.Peer.post`.
        """
        return self.peer.post(wire.ROUTE, body, give_up=give_up)
