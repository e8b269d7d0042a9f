"""`VLLMEngine`: rollouts by a vLLM in this process, or in those of all ranks together."""

from __future__ import annotations

import math
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lqrl.engines.base import Digests, EngineSpec, EngineUnavailableError, NamedTensors, RefreshError
from lqrl.engines.vllm import process, reload
from lqrl.engines.vllm.adapters import ServedAdapters, held_factor_digests
from lqrl.engines.vllm.arguments import engine_arguments, with_hint
from lqrl.engines.vllm.connectors import check_caches
from lqrl.engines.vllm.direct import Rehearsal
from lqrl.engines.vllm.direct_refresh import DirectRefresh
from lqrl.engines.vllm.frozen import FrozenBase
from lqrl.engines.vllm.guard import PROBE_LOGPROBS, GuardedEngine, Loaded
from lqrl.engines.vllm.online import check_online
from lqrl.engines.vllm.patches import install_patches
from lqrl.engines.vllm.ranks import Meet, RankFailed, Ranks
from lqrl.engines.vllm.requests import Generated, Sample, sampling_fields
from lqrl.engines.vllm.rounding import vllm_arithmetic
from lqrl.engines.vllm.served import ServedModel, check_spec
from lqrl.engines.vllm.truncation import SAMPLE, TOP_K, TOP_P, MassRecord, truncating_processor
from lqrl.engines.vllm.versions import device_type, import_vllm
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, RefreshReport, SamplingParams

if TYPE_CHECKING:
    from lqrl.engines.vllm.factory import VLLMEngineFactory


class VLLMEngine(GuardedEngine):
    """A vLLM that this process drives: weights in by its layerwise reload or direct copies, tokens in and tokens out.

    Differs from `lqrl.engines.TorchEngine`: a sample's random numbers come from vLLM's generator under a seed of the
    same (seed, prompt id, sample index), so the two engines draw other samples; a refresh holds all that it is sent
    until it is complete, unless ``stream_refresh`` is set. In fp32 on a GPU its attention rounds what it multiplies to
    TF32, unless ``TRITON_F32_DEFAULT=ieee`` is in the environment.

    Args:
        spec: what to build.
        options: see `VLLMEngineFactory`.

    Raises:
        ImportError: without vLLM.
        EngineUnavailableError: for a vLLM that is not tested, or that cannot be built so.
        ValueError: when vLLM has no such format there, or an option is unknown, decided elsewhere or not to be had.
        NotImplementedError: for exact mode, a second GPU or several ranks.
    """

    def __init__(self, spec: EngineSpec, options: VLLMEngineFactory) -> None:
        if options.online:
            check_online(spec)
            self.takes = QuantScheme.preset("none")
        base = replace(spec, lora=None, scheme=self.takes or spec.scheme)
        check_spec(base)
        vllm = import_vllm(allow_untested=options.allow_untested_version)
        platform = device_type()
        process.check_process(spec, platform, options.tensor_parallel_size)
        process.check_sleep(options.sleep_level)
        # On a CPU kernels keep a copy of every matrix, the head's too.
        served = ServedModel(base, unties=platform == "cpu", fp32_head=options.fp32_head)
        process.check_dtype(spec.scheme, spec.dtype, platform)
        super().__init__(spec, served, count_changes=options.count_changes, streams=options.stream_refresh)
        self.options, self.arithmetic = options, vllm_arithmetic(platform, options)
        self._adapters = None if spec.lora is None else ServedAdapters(spec, spec.lora)
        if self._adapters is not None and options.tensor_parallel_size > 1:
            raise ValueError("VLLMEngineFactory.tensor_parallel_size: not with adapters; set lora.refresh: merge")
        if self._adapters is not None and options.stream_refresh:
            raise ValueError("VLLMEngineFactory.stream_refresh is not for adapters, which are all that is sent again")
        self._base: FrozenBase | None = None
        self.patches = install_patches(vllm.__version__, platform)
        self._broken: str | None = None
        self._asleep = False
        self._masses = MassRecord()
        self._ranks = Ranks(options.tensor_parallel_size)
        self._meet: Meet = lambda value: [value]
        self.collective = self._ranks.size > 1
        self._vllm = vllm
        self._llm = self._launch()
        alone = options.direct_refresh and self._adapters is None and not self.collective
        self._direct = DirectRefresh(served.tensors, spec.device) if alone else None
        self._finalizer = weakref.finalize(self, process.retire, self._llm)
        self._finalizer.atexit = False

    def _launch(self) -> Any:
        """Build the ``vllm.LLM`` on unset weights."""
        from vllm.engine.arg_utils import EngineArgs

        check_caches(self.options.engine_args)
        known = frozenset(f.name for f in fields(EngineArgs))
        variables = process.rank_variables(self._ranks.size, self.spec.device)
        with tempfile.TemporaryDirectory(prefix="lqrl-vllm-") as directory:
            arguments = engine_arguments(self.spec, self.options, Path(directory), known)
            if self.options.online:
                arguments["quantization"] = self.spec.scheme.name
            if self._adapters is not None:
                arguments |= self._adapters.arguments
            if self.options.record_log_mass:
                variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # it has another kind of logits processor
                arguments = {"async_scheduling": False} | arguments
                arguments["logits_processors"] = [truncating_processor(self._masses)]
            self.served.write_config(Path(directory))
            try:
                return process.launch(arguments, variables, self.spec.device)
            except Exception as error:
                raise EngineUnavailableError(
                    f"vLLM {self._vllm.__version__} cannot be built for scheme {self.spec.scheme.name!r} in "
                    f"{self.spec.dtype} on {self.spec.device}: {with_hint(process.words_of(error))}"
                ) from error

    # ---------------------------------------------------------------- generation

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int) -> list[list[Completion]]:
        """Draw completions; see `RolloutEngine.generate`.

        With ``top_p`` or ``top_k`` the log-probs are those of the truncated distribution, and ``log_mass`` is what it
        kept of the whole one at this temperature.

        Raises:
            StaleEngineError: without good weights.
            ValueError: see `lqrl.engines.vllm.requests.check_prompts`; or for truncation without ``record_log_mass``.
            RuntimeError: while asleep, after `close`, when vLLM fails, or another rank does.
        """
        with self._ranks.meeting() as self._meet:
            if prompts or not self.collective:
                return super().generate(prompts, params, seed=seed)
            self._check_ready()
            self._draw([], params)  # with the other ranks
            return []

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
        with self._ranks.meeting() as meet:
            self._check_ready()
            everyone = meet([list(tokens) for tokens in sequences])
            tokens = [each for theirs in everyone for each in theirs]
            asked = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 0}
            outputs = self._ranks.own(self._run(tokens, [asked] * len(tokens)), [len(theirs) for theirs in everyone])
        scored = [torch.tensor([0.0, *output.prompt_logprobs.logprobs]) for output in outputs]
        if any(bool(each.isnan().any()) for each in scored):
            raise RuntimeError("vLLM gave NaN log-probs of given tokens; the weights or an engine option are broken")
        return scored

    def _draw(self, drawn: Sequence[Sample], params: SamplingParams) -> list[Generated]:
        everyone: list[tuple[Sequence[Sample], SamplingParams]] = self._meet((drawn, params))
        prompts: list[list[int]] = []
        requests: list[dict[str, Any]] = []
        for theirs, asked in everyone:
            shared, settings = sampling_fields(asked, self.spec.eos_token_ids), {TOP_K: asked.top_k, TOP_P: asked.top_p}
            for sample in theirs:
                extra = {"extra_args": {SAMPLE: len(prompts), **settings}} if asked.truncates else {}
                requests.append(shared | {"seed": sample.seed} | extra)
                prompts.append(list(sample.prompt.input_ids))
        self._masses.clear()
        outputs = [o.outputs[0] for o in self._run(prompts, requests)]
        masses = (
            self._masses.of_samples([len(o.token_ids) for o in outputs]) if params.truncates else [None] * len(outputs)
        )
        self._masses.clear()
        drawn_by_all = [
            Generated(output.token_ids, output.logprobs.logprobs, mass, output.finish_reason)
            for output, mass in zip(outputs, masses, strict=True)
        ]
        return self._ranks.own(drawn_by_all, [len(theirs) for theirs, _ in everyone])

    def _run(self, prompts: list[list[int]], requests: list[dict[str, Any]]) -> list[Any]:
        """The outputs, in order; nothing of a call that fails or is interrupted stays in vLLM's queue."""
        if not prompts:
            return []
        params = [self._vllm.SamplingParams(detokenize=False, flat_logprobs=True, **each) for each in requests]
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        engine = self._llm.llm_engine
        adapter = None if self._adapters is None else self._adapters.request()
        try:
            with process.random_state(self.spec.device), torch.autocast(self.spec.device.type, enabled=False):
                outputs = self._llm.generate(tokens, params, use_tqdm=False, lora_request=adapter)
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

    def _refresh(self, weights: NamedTensors, policy_version: int, frozen: Digests | None) -> RefreshReport:
        with self._ranks.meeting() as self._meet:
            return super()._refresh(weights, policy_version, frozen)

    def _check_refreshable(self) -> None:
        if self._broken is not None or not self._finalizer.alive:
            raise RefreshError(self._broken or "the engine is closed; build a new one")
        if self._asleep:
            raise RefreshError("the engine is asleep; call wake() before update_weights()")

    @property
    def _sendable(self) -> Mapping[str, Tensor]:
        return self.served.tensors | ({} if self._adapters is None else self._adapters.tensors)

    def _check_frozen(self, frozen: Digests) -> None:
        if self._adapters is None or not frozen:
            super()._check_frozen(frozen)
        elif self._base is None:
            raise RefreshError("the engine does not hold what is declared frozen; send a complete set of weights")
        else:
            self._base.check_declared(frozen)

    def _remembered(self, received: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._adapters is None:
            return received
        return {name: t for name, t in received.items() if name in self._adapters.tensors or t.dim() < 2}

    def _rehearsal(self) -> Rehearsal:
        def load(stream: Iterator[tuple[str, Tensor]]) -> None:
            self._reload(reload.reload_weights, stream)

        def say() -> tuple[float, ...]:
            self._drop_prefixes()
            return self._say()

        return Rehearsal(self._llm.collective_rpc("get_model")[0], self.served.checkpoint_stream, load, say)

    def _may_write(self) -> bool:
        if self._direct is None or not self._intact:
            return False
        return self._direct.ready(self._llm.collective_rpc(reload.addresses)[0])

    def _load(self, received: Any, policy_version: int) -> Loaded:
        (before,) = self._llm.collective_rpc(reload.addresses)
        changed = None
        if self._adapters is not None:
            held = self._load_adapted(self._adapters, received)
        elif self._direct is None:
            held = self._load_all(received)
        elif self._writes:
            changed = self._direct.write(self.served.checkpoint_stream(received))
            held = self._llm.collective_rpc(reload.held_digests)[0]
        else:
            held = self._load_and_learn(self._direct, received)
        (after,) = self._llm.collective_rpc(reload.addresses)
        moved = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        if moved:
            raise RefreshError(f"storage moved during the refresh: {', '.join(moved[:5])}")
        self._drop_prefixes()
        return Loaded(self._digest(held), changed)

    def _drop_prefixes(self) -> None:
        connected = self._llm.llm_engine.vllm_config.kv_transfer_config is not None
        if not self._llm.reset_prefix_cache(**({"reset_connector": True} if connected else {})):
            raise RefreshError("vLLM kept prefixes of the old weights: a request is running, or reads a connector")

    def _load_all(self, received: Mapping[str, Tensor]) -> dict[str, str]:
        """Hand over everything but adapters; digests of what vLLM holds then."""
        missed = self._reload(reload.reload_weights, self.served.checkpoint_stream(received))
        reload.check_loaded(missed, self.served.may_miss)
        return self._llm.collective_rpc(reload.held_digests)[0]

    def _load_and_learn(self, direct: DirectRefresh, received: Mapping[str, Tensor]) -> dict[str, str]:
        """Hand over everything, after it has been tried whether that could be copied, if the engine was whole."""
        direct.forget()
        if not self._intact:
            return self._load_all(received)
        rehearsal = self._rehearsal()
        direct.learn(rehearsal)
        self._check_refreshable()  # vLLM may have failed for good
        written = None if self._streams else direct.rehearse(rehearsal, received)
        held = self._load_all(received)
        direct.confirm(rehearsal, written)
        return held

    def _load_adapted(self, adapters: ServedAdapters, received: Mapping[str, Tensor]) -> dict[str, str]:
        """Hand over the base, or of one that is held what may change, and the adapters; digests of what vLLM holds."""
        sent = {name: tensor for name, tensor in received.items() if name not in adapters.tensors}
        base, self._base = self._base, None  # until all is done
        if self.served.tensors.keys() <= sent.keys():
            held = self._load_all(sent)
            base = FrozenBase.of(sent, held)
        else:
            assert base is not None  # `_check_frozen`
            loose = base.loose(sent)
            loaded = self._reload(reload.reload_some, iter(loose.items())) if loose else []
            reload.check_some_loaded(loose, loaded)
            held = self._llm.collective_rpc(reload.held_digests)[0]
            base.check_held(held, loaded)
        adapters.put(self._llm, received)
        self._base = base
        return held | self._llm.collective_rpc(held_factor_digests)[0]

    def _reload(self, load: Callable[..., list[str]], stream: Iterator[tuple[str, Tensor]]) -> list[str]:
        """Have ``load`` of `lqrl.engines.vllm.reload` run; what it does not finish is ended, or the engine given up."""
        # Lightning validates in inference mode; tensors made there could not be written again outside it.
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.spec.device.type, enabled=False):
                return self._llm.collective_rpc(load, args=(stream,))[0]
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

    def _digest(self, held: Mapping[str, str]) -> str:
        """Of all tensors, whose own are ``held``, and of what the model says of some tokens.

        The latter sees weights that kernels keep to themselves, and is refused when it is not finite. With several
        ranks it is the digest of what all hold.
        """
        try:
            everyone = self._meet(held)
        except RankFailed as error:
            raise RefreshError(str(error)) from error
        said = self._say()
        text = "\n".join(f"{name} {value}" for theirs in everyone for name, value in sorted(theirs.items()))
        return sha1(text.encode() + struct.pack(f"{len(said)}d", *said), usedforsecurity=False).hexdigest()

    def _say(self) -> tuple[float, ...]:
        """Log-probs of some tokens under what vLLM holds."""
        asked = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True, "logprobs": PROBE_LOGPROBS}
        try:
            (output,) = self._run([self._probe], [asked])
        except Exception as error:
            raise RefreshError(f"vLLM cannot compute with the weights: {error}") from error
        said = tuple(output.outputs[0].logprobs.logprobs)
        if not all(math.isfinite(value) for value in said):
            raise RefreshError("the refreshed model gives NaN or inf log-probs; fix the policy and refresh again")
        return said

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
            self._refusal, self._base = "it gave up its weights in sleep; send a complete set", None
        self._asleep = True

    def close(self) -> None:
        """Shut vLLM down; with several engines in the process their memory is free when the last one is closed.

        One that several ranks hold together keeps its memory until the process ends.
        """
        self._finalizer()
        self._refusal, self.policy_version = "it is closed; build a new one", -1
        self._sent, self._base, self._direct = {}, None, None  # the last has views of its memory
