"""`VLLMServerEngineFactory`: the options of the engine on vLLM servers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lqrl.engines.base import EngineFactory, EngineSpec
from lqrl.engines.vllm.factory import VLLMEngineFactory
from lqrl.engines.vllm.partial import Partial
from lqrl.engines.vllm.peer import Patience, checked_url
from lqrl.engines.vllm.server import VLLMServerEngine

_OF_STARTED = ("replicas", "cards", "gpu_memory_utilization", "kv_cache_bytes", "engine_args")
_MOST_S = 2_000_000  # a socket waits no longer


@dataclass(frozen=True)
class VLLMServerEngineFactory(EngineFactory):
    """Options of the engine on vLLM servers.

    Attributes:
        urls: servers that run already, as ``http://host:port``. Empty: they are started on this machine, and stopped
            with the engine.
        replicas: how many servers are started.
        cards: ``CUDA_VISIBLE_DEVICES`` of each of them, such as ``["1", "2,3"]``; several cards share a model by
            tensor parallelism. Empty: each sees what this process sees.
        max_num_seqs: most samples that one replica has at a time.
        gpu_memory_utilization: a started server's share of its GPU's memory. ``None`` is vLLM's default.
        kv_cache_bytes: bytes of a started server's key/value cache. ``None`` is what ``gpu_memory_utilization`` leaves;
            on the CPU 1 GiB.
        count_changes: report which shares of elements and codes changed since the last refresh. Costs a second copy of
            all that is sent, on its device; without it both are NaN.
        fp32_head: compute the logits in fp32, as the learner does; servers that run already need it, too.
        engine_args: further arguments of the started servers, by their names in ``vllm.LLM``.
        allow_untested_version: take a vLLM outside of the tested range.
        stream_refresh: load each layer as it comes, so that the learner has one layer of what is sent in main memory at
            once, and ``transfer_directory`` two. Otherwise nothing is loaded before all is there and checked; either
            way the engine refuses after a faulty stream.
        transport: how weights go to the servers. ``files``: through ``transfer_directory``. ``cuda_ipc``: through two
            buffers of 256 MiB on the learner's GPU, which workers on GPUs of the same machine open
            (`lqrl.engines.vllm.staging`). They load what is sent as it comes: with ``stream_refresh`` before all is
            there and checked, otherwise after that.
        transfer_directory: where weights are put on their way, a directory that all servers see under the same name;
            with ``cuda_ipc`` what describes them. ``None`` is this machine's for temporary files.
        partial: end a learner's call before all samples are finished, keep them, and continue them in its next call,
            under the weights that serve then. ``None`` waits for all.
        timeout_s: seconds without a byte of an answer, until a request has failed.
        attempts: times that a request is sent before its replica is lost.
        backoff_s: seconds before it is sent again; each further pause is twice as long.
        start_timeout_s: seconds for a server to start.

    Raises:
        ValueError: when a number is outside its range, an option has no effect with ``urls``, or one of them is no URL.
    """

    urls: list[str] = field(default_factory=list)
    replicas: int = 1
    cards: list[str] = field(default_factory=list)
    max_num_seqs: int = 256
    gpu_memory_utilization: float | None = None
    kv_cache_bytes: int | None = None
    count_changes: bool = True
    fp32_head: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)
    allow_untested_version: bool = False
    stream_refresh: bool = False
    transport: Literal["files", "cuda_ipc"] = "files"
    transfer_directory: str | None = None
    partial: Partial | None = None
    timeout_s: float = 600.0
    attempts: int = 4
    backoff_s: float = 0.5
    start_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("attempts", 1)):
            if self.__dict__[name] < least:
                raise ValueError(f"VLLMServerEngineFactory.{name} must be at least {least}, got {self.__dict__[name]}")
        for name in ("timeout_s", "start_timeout_s"):
            if not 0 < self.__dict__[name] <= _MOST_S:  # NaN is in no range
                raise ValueError(
                    f"VLLMServerEngineFactory.{name} must be above 0 and at most {_MOST_S:,}, got {self.__dict__[name]}"
                )
        if not 0 <= self.backoff_s <= _MOST_S:
            raise ValueError(
                f"VLLMServerEngineFactory.backoff_s must be at least 0 and at most {_MOST_S:,}, got {self.backoff_s}"
            )
        if "worker_extension_cls" in self.engine_args:
            raise ValueError(
                "engine_args.worker_extension_cls is not free: it comes from the engine, which refreshes by it"
            )
        if self.transport not in ("files", "cuda_ipc"):
            raise ValueError(f"VLLMServerEngineFactory.transport is files or cuda_ipc, got {self.transport!r}")
        for option in fields(self) if self.urls else ():
            if option.name in _OF_STARTED and self.__dict__[option.name] not in (option.default, [], {}):
                raise ValueError(
                    f"VLLMServerEngineFactory.{option.name} has no effect on servers that run already; remove it"
                )
        if len({checked_url(url) for url in self.urls}) < len(self.urls):
            raise ValueError(f"VLLMServerEngineFactory.urls names a server twice: {self.urls}")
        if self.cards and len(self.cards) != self.replicas:
            raise ValueError(
                f"VLLMServerEngineFactory.cards lists {len(self.cards)} servers, replicas is {self.replicas}"
            )
        if self.stream_refresh and self.count_changes:
            raise ValueError(
                "VLLMServerEngineFactory.stream_refresh keeps nothing to compare with; set count_changes: false"
            )
        _ = self.each  # checks what the two factories have in common

    @property
    def max_lag(self) -> int:
        """That of `Partial`, 0 without."""
        return 0 if self.partial is None else self.partial.max_lag

    @property
    def each(self) -> VLLMEngineFactory:
        """What one server is built with."""
        return VLLMEngineFactory(
            max_num_seqs=self.max_num_seqs,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_bytes=self.kv_cache_bytes,
            fp32_head=self.fp32_head,
            engine_args=self.engine_args,
            allow_untested_version=self.allow_untested_version,
        )

    @property
    def patience(self) -> Patience:
        """How long a server is waited for."""
        return Patience(self.timeout_s, self.attempts, self.backoff_s)

    def __call__(self, spec: EngineSpec) -> VLLMServerEngine:
        """Build an engine, starting its servers; it refuses to generate until its first refresh."""
        return VLLMServerEngine(spec, self)
