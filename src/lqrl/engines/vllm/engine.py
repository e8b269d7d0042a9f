"""`VLLMEngine`: rollouts by a vLLM in this process, on one GPU or the CPU."""

from __future__ import annotations

import math
import struct
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha1
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lqrl.engines.base import EngineFactory, EngineSpec, RefreshError
from lqrl.engines.vllm import process, reload
from lqrl.engines.vllm.arguments import engine_arguments
from lqrl.engines.vllm.guard import PROBE_LOGPROBS, GuardedEngine
from lqrl.engines.vllm.patches import install_patches
from lqrl.engines.vllm.requests import Generated, Sample, sampling_fields
from lqrl.engines.vllm.served import ServedModel, check_spec
from lqrl.engines.vllm.truncation import SAMPLE, TOP_K, TOP_P, MassRecord, truncating_processor
from lqrl.engines.vllm.versions import device_type, import_vllm
from lqrl.types import Completion, Prompt, SamplingParams


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
            all that is sent, on its device; without it both are NaN.
        record_log_mass: allow ``top_p`` and ``top_k``, with an exact ``log_mass``. Costs a sort of the vocabulary a
            token, and vLLM's first model runner is used.
        fp32_head: compute the logits in fp32, as the learner does.
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
    record_log_mass: bool = False
    fp32_head: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)
    allow_untested_version: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "kv_cache_bytes"):
            value = self.__dict__[name]
            if value is not None and value < 1:
                raise ValueError(f"VLLMEngineFactory.{name} must be at least 1, got {value}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"VLLMEngineFactory.gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )

    def __call__(self, spec: EngineSpec) -> VLLMEngine:
        """Build an engine; it refuses to generate until its first refresh."""
        return VLLMEngine(spec, self)


class VLLMEngine(GuardedEngine):
    """A vLLM that this process drives: weights through its layerwise reload, tokens in and tokens out.

    Differs from `lqrl.engines.TorchEngine`: a sample's random numbers come from vLLM's generator under a seed of the
    same (seed, prompt id, sample index), so the two engines draw other samples; a refresh holds all that it is sent
    until it is complete; adapters are merged (``Lora(refresh="merge")``).

    Args:
        spec: what to build.
        options: see `VLLMEngineFactory`.

    Raises:
        ImportError: without vLLM.
        RuntimeError: for a vLLM that is not tested, or that cannot be built so.
        ValueError: when vLLM has no such format, or an option is unknown or decided elsewhere.
        NotImplementedError: for exact mode, adapters beside the weights, a second GPU or several ranks.
    """

    def __init__(self, spec: EngineSpec, options: VLLMEngineFactory) -> None:
        check_spec(spec)
        vllm = import_vllm(allow_untested=options.allow_untested_version)
        platform = device_type()
        process.check_process(spec, platform)
        # On a CPU kernels keep a copy of every matrix, the head's too.
        served = ServedModel(spec, unties=platform == "cpu", fp32_head=options.fp32_head)
        super().__init__(spec, served, count_changes=options.count_changes)
        self.options = options
        self.patches = install_patches(vllm.__version__, platform)
        self._broken: str | None = None
        self._asleep = False
        self._masses = MassRecord()
        self._vllm = vllm
        self._llm = self._launch()
        self._finalizer = weakref.finalize(self, process.retire, self._llm)
        self._finalizer.atexit = False

    def _launch(self) -> Any:
        """Build the ``vllm.LLM`` on unset weights."""
        from vllm.engine.arg_utils import EngineArgs

        known, variables = frozenset(f.name for f in fields(EngineArgs)), {}
        with tempfile.TemporaryDirectory(prefix="lqrl-vllm-") as directory:
            arguments = engine_arguments(self.spec, self.options, Path(directory), known)
            if self.options.record_log_mass:
                variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # it has another kind of logits processor
                arguments = {"async_scheduling": False} | arguments
                arguments["logits_processors"] = [truncating_processor(self._masses)]
            self.served.write_config(Path(directory))
            try:
                return process.launch(arguments, variables, self.spec.device)
            except Exception as error:
                raise RuntimeError(
                    f"vLLM {self._vllm.__version__} cannot be built for scheme {self.spec.scheme.name!r} in "
                    f"{self.spec.dtype} on {self.spec.device}: {error}"
                ) from error

    # ---------------------------------------------------------------- generation

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int) -> list[list[Completion]]:
        """Draw completions; see `RolloutEngine.generate`.

        With ``top_p`` or ``top_k`` the log-probs are those of the truncated distribution, and ``log_mass`` is what it
        kept of the whole one at this temperature.

        Raises:
            StaleEngineError: without good weights.
            ValueError: see `lqrl.engines.vllm.requests.check_prompts`; or for truncation without ``record_log_mass``.
            RuntimeError: while asleep, after `close`, or when vLLM fails.
        """
        return super().generate(prompts, params, seed=seed)

    def _check_truncation(self, params: SamplingParams) -> None:
        if params.truncates and not self.options.record_log_mass:
            raise ValueError(
                "vLLM does not report the mass that top_p and top_k keep; set record_log_mass: true in the engine, or "
                "top_p: 1 and top_k: 0"
            )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probs of given tokens under the weights that serve, at temperature 1.

        Args:
            sequences: token ids, at most ``max_model_len - 1`` each.

        Returns:
            For each sequence ``[L]`` float32 on the host; entry t is the log-prob of token t given those before it,
            entry 0 is 0.

        Raises:
            StaleEngineError, RuntimeError: as `generate`.
        """
        self._check_ready()
        if not sequences:
            return []
        asked = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 0}
        outputs = self._run([list(tokens) for tokens in sequences], [asked] * len(sequences))
        return [torch.tensor([0.0, *output.prompt_logprobs.logprobs]) for output in outputs]

    def _draw(self, drawn: Sequence[Sample], params: SamplingParams) -> list[Generated]:
        shared, truncates = sampling_fields(params, self.spec.eos_token_ids), params.truncates
        settings = {TOP_K: params.top_k, TOP_P: params.top_p}
        requests = [
            shared | {"seed": sample.seed} | ({"extra_args": {SAMPLE: i, **settings}} if truncates else {})
            for i, sample in enumerate(drawn)
        ]
        self._masses.clear()
        outputs = [o.outputs[0] for o in self._run([list(s.prompt.input_ids) for s in drawn], requests)]
        masses = self._masses.of_samples([len(o.token_ids) for o in outputs]) if truncates else [None] * len(outputs)
        self._masses.clear()
        return [
            Generated(output.token_ids, output.logprobs.logprobs, mass, output.finish_reason)
            for output, mass in zip(outputs, masses, strict=True)
        ]

    def _run(self, prompts: list[list[int]], requests: list[dict[str, Any]]) -> list[Any]:
        """The outputs, in order; nothing of a call that fails or is interrupted stays in vLLM's queue."""
        params = [self._vllm.SamplingParams(detokenize=False, flat_logprobs=True, **each) for each in requests]
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        engine = self._llm.llm_engine
        try:
            with process.random_state(self.spec.device), torch.autocast(self.spec.device.type, enabled=False):
                outputs = self._llm.generate(tokens, params, use_tqdm=False)
        except BaseException:
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise
        if len(outputs) != len(prompts):
            raise RuntimeError(f"vLLM answered {len(outputs)} of {len(prompts)} requests; see its log")
        return outputs

    def _check_ready(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("the engine is closed; build a new one")
        super()._check_ready()
        if self._asleep:
            raise RuntimeError("the engine is asleep; call wake() before generate()")

    # ---------------------------------------------------------------- refresh

    def _check_refreshable(self) -> None:
        if self._broken is not None or not self._finalizer.alive:
            raise RefreshError(self._broken or "the engine is closed; build a new one")
        if self._asleep:
            raise RefreshError("the engine is asleep; call wake() before update_weights()")

    def _load(self, received: dict[str, Tensor], policy_version: int) -> str:
        (before,) = self._llm.collective_rpc(reload.addresses)
        self._reload(received)
        (after,) = self._llm.collective_rpc(reload.addresses)
        moved = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        if moved:
            raise RefreshError(f"storage moved during the refresh: {', '.join(moved[:5])}")
        if not self._llm.reset_prefix_cache():
            raise RefreshError("vLLM kept prefixes of the old weights: a request was still running")
        return self._digest()

    def _reload(self, received: dict[str, Tensor]) -> None:
        """Hand a complete set to vLLM; what it does not finish is ended, or the engine is given up."""
        stream = self.served.checkpoint_stream(received)
        # Lightning validates in inference mode; tensors made there could not be written again outside it.
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.spec.device.type, enabled=False):
                (missed,) = self._llm.collective_rpc(reload.reload_weights, args=(stream,))
                reload.check_loaded(missed, self.served.may_miss)
        except BaseException as error:
            self._abandon(error)
            if isinstance(error, RefreshError) or not isinstance(error, Exception):
                raise
            raise RefreshError(f"vLLM failed while it loaded the weights: {error}") from error

    def _abandon(self, cause: BaseException) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._llm.collective_rpc(reload.abandon_reload)
        except Exception as error:
            self._broken = f"vLLM failed in a refresh ({cause}) and could not end it ({error}); build a new engine"

    def _digest(self) -> str:
        """Of all parameters and buffers, and of what the model says of some tokens.

        The latter sees weights that kernels keep to themselves, and is refused when it is not finite.
        """
        held = self._llm.collective_rpc(reload.model_digest)[0]
        asked = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True, "logprobs": PROBE_LOGPROBS}
        try:
            (output,) = self._run([self._probe], [asked])
        except Exception as error:
            raise RefreshError(f"vLLM cannot compute with the weights: {error}") from error
        said = output.outputs[0].logprobs.logprobs
        if not all(math.isfinite(value) for value in said):
            raise RefreshError("the refreshed model gives NaN or inf log-probs; fix the policy and refresh again")
        return sha1(held.encode() + struct.pack(f"{len(said)}d", *said), usedforsecurity=False).hexdigest()

    # ---------------------------------------------------------------- memory

    def wake(self) -> None:
        """Take back what `sleep` gave up; with ``sleep_level: 2`` the weights must be sent again."""
        if self._asleep and self.options.sleep_level > 0:
            self._llm.wake_up()
        self._asleep = False

    def sleep(self) -> None:
        """Give up what ``sleep_level`` says."""
        if self._asleep:
            return
        if self.options.sleep_level > 0:
            self._llm.sleep(level=self.options.sleep_level)
            self._sent = {name: tensor.cpu() for name, tensor in self._sent.items()}
        if self.options.sleep_level == 2:
            self.policy_version = -1
            self._refusal = "it gave up its weights in sleep; send a complete set"
        self._asleep = True

    def close(self) -> None:
        """Shut vLLM down; with several engines in the process their memory is free when the last one is closed."""
        self._finalizer()
        self._refusal, self.policy_version, self._sent = "it is closed; build a new one", -1, {}
