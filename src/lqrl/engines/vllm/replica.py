"""One vLLM server, and what is done with it: which weights it has, new ones, completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import NoneType
from typing import Any
from uuid import uuid4

from lqrl.engines.base import RefreshError
from lqrl.engines.vllm import wire
from lqrl.engines.vllm.guard import PROBE_LOGPROBS
from lqrl.engines.vllm.launch import ServerProcess
from lqrl.engines.vllm.peer import AnswerError, Patience, Peer, PeerLost, PeerRefusal, fields

UNSET = "none"
"""How the version of weights begins that are no complete set, or not yet one that all replicas hold."""

_PROBE = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True, "logprobs": PROBE_LOGPROBS}

_FACTS = {
    "vllm": (str,),
    "platform": (str,),
    "max_model_len": (int,),
    "served": (dict,),
    "capability": (list, NoneType),
}
_LOADED = {"missed": (list,), "moved": (list,), "digest": (str,)}


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
        identity: what no other server says of itself; known after `facts`.
        paused: it was cut off or loads, and may not go on yet.
    """

    def __init__(self, url: str, patience: Patience, width: int, process: ServerProcess | None = None) -> None:
        self._process, self.width = process, width
        self.peer = Peer(url, patience, self._ended)
        self.url = self.peer.url
        self.broken = self.paused = False
        self.workers, self.identity = 1, ""
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
                with self.peer.briefly():
                    self.broken = self.version() == self._mark  # one that was started anew has never had that version
            except RuntimeError:
                return False
        return not self.broken

    def start(self) -> bool:
        """Start it anew, when it is a process of this machine; whether it is one."""
        if self._process is None:
            return False
        self._process.start()
        if self._process.url != self.url:
            self.peer = Peer(self._process.url, self.peer.patience, self._ended)
            self.url = self.peer.url
        self.broken = False
        return True

    def wait(self, deadline: float) -> None:
        """Wait until it answers, when it was started here; see `lqrl.engines.vllm.launch.ServerProcess.wait`."""
        if self._process is not None:
            self._process.wait(deadline)

    def end(self) -> None:
        """Ask it to end, when it was started here."""
        if self._process is not None:
            self._process.end()

    def stop(self) -> None:
        """End it, when it was started here, and wait until it has."""
        if self._process is not None:
            self._process.stop()

    def interrupt(self) -> None:
        """Make all requests that are under way fail."""
        self.peer.interrupt()

    def cut(self) -> None:
        """End what it generates, each request with the tokens it has; one that does not answer soon ends nothing.

        Raises:
            RuntimeError: when it has no such route; it names the server.
        """
        self.paused = True
        try:
            with self.peer.briefly():  # the others are cut again when this has ended
                heard = False
                with suppress(PeerLost):
                    self.peer.post("/pause?mode=abort")
                    heard = True
                with suppress(PeerLost):  # also when the first answer was lost on its way
                    self.go_on()
                self.paused = self.paused or not heard  # it may still come to it
        except PeerRefusal as error:
            raise RuntimeError(
                f"{self.url} does not cut rollouts off ({error}); start it with VLLM_SERVER_DEV_MODE=1, or leave "
                "partial out"
            ) from error

    def go_on(self) -> None:
        """Have it answer requests again, where a `cut` or `load` may have left it paused.

        Raises:
            PeerLost: when it does not answer.
        """
        if self.paused:
            self.peer.post("/resume")
            self.paused = False

    # ---------------------------------------------------------------- what it is

    def facts(self) -> Mapping[str, Any]:
        """What it serves; see `lqrl.engines.vllm.worker.ServedWorker.lqrl_facts`.

        Raises:
            PeerLost: when it does not answer.
            ValueError: when it wants another API key, or has not the methods that a refresh needs.
        """
        try:
            self.peer.get("/health")
            self.peer.get("/v1/models")  # the others do not ask for the API key
            facts = self._facts_of_workers()
            self._has_version_route = self._keeps_version()
        except (PeerRefusal, AnswerError) as error:
            if isinstance(error, PeerRefusal) and error.wants_key:
                raise ValueError(str(error)) from error
            raise ValueError(
                f"it is no server that lqrl can refresh ({error}); start it with VLLM_SERVER_DEV_MODE=1 and "
                "--worker-extension-cls lqrl.engines.vllm.worker.ServedWorker, where lqrl is installed"
            ) from error
        self.workers, self._connected = len(facts), bool(facts[0].get("connected"))
        self.identity = str(facts[0].get("process", ""))
        return facts[0]

    def _facts_of_workers(self) -> list[Mapping[str, Any]]:
        try:
            said = self._workers("lqrl_facts")
        except PeerLost as error:  # of a method that its workers have not, a server says status 500
            self.peer.get("/health", attempts=1)
            raise AnswerError(str(error)) from error
        if not said:
            raise AnswerError("none of its workers answers")
        return [fields(each, "lqrl_facts", _FACTS) for each in said]

    def _keeps_version(self) -> bool:
        try:
            self.peer.get("/weight_info")
        except PeerRefusal as error:
            if error.status != 404:
                raise
            return False  # a vLLM from before that route
        return True

    def version(self) -> str:
        """What `seal` said last; a server that started since then, or was loaded by others, says something else.

        Its workers know, whose version changes with the weights; a route of vLLM's, where there is one, says so to
        others, and has to agree.

        Raises:
            PeerLost: when it does not answer.
        """
        known = set(self._versions("lqrl_version"))
        if self._has_version_route:
            known.add(
                fields(self.peer.get("/weight_info"), "/weight_info", {"weight_version": (str,)})["weight_version"]
            )
        return " or ".join(sorted(known))

    def seal(self, version: str) -> None:
        """Say which weights it has: those that `load` gave it.

        Raises:
            PeerLost: when it does not answer, or has been started anew or loaded by others since.
        """
        found = self.version()
        if found == self._mark:
            found = " or ".join(self._versions("lqrl_seal", self._mark, version))
            if found == version:
                return self._publish(version)
        raise PeerLost(f"its weights have become version {found!r} since it loaded them")

    def _versions(self, method: str, *args: str) -> list[str]:
        """What its workers call their weights, each name once."""
        said = [fields(each, method, {"version": (str,)})["version"] for each in self._workers(method, *args)]
        return sorted(set(said)) or [UNSET]

    def _publish(self, version: str) -> None:
        if self._has_version_route:
            self.peer.post("/update_weight_version", {"new_version": version})

    def _workers(self, method: str, *args: str, attempts: int | None = None) -> list[Any]:
        """What every worker's ``method`` returns."""
        answer = self.peer.post("/collective_rpc", {"method": method, "args": args}, attempts=attempts)
        return fields(answer, "/collective_rpc", {"results": (list,)})["results"]

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
        self.paused = True  # until it has loaded them; where that fails, until it is closed
        self._mark = f"{UNSET}-{uuid4().hex[:16]}"
        self._publish(self._mark)
        self.peer.post("/pause?mode=abort")
        answers = self._loaded(directory)
        # Releases differ in what they say of a connector that is not there.
        caches = "/reset_prefix_cache?reset_external=true" if self._connected else "/reset_prefix_cache"
        if not fields(self.peer.post(caches), "/reset_prefix_cache", {"success": (bool,)})["success"]:
            raise RefreshError("it kept prefixes of the old weights: a request was still running")
        self.go_on()
        body = wire.request_body(probe, _PROBE)
        try:
            said = wire.top_logprobs(self.complete(body), body)
        except PeerRefusal as error:  # NaN has no JSON, says the server
            if error.wants_key:
                raise
            raise RefreshError(
                f"it gives NaN or inf log-probs with the weights, or cannot compute with them: {error}"
            ) from error
        if not all(math.isfinite(value) for value in said):
            raise RefreshError("it gives NaN or inf log-probs with the weights; fix the policy and refresh again")
        missed = {str(name) for each in answers for name in each["missed"]}
        return Loaded(tuple(sorted(missed)), " ".join(each["digest"] for each in answers), tuple(said))

    def _loaded(self, directory: Path) -> list[Mapping[str, Any]]:
        """What its workers say of a load that succeeded."""
        answers = self._workers("lqrl_load", str(directory), self._mark, attempts=1)
        if len(answers) != self.workers:
            raise RefreshError(f"{len(answers)} of its {self.workers} workers loaded the weights")
        failed = [fields(each, "lqrl_load", {"error": (str, NoneType), "broken": (bool, NoneType)}) for each in answers]
        self.broken = any(each.get("broken") for each in failed)
        if errors := dict.fromkeys(each["error"] for each in failed if each.get("error") is not None):
            raise RefreshError(f"it failed while it loaded the weights: {'; '.join(errors)}")
        for each in answers:
            if moved := fields(each, "lqrl_load", _LOADED)["moved"]:
                raise RefreshError(f"storage moved during the refresh: {', '.join(map(str, moved[:5]))}")
        return answers

    # ---------------------------------------------------------------- completions

    def complete(self, body: Mapping[str, Any], give_up: Event | None = None) -> Any:
        """The answer to one request.

        Raises:
            PeerLost, PeerRefusal: see `lqrl.engines.vllm.peer.Peer.post`.
        """
        return self.peer.post(wire.ROUTE, body, give_up=give_up)
