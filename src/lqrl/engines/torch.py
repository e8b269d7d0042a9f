"""`TorchEngine`: the embedded engine, on transformers' modules and this library's kernels, for CPU and CUDA."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lqrl.engines.base import (
    Digests,
    EngineFactory,
    EngineSpec,
    NamedTensors,
    RefreshError,
    RolloutEngine,
    StaleEngineError,
)
from lqrl.engines.decoder import Decoder
from lqrl.engines.generation import Generation
from lqrl.engines.prompts import check_prompts
from lqrl.engines.slots import SlotCache
from lqrl.engines.stepper import Stepper, bucket
from lqrl.engines.transaction import HeldTensors, model_digest, write_weights_
from lqrl.quant.kv import kv_method, kv_scales
from lqrl.types import Completion, Prompt, RefreshReport, SamplingParams


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was built; subtract two of them for a rate.

    Attributes:
        prompt_tokens, generated_tokens: tokens of prompts (once a group) and of completions.
        seconds: wall time inside ``generate``.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class TorchEngineFactory(EngineFactory):
    """Options of the embedded engine.

    Attributes:
        max_num_seqs: most samples that run together.
        max_num_batched_tokens: most prompt tokens in one prefill, in which a longer prompt runs alone; ``None`` is 8192
            on the CPU and 16384 elsewhere: the host must launch the next one's kernels while the GPU works on one.
        kv_cache_tokens: most tokens the cache holds, at least those of the longest prompt and ``max_tokens``; fewer
            samples run together when they would need more. ``None`` sets no limit beside ``max_num_seqs``.
        gpu_memory_utilization: on CUDA, the engine's share of the GPU's memory, its weights and cache; the learner has
            the rest. Limits the cache as ``kv_cache_tokens`` does. Activations and graphs come on top. ``None`` sets
            no limit.
        sleep_level: what `TorchEngine.sleep` gives up: 0 nothing, 1 the cache. The weights, and the captured steps,
            which stay valid, are kept.
        host_interval: decode steps between two looks at the device for finished samples; ``None`` is 1 on the CPU
            and 8 elsewhere. Above 1 the next steps run while the host looks, unless a sample waits for a slot. Samples
            do not depend on it.
        fused: on CUDA, run the layers on fused kernels where these stay within rounding of transformers' layers, see
            `lqrl.engines.fused_decoder.FusedDecoder`. Without, layers and attention run PyTorch's kernels.
            In exact mode they are taken where they give the learner's bits, with exact attention.
            Changes nothing on a CPU.
        cuda_graphs: on CUDA, capture each decode step once and replay it, see `lqrl.engines.stepper.Stepper`. Changes
            nothing on a CPU.

    Raises:
        ValueError: when a number is outside its range.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    sleep_level: Literal[0, 1] = 0
    host_interval: int | None = None
    fused: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens", "host_interval"):
            value = self.__dict__[name]
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"TorchEngineFactory.{name} must be a whole number of at least 1, got {value}")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"TorchEngineFactory.gpu_memory_utilization must be in (0, 1], got {share}")
        if self.sleep_level not in (0, 1):
            raise ValueError(f"TorchEngineFactory.sleep_level must be 0 or 1, got {self.sleep_level}")

    def __call__(self, spec: EngineSpec) -> TorchEngine:
        """Build an engine; it refuses to generate until its first refresh."""
        return TorchEngine(spec, self)


class TorchEngine(RolloutEngine):
    """Continuous batching with a slot cache, low-bit linear layers and per-sample random numbers.

    The engine owns its tensors: nothing is shared with the learner. Autocast is off inside.

    Args:
        spec: what to build.
        options: see `TorchEngineFactory`.

    Raises:
        ValueError: when ``gpu_memory_utilization`` is set and the device is no GPU.
    """

    def __init__(self, spec: EngineSpec, options: TorchEngineFactory) -> None:
        if options.gpu_memory_utilization is not None and spec.device.type != "cuda":
            raise ValueError(
                f"TorchEngineFactory.gpu_memory_utilization is a share of a GPU, the engine is on {spec.device}: set "
                "kv_cache_tokens"
            )
        self.spec = spec
        self.options = options
        self.decoder = Decoder(spec, options.fused)
        self.policy_version = -1
        self._refusal: str | None = "it has no weights yet; call update_weights first"
        self._asleep = False
        self._running: weakref.ref[Generation] | None = None  # weak, so that no interrupt leaves it behind
        self._cache = SlotCache(
            [shape for _, shape in sorted(self.decoder.shapes.items())],
            spec.dtype,
            spec.device,
            kv_method(spec.scheme),
            kv_scales(self.decoder.model, spec.scheme),
            spec.exact,
            releasable=options.sleep_level > 0,
        )
        on_cpu = spec.device.type == "cpu"
        interval = options.host_interval or (1 if on_cpu else 8)
        self._prefill_tokens = options.max_num_batched_tokens or (8192 if on_cpu else 16384)
        self._stepper = Stepper(self.decoder, self._cache, interval, options.cuda_graphs)
        self._held: HeldTensors | None = None
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        """Tokens and seconds so far."""
        return self._stats

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key/value cache, 0 while it is given away."""
        return self._cache.bytes

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int) -> list[list[Completion]]:
        """Draw completions; see `RolloutEngine.generate`.

        Raises:
            StaleEngineError: without good weights.
            ValueError: for a prompt that is empty, too long or out of the vocabulary, or a stop token out of it.
            RuntimeError: while asleep, during another call, or when the weights give NaN.
        """
        self._check_idle("draw other samples")
        if self._refusal is not None:
            raise StaleEngineError(f"the engine refuses to generate: {self._refusal}")
        if self._asleep:
            raise RuntimeError("the engine is asleep; call wake() before generate()")
        if not prompts:
            return []
        eos, limit = self.spec.eos_token_ids, self.spec.max_model_len
        check_prompts(prompts, params, vocabulary=self.decoder.vocabulary, max_model_len=limit, eos=eos)
        stops = () if params.ignore_eos else eos
        slots, started = self._slots(prompts, params), time.perf_counter()
        # Lightning validates in inference mode; a cache made there could never be written again outside it.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.spec.device.type, enabled=False):
            generation = Generation(
                self.decoder,
                self._cache,
                self._stepper,
                prompts,
                params,
                seed=seed,
                stop_token_ids=(*stops, *params.stop_token_ids),
                max_slots=slots,
                prefill_tokens=self._prefill_tokens,
            )
            self._running = weakref.ref(generation)
            try:
                generation.run()
            finally:
                self._running = None
            completions = generation.completions(self.policy_version)
        self._stats = EngineStats(
            self._stats.prompt_tokens + sum(len(p.input_ids) for p in prompts),
            self._stats.generated_tokens + generation.generated_tokens,
            self._stats.seconds + time.perf_counter() - started,
        )
        return completions

    def update_weights(
        self, weights: NamedTensors, *, policy_version: int, frozen: Digests | None = None
    ) -> RefreshReport:
        """Load a complete set of weights in place; see `RolloutEngine.update_weights`.

        Raises:
            RefreshError: see there; the engine refuses to generate until a refresh succeeds.
            RuntimeError: inside of `generate`, whose samples would be of two policies; nothing has changed then.
        """
        self._check_idle("take weights")
        started = time.perf_counter()
        self.policy_version = -1
        self._refusal = "its last refresh did not complete; send a complete set of weights"
        try:
            if policy_version < 0:
                raise RefreshError(f"policy_version must be >= 0, got {policy_version}")
            report = self._load(weights, policy_version, frozen)
        except RefreshError as error:
            self._refusal = f"its last refresh failed ({error})"
            raise
        self._refusal = None
        self.policy_version = policy_version
        return replace(report, seconds=time.perf_counter() - started)

    def wake(self) -> None:
        """Allow generation again; the cache comes back with the next call of `generate`."""
        self._asleep = False

    def sleep(self) -> None:
        """Give up what ``sleep_level`` says. Between two calls of `generate` the cache holds nothing that is needed.

        Raises:
            RuntimeError: inside of `generate`, whose samples would lose their keys and values.
        """
        self._check_idle("sleep")
        self._cache.release()
        self._asleep = True

    def _check_idle(self, wish: str) -> None:
        if self._running is not None and self._running() is not None:
            raise RuntimeError(f"the engine is generating and cannot {wish}; wait until generate() has returned")

    def _load(self, weights: NamedTensors, policy_version: int, frozen: Digests | None) -> RefreshReport:
        model = self.decoder.model
        if self._held is None or self._held.moved():
            self._held = HeldTensors(model)
        written = write_weights_(self._held, weights, frozen)
        self.decoder.refresh_derived()
        self._cache.clear()
        moved = self._held.moved()
        if moved:
            raise RefreshError(f"storage moved during the refresh: {', '.join(moved[:5])}")
        return RefreshReport(
            policy_version=policy_version,
            tensors=written.tensors,
            elements=written.elements,
            frozen_elements=written.frozen_elements,
            elements_changed_fraction=written.elements_changed_fraction,
            codes_changed_fraction=written.codes_changed_fraction,
            seconds=0.0,
            digest=model_digest(model),
        )

    def _slots(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """Samples that may run together within the cache's budget."""
        length, most = max(len(p.input_ids) for p in prompts) + params.max_tokens, self.options.max_num_seqs
        for name, budget in self._budgets().items():
            if budget < length:
                raise ValueError(
                    f"a sample may take {length} tokens (longest prompt + max_tokens), {name} holds {budget}: raise it"
                )
            slots = budget // length
            if self.options.cuda_graphs and self.spec.device.type == "cuda":
                while bucket(slots) > budget // length:  # captured steps round the number of slots up
                    slots -= 1
            most = min(most, slots)
        return most

    def _budgets(self) -> dict[str, int]:
        """Tokens that the cache may hold, by the option that says so."""
        tokens, share, budgets = self.options.kv_cache_tokens, self.options.gpu_memory_utilization, dict[str, int]()
        if tokens is not None:
            budgets[f"kv_cache_tokens={tokens}"] = tokens
        if share is not None:
            card = torch.cuda.get_device_properties(self.spec.device).total_memory
            room = int(share * card) - self.decoder.weight_bytes
            budgets[f"gpu_memory_utilization={share}, less the weights,"] = max(0, room) // self._cache.token_bytes
        return budgets
