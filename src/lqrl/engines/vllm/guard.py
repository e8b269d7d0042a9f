"""What the vLLM engines have in common: they check what they are asked, and refuse to generate without good weights."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from lqrl.engines.base import Digests, EngineSpec, NamedTensors, RefreshError, RolloutEngine, StaleEngineError
from lqrl.engines.torch import EngineStats
from lqrl.engines.vllm.coverage import Passing, changed_fractions, checked
from lqrl.engines.vllm.requests import Generated, Sample, check_prompts, completion, grouped, samples
from lqrl.engines.vllm.served import ServedModel
from lqrl.types import Completion, Prompt, RefreshReport, SamplingParams

PROBE_LOGPROBS = 5
"""Most likely tokens, whose log-probs are part of a refresh's digest."""

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound="GuardedEngine")


def alone(call: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """Have a method of a `GuardedEngine` refuse to run beside one of another thread: they would mix their weights.

    It may call others of its engine.

    Args:
        call: the method.

    Returns:
        It, which raises `RuntimeError` then.
    """

    @wraps(call)
    def guarded(engine: E, *args: P.args, **kwargs: P.kwargs) -> T:
        if not engine._turn.acquire(blocking=False):
            raise RuntimeError(
                f"{call.__name__} was called while {engine._running} runs in another thread; wait for that one, or "
                "build an engine for each thread"
            )
        before, engine._running = engine._running, call.__name__
        try:
            return call(engine, *args, **kwargs)
        finally:
            engine._running = before
            engine._turn.release()

    return guarded


class Loaded(NamedTuple):
    """What was done with a complete set of weights.

    Attributes:
        digest: of what the engine holds.
        changed: shares of unquantized elements and of codes whose bits changed, where they were counted on the way.
    """

    digest: str
    changed: tuple[float, float] | None = None


class GuardedEngine(RolloutEngine):
    """An engine that holds a complete set of weights whenever it generates.

    Args:
        spec: what it was built for.
        served: the policy as vLLM holds it.
        count_changes: keep a copy of what is sent, to count what the next refresh changes.
        streams: load what is sent as it comes, not when all is there.
    """

    def __init__(self, spec: EngineSpec, served: ServedModel, *, count_changes: bool, streams: bool = False) -> None:
        self.spec, self.served = spec, served
        self.policy_version = -1
        self._refusal: str | None = "it has no weights yet; call update_weights first"
        self._counts_changes, self._streams = count_changes, streams
        self._intact = False  # before this refresh
        self._writes = False  # this refresh checks and counts what it is sent while it writes it
        self._sent: dict[str, Tensor] = {}
        self._stats = EngineStats()
        self._turn = RLock()  # of the thread whose call runs
        self._running = "a call"

    @property
    def stats(self) -> EngineStats:
        """Tokens and seconds so far."""
        return self._stats

    @property
    def _probe(self) -> list[int]:
        """Tokens that are computed with after a refresh."""
        return [i % self.served.vocabulary for i in range(min(8, self.spec.max_model_len - 2))]

    # ---------------------------------------------------------------- generation

    @alone
    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int) -> list[list[Completion]]:
        """Draw completions; see `RolloutEngine.generate`.

        Raises:
            StaleEngineError: without good weights.
            ValueError: see `lqrl.engines.vllm.requests.check_prompts`; or for truncation that is not to be had.
            RuntimeError: after `close`, when vLLM fails, or while a call of another thread runs.
        """
        self._check_ready()
        self._check_truncation(params)
        if not prompts:
            return []
        check_prompts(
            prompts,
            params,
            vocabulary=self.served.vocabulary,
            max_model_len=self.spec.max_model_len,
            eos=self.spec.eos_token_ids,
        )
        drawn, started = samples(prompts, params, seed), time.perf_counter()
        generated = self._draw(drawn, params)
        done = [completion(sample, each, self.policy_version) for sample, each in zip(drawn, generated, strict=True)]
        self._stats = EngineStats(
            self._stats.prompt_tokens + sum(len(p.input_ids) for p in prompts),
            self._stats.generated_tokens + sum(len(c.token_ids) for c in done),
            self._stats.seconds + time.perf_counter() - started,
        )
        return grouped(done, params.counts(len(prompts)))

    @abstractmethod
    def _check_truncation(self, params: SamplingParams) -> None:
        """Refuse ``top_p`` and ``top_k`` where the mass they keep would not be known."""

    @abstractmethod
    def _draw(self, drawn: Sequence[Sample], params: SamplingParams) -> list[Generated]:
        """What vLLM says of each sample."""

    def _check_ready(self) -> None:
        if self._refusal is not None:
            raise StaleEngineError(f"the engine refuses to generate: {self._refusal}")

    # ---------------------------------------------------------------- refresh

    @alone
    def update_weights(
        self, weights: NamedTensors, *, policy_version: int, frozen: Digests | None = None
    ) -> RefreshReport:
        """Load a complete set of weights in place; see `RolloutEngine.update_weights`.

        Raises:
            RefreshError: see there; the engine refuses to generate until a refresh succeeds. Also for ``frozen``
                tensors that cannot stay while others are loaded: vLLM loads whole layers.
            RuntimeError: while a call of another thread runs; nothing has changed then.
        """
        started = time.perf_counter()
        self._intact = self.policy_version >= 0
        self.policy_version = -1
        self._refusal = "its last refresh did not complete; send a complete set of weights"
        try:
            report = self._refresh(weights, policy_version, frozen)
        except RefreshError as error:
            self._refusal = f"its last refresh failed ({error})"
            raise
        self._refusal = None
        self.policy_version = policy_version
        return replace(report, seconds=time.perf_counter() - started)

    def _refresh(self, weights: NamedTensors, policy_version: int, frozen: Digests | None) -> RefreshReport:
        self._check_refreshable()
        if policy_version < 0:
            raise RefreshError(f"policy_version must be >= 0, got {policy_version}")
        declared = frozen or {}
        self._check_frozen(declared)
        expected = {name: tensor for name, tensor in self._sendable.items() if name not in declared}
        self._writes = self._may_write()
        aliases, looks, changed = self.served.aliases, not self._writes, (math.nan, math.nan)
        keeps = self._counts_changes and not self._writes
        stream = checked(weights, expected, aliases, keep=keeps, frozen=declared, looks=looks)
        if self._streams:
            passing = Passing(stream, set(aliases.values()))
            loaded, sent = self._load(passing, policy_version), passing.elements
        else:
            received = dict(stream)
            loaded, sent = self._load(received, policy_version), {name: t.numel() for name, t in received.items()}
            if keeps:
                changed = changed_fractions(self._sent, received, [self._sendable[name] for name in declared])
            elif self._counts_changes and loaded.changed is not None:
                changed = loaded.changed
            self._sent = self._remembered(received) if keeps else {}
        return RefreshReport(
            policy_version=policy_version,
            tensors=len(sent),
            elements=sum(sent.values()),
            elements_changed_fraction=changed[0],
            codes_changed_fraction=changed[1],
            seconds=0.0,
            digest=loaded.digest,
            frozen_elements=sum(self._sendable[name].numel() for name in declared),
        )

    @property
    def _sendable(self) -> Mapping[str, Tensor]:
        """All that a refresh may send; on the meta device."""
        return self.served.tensors

    def _check_frozen(self, frozen: Digests) -> None:
        """Refuse a declaration of what need not be sent."""
        if frozen:
            raise RefreshError("vLLM loads whole layers: send every tensor, and declare none frozen")

    def _remembered(self, received: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is kept of a set, to count what the next one changes."""
        return received

    @abstractmethod
    def _check_refreshable(self) -> None:
        """Refuse a refresh that cannot succeed."""

    def _may_write(self) -> bool:
        """Whether `_load` is going to write into vLLM's memory itself, and to look for NaN then."""
        return False

    @abstractmethod
    def _load(self, received: Any, policy_version: int) -> Loaded:
        """Have vLLM hold a complete set and nothing of an earlier one.

        ``received`` is a mapping of names to tensors, or `Passing`, which fails at its end unless it was complete.
        """
