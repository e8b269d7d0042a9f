"""`VLLMEngineFactory`: the options of the vLLM engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lqrl.engines.base import EngineFactory, EngineSpec
from lqrl.engines.vllm.engine import VLLMEngine


@dataclass(frozen=True)
class VLLMEngineFactory(EngineFactory):
    """Options of the vLLM engine.

    Attributes:
        max_num_seqs: most samples that run together.
        gpu_memory_utilization: vLLM's share of the GPU's memory, its weights and cache; the learner has the rest.
            ``None`` is vLLM's default.
        kv_cache_bytes: bytes of the key/value cache. ``None`` is what ``gpu_memory_utilization`` leaves; on the CPU
            1 GiB.
        sleep_level: what `VLLMEngine.sleep` gives up: 0 nothing, 1 the cache, with the weights moved to main memory,
            2 both, so that a refresh must follow `wake`.
        count_changes: report which shares of elements and codes changed since the last refresh. Costs a second copy of
            all that is sent, on its device, but not of a frozen base or for direct refreshes; without it both are NaN.
        stream_refresh: load each tensor as it comes, so that one layer of what is sent is in memory at once. Otherwise
            nothing is loaded before all is there and checked; either way the engine refuses after a faulty stream.
        direct_refresh: copy what is sent straight into vLLM's memory, from the third refresh on, where the second one
            has proven that this gives what a reload gives (see `lqrl.engines.vllm.direct_refresh`); elsewhere vLLM
            reloads. Not with adapters or several ranks.
        record_log_mass: allow ``top_p`` and ``top_k``, with an exact ``log_mass``. Costs a sort of the vocabulary a
            token, and vLLM's first model runner is used.
        fp32_head: compute the logits in fp32, as the learner does.
        online: be sent unquantized weights and quantize them in vLLM, for the schemes of
            `lqrl.engines.vllm.online.ONLINE`.
        tensor_parallel_size: the number of ranks of the run, which hold one engine together: each has its part of every
            matrix, gets the whole weights, and works on the prompts of all. 1 is an engine of one rank.
        engine_args: further arguments of ``vllm.LLM``, by their names there.
        allow_untested_version: take a vLLM outside of the tested range.

    Raises:
        ValueError: when a number is outside its range.
    """

    max_num_seqs: int = 256
    gpu_memory_utilization: float | None = None
    kv_cache_bytes: int | None = None
    sleep_level: Literal[0, 1, 2] = 0
    count_changes: bool = True
    stream_refresh: bool = False
    direct_refresh: bool = True
    record_log_mass: bool = False
    fp32_head: bool = False
    online: bool = False
    tensor_parallel_size: int = 1
    engine_args: dict[str, Any] = field(default_factory=dict)
    allow_untested_version: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "kv_cache_bytes", "tensor_parallel_size"):
            value = self.__dict__[name]
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"VLLMEngineFactory.{name} must be at least 1, and whole, got {value}")
        if self.sleep_level not in (0, 1, 2):
            raise ValueError(f"VLLMEngineFactory.sleep_level must be 0, 1 or 2, got {self.sleep_level}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"VLLMEngineFactory.gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.stream_refresh and self.count_changes:
            raise ValueError("VLLMEngineFactory.stream_refresh keeps nothing to compare with; set count_changes: false")
        if self.online and self.tensor_parallel_size > 1:
            raise ValueError("VLLMEngineFactory.online: not with tensor_parallel_size; ranks get the learner's codes")

    def __call__(self, spec: EngineSpec) -> VLLMEngine:
        """Build an engine; it refuses to generate until its first refresh."""
        return VLLMEngine(spec, self)
