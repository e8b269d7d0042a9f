"""`VLLMServerEngine`: rollouts by vLLM servers, driven over HTTP."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import tempfile
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lqrl.engines.base import EngineSpec, EngineUnavailableError, RefreshError
from lqrl.engines.torch import EngineStats
from lqrl.engines.vllm import wire
from lqrl.engines.vllm.arguments import engine_arguments
from lqrl.engines.vllm.connectors import check_caches
from lqrl.engines.vllm.fleet import Fleet, ReplicasGoneError, ReplicasLostError
from lqrl.engines.vllm.guard import GuardedEngine, Loaded, alone
from lqrl.engines.vllm.inspection import Inspection
from lqrl.engines.vllm.launch import ServerProcess
from lqrl.engines.vllm.partial import Group, Partial, begun, enough
from lqrl.engines.vllm.peer import BRIEF_S, PeerLost
from lqrl.engines.vllm.process import check_cpu_attention, check_dtype, check_ranks
from lqrl.engines.vllm.reload import check_loaded
from lqrl.engines.vllm.replica import Replica
from lqrl.engines.vllm.requests import Generated, Sample, check_prompts, sampling_fields
from lqrl.engines.vllm.rounding import vllm_arithmetic
from lqrl.engines.vllm.served import ServedModel, check_spec
from lqrl.engines.vllm.transfer import Route, this_machine
from lqrl.engines.vllm.versions import device_type, import_vllm
from lqrl.types import Completion, Prompt, SamplingParams

if TYPE_CHECKING:
    from lqrl.engines.vllm.server_factory import VLLMServerEngineFactory

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S = 0.05  # between two looks whether a call has ended


class VLLMServerEngine(GuardedEngine):
    """VLLM servers that generate the same as `VLLMEngine`, each with a copy of the weights.

    Every sample is a request of its own, with its own seed, to whichever replica is free. A replica that is lost is
    reported, and all that it had is done again by the others, the refresh included unless it is streamed. A refresh
    reaches all replicas that are left, or the engine refuses; lost ones that are back, or can be started again, take
    part in the next.

    Args:
        spec: what to build; its device is the learner's.
        options: see `VLLMServerEngineFactory`.

    Raises:
        ImportError: without vLLM, when servers are to be started.
        EngineUnavailableError: for a vLLM that is not tested or finds no device, or a server that does not start, does
            not answer or holds another model.
        ValueError: when vLLM has no such format, the first server cannot be refreshed, an option is unknown or
            decided elsewhere, or ``transport`` has no GPU on one side.
        NotImplementedError: for exact mode, adapters beside the weights, or several ranks.
    """

    def __init__(self, spec: EngineSpec, options: VLLMServerEngineFactory) -> None:
        check_spec(spec)
        check_ranks("every rank would refresh the same servers")
        self.options = options
        self._directory = Path(tempfile.mkdtemp(prefix="lqrl-vllm-"))
        fleet = Fleet(options.start_timeout_s)
        self._finalizer = weakref.finalize(self, _retire, fleet, self._directory, os.getpid())
        self._fleet = fleet
        self._version = ""
        self._begun: list[Group] = []
        try:
            super().__init__(
                spec, self._gather(spec), count_changes=options.count_changes, streams=options.stream_refresh
            )
            fleet.revive()
            _check_distinct(fleet.serving)
        except BaseException:
            self._finalizer()
            raise
        if fleet.lost:
            message = f"{len(fleet.lost)} of {len(fleet.replicas)} vLLM servers cannot be used: {fleet.why()}"
            self._finalizer()
            raise EngineUnavailableError(message)

    def _gather(self, spec: EngineSpec) -> ServedModel:
        """Put the replicas into the fleet, not started yet; the model as they hold it."""
        options = self.options
        if options.urls:
            replicas = [Replica(url, options.patience, options.max_num_seqs) for url in options.urls]
            platform = _platform(replicas[0])
        else:
            import_vllm(allow_untested=options.allow_untested_version)
            replicas, platform = [], device_type()
            if not platform:
                raise EngineUnavailableError(
                    "the installed vLLM finds no device here; install its CPU build, or give urls"
                )
        through_gpu = options.transport == "cuda_ipc"
        if through_gpu and not spec.device.type == platform == "cuda":
            raise ValueError(
                f"VLLMServerEngineFactory.transport: cuda_ipc goes from GPU to GPU, the learner is on "
                f"{spec.device.type} and the servers on {platform}; set transport: files"
            )
        self._route = Route(options.transfer_directory, options.stream_refresh, spec.device if through_gpu else None)
        self.arithmetic = vllm_arithmetic(platform, options.each)
        # What vLLM is asked for depends on where the servers run, not on where the learner does.
        there = replace(spec, device=torch.device(platform))
        served = ServedModel(there, unties=platform == "cpu", fp32_head=options.fp32_head)
        check_dtype(spec.scheme, spec.dtype, platform)
        if not options.urls:
            replicas = self._processes(there, served)
        machine = this_machine() if through_gpu else None
        self._fleet.add(replicas, Inspection(there, served, options.allow_untested_version, machine))
        return served

    def _processes(self, spec: EngineSpec, served: ServedModel) -> list[Replica]:
        from vllm.engine.arg_utils import EngineArgs

        options = self.options
        if spec.device.type == "cpu":
            check_cpu_attention(spec)
        check_caches(options.engine_args)
        arguments = engine_arguments(spec, options.each, self._directory, frozenset(f.name for f in fields(EngineArgs)))
        served.write_config(self._directory)
        replicas = []
        for i in range(options.replicas):
            cards = options.cards[i] if options.cards else None
            parallel = {}
            if cards and "," in cards:
                parallel = {"tensor_parallel_size": 1 + cards.count(","), "distributed_executor_backend": "mp"}
            process = ServerProcess(arguments | parallel, self._directory / f"{i}.log", cards)
            replicas.append(Replica(process.url, options.patience, options.max_num_seqs, process))
        return replicas

    @property
    def serving(self) -> list[str]:
        """URLs of the replicas that are not lost."""
        return [replica.url for replica in self._fleet.serving]

    # ---------------------------------------------------------------- generation

    @alone
    def generate_some(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int
    ) -> list[tuple[Prompt, list[Completion]]]:
        """Draw completions until a limit of `Partial`; groups that an earlier call began come first.

        A sample that is cut off is continued by the next call, with random numbers of a seed of its own that depends on
        where it was cut. When a call fails, what earlier ones began is as it was before.

        Raises:
            StaleEngineError, ValueError, RuntimeError: see `generate`.
        """
        partial = self.options.partial
        if partial is None:
            return super().generate_some(prompts, params, seed=seed)
        self._check_ready()
        self._check_truncation(params)
        limits = {"vocabulary": self.served.vocabulary, "max_model_len": self.spec.max_model_len}
        check_prompts(prompts, params, **limits, eos=self.spec.eos_token_ids)
        started = time.perf_counter()
        ages = [group.age(self.policy_version) for group in self._begun]
        due = [i for i, age in enumerate(ages) if age >= partial.max_lag]
        before = [*self._carried(ages, partial.max_lag), *begun(prompts, params, seed)]
        groups = before
        while groups:
            serving, last, groups = self.serving, groups, self._advanced(groups, partial, due, started)
            if enough(_left(groups), len(groups), due):
                break
            if groups == last and self.serving == serving:
                raise RuntimeError("vLLM's servers end samples without a token and before their end; see their logs")
        # Before anything is kept: it may refuse what vLLM gave.
        ended = [(g.prompt, [draft.completion() for draft in g.drafts]) for g in groups if g.finished]
        self._begun = [group for group in groups if not group.finished]
        self._stats = EngineStats(
            self._stats.prompt_tokens + sum(len(p.input_ids) for p in prompts),
            self._stats.generated_tokens + _tokens(groups) - _tokens(before),
            self._stats.seconds + time.perf_counter() - started,
        )
        return ended

    def _carried(self, ages: Sequence[int], max_lag: int) -> list[Group]:
        """What earlier calls began, anew where it is too old to be continued."""
        odd = [not 0 <= age <= max_lag for age in ages]
        if any(odd):
            log.warning(
                "%d groups of partial rollouts are begun anew: more than max_lag = %d versions have passed since their "
                "first tokens, or the weights are those of an earlier version; call generate_some after every refresh, "
                "or raise max_lag",
                sum(odd),
                max_lag,
            )
        return [group.anew() if each else group for group, each in zip(self._begun, odd, strict=True)]

    def _advanced(self, groups: Sequence[Group], partial: Partial, due: Sequence[int], started: float) -> list[Group]:
        """The groups after as much generation as the limits allow; those in ``due`` are waited for."""
        places = [(i, j) for i, g in enumerate(groups) for j, d in enumerate(g.drafts) if d.finish_reason is None]
        total = sum(len(group.drafts) for group in groups)

        def ends(answers: Mapping[int, Any]) -> bool:
            left = Counter(i for place, (i, _) in enumerate(places) if place not in answers)
            reached = partial.reached(time.perf_counter() - started, total - left.total(), total)
            return reached and enough(left, len(groups), due)

        bodies = []
        for i, j in places:
            draft, params = groups[i].drafts[j], groups[i].params
            changes = {"seed": draft.seed, "max_tokens": params.max_tokens - len(draft.token_ids)}
            fields = sampling_fields(params, self.spec.eos_token_ids) | changes
            bodies.append(wire.request_body(draft.tokens, fields))
        drafts = [list(group.drafts) for group in groups]
        for place, said in self._answers(bodies, self._generated, ends).items():
            i, j = places[place]
            drafts[i][j] = drafts[i][j].continued(said, self.policy_version, groups[i].params.max_tokens)
        return [replace(group, drafts=tuple(each)) for group, each in zip(groups, drafts, strict=True)]

    def unfinished(self) -> list[dict[str, Any]]:
        """What was begun and cut off; see `RolloutEngine.unfinished`."""
        return [group.plain() for group in self._begun]

    @alone
    def take_up(self, unfinished: Sequence[Mapping[str, Any]]) -> None:
        """Continue what `unfinished` said, in the next call; see `RolloutEngine.take_up`."""
        if self.options.partial is None:
            super().take_up(unfinished)
        self._begun = [Group.of_plain(each) for each in unfinished]

    @alone
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probs of given tokens; see `VLLMEngine.score`."""
        self._check_ready()
        asked = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 0}
        bodies = [wire.request_body(tokens, asked) for tokens in sequences]
        scored = self._answers(bodies, wire.prompt_logprobs)
        return [torch.tensor([0.0, *scored[i]]) for i in range(len(bodies))]

    def _check_truncation(self, params: SamplingParams) -> None:
        if params.truncates:
            raise ValueError(
                "vLLM's servers do not report the mass that top_p and top_k keep; set top_p: 1 and top_k: 0, or take "
                "lqrl.engines.vllm.VLLMEngineFactory with record_log_mass: true"
            )

    def _draw(self, drawn: Sequence[Sample], params: SamplingParams) -> list[Generated]:
        asked = sampling_fields(params, self.spec.eos_token_ids)
        bodies = [wire.request_body(sample.prompt.input_ids, asked | {"seed": sample.seed}) for sample in drawn]
        said = self._answers(bodies, self._generated)
        return [said[i] for i in range(len(bodies))]

    def _generated(self, answer: Any, body: Mapping[str, Any]) -> Generated:
        return wire.generated(answer, body, self.served.vocabulary)

    def _answers(
        self,
        bodies: Sequence[Mapping[str, Any]],
        read: Callable[[Any, Mapping[str, Any]], T],
        due: Callable[[Mapping[int, T]], bool] | None = None,
    ) -> dict[int, T]:
        try:
            return self._fleet.answers(bodies, read, self._version, due)
        except ReplicasLostError as error:
            self._refusal, self.policy_version = f"{error}; start servers again and call update_weights", -1
            raise

    def _check_ready(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("the engine is closed; build a new one")
        super()._check_ready()

    # ---------------------------------------------------------------- refresh

    def _check_refreshable(self) -> None:
        if not self._finalizer.alive:
            raise RefreshError("the engine is closed; build a new one")

    def _load(self, received: Mapping[str, Tensor], policy_version: int) -> Loaded:
        """Send to all replicas; once more to the others, from the start, when some are lost on the way."""
        self._fleet.revive()
        while True:
            try:
                return Loaded(self._load_once(received, policy_version))
            except ReplicasGoneError as error:
                if self.options.stream_refresh:
                    raise  # what has passed is gone
                warnings.warn(f"{error}; it is done again with the other {len(self.serving)}", stacklevel=4)

    def _load_once(self, received: Mapping[str, Tensor], policy_version: int) -> str:
        """Both phases on all replicas: new weights, then, when all hold the same, their version."""
        stream = self.served.checkpoint_stream(received)
        loaded = self._fleet.load(stream, self._probe, self._route)
        check_loaded(loaded.missed, self.served.may_miss)
        said = struct.pack(f"{len(loaded.said)}d", *loaded.said)
        digest = sha1(loaded.digest.encode() + said, usedforsecurity=False).hexdigest()
        self._version = f"{policy_version}-{digest[:16]}"
        self._fleet.seal(self._version)
        return digest

    def close(self) -> None:
        """Stop the servers that were started here; others keep their weights. A call of another thread fails."""
        deadline = time.monotonic() + BRIEF_S
        self._fleet.interrupt()
        while not self._turn.acquire(timeout=_LOOK_S):
            if time.monotonic() > deadline:  # it does something else than to ask servers
                break
            self._fleet.interrupt()
        else:
            self._turn.release()
        if self._begun:
            log.warning("%d groups of partial rollouts are given up", len(self._begun))
        self._finalizer()
        self._begun = []
        self._refusal, self.policy_version, self._sent = "it is closed; build a new one", -1, {}


def _left(groups: Sequence[Group]) -> dict[int, int]:
    return {i: sum(draft.finish_reason is None for draft in group.drafts) for i, group in enumerate(groups)}


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(draft.token_ids) for group in groups for draft in group.drafts)


def _platform(replica: Replica) -> str:
    try:
        return replica.facts()["platform"]
    except PeerLost as error:
        raise EngineUnavailableError(
            f"no vLLM server answers at {replica.url} ({error}); start it as docs/vllm.md says, or correct urls"
        ) from error
    except ValueError as error:
        raise ValueError(f"{replica.url}: {error}") from error


def _check_distinct(replicas: Sequence[Replica]) -> None:
    """Refuse one server under two URLs: it would get twice the requests, and lose each version to the other."""
    known: dict[str, Replica] = {}
    for replica in replicas:
        if replica.identity and (other := known.setdefault(replica.identity, replica)) is not replica:
            raise ValueError(
                f"VLLMServerEngineFactory.urls names a server twice: {other.url} is also {replica.url}; remove one"
            )


def _retire(fleet: Fleet, directory: Path, owner: int) -> None:
    if os.getpid() != owner:  # a child that was forked ends
        return
    fleet.close()
    shutil.rmtree(directory, ignore_errors=True)
