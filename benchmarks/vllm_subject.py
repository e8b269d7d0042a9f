"""One policy in a vLLM and in the learner, in one format: what vLLM samples, and what learners say of it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from shapes import SHAPES
from torch import Tensor
from transformers import PreTrainedModel
from vllm_capture import Run, recording

from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm import VLLMEngineFactory
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.modeling.sources import load_tokenizer, resolve_source
from lqrl.quant import AlignedLinear, QuantScheme, export_weights, prepare_
from lqrl.quant.methods import FullPrecision, LinearMethod
from lqrl.quant.methods.weight_only import WeightOnly
from lqrl.types import Completion, Prompt, SamplingParams

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Setting:
    """What is compared.

    Attributes:
        model: a key of `SHAPES` for random weights, or a folder.
        format: a preset.
        mode: ``eager``; ``compiled``, ``invariant`` or ``fp32_head`` for what vLLM does then.
        device: as torch calls it.
        prompts, prompt, tokens: number of prompts, their length with random weights, and sampled tokens of each.
        sequences: how many of them are compared part by part.
        layers: of a random policy.
        first: layers that are shown part by part in whole runs.
    """

    model: str
    format: str
    mode: str
    device: str
    prompts: int
    prompt: int
    tokens: int
    sequences: int
    layers: int
    first: int


@dataclass(frozen=True)
class FakeQuant(WeightOnly):
    """Rounded weights and inputs in a plain product: what a learner without low-bit kernels can do."""

    base: LinearMethod

    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        return self.base.quantize(weight, amax)

    def dequantize(self, tensors: Any, dtype: torch.dtype) -> Tensor:
        return self.base.dequantize(tensors, dtype)

    def linear(self, x: Tensor, operands: Any, bias: Tensor | None) -> Tensor:
        return super().linear(self.base.round_input(x), operands, bias)


WAYS: dict[str, Callable[[LinearMethod], LinearMethod]] = {
    "not aligned": lambda method: FullPrecision(),
    "fake quantization": FakeQuant,
    "aligned, own rounding": lambda method: method,
    "aligned": lambda method: method,
    "aligned, rounded logits": lambda method: method,
}
FOLLOW = ("aligned", "aligned, rounded logits")
"""Norms and rotary embeddings round where vLLM's do, as in a run; those of other learners where transformers' do."""


def gap(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Log-probs ``ours`` against those that tokens were sampled with: k3 is an estimate of KL(theirs || ours)."""
    difference = (ours.double() - theirs.double()).flatten()
    return {
        "tokens": len(difference),
        "k3": float((torch.expm1(difference) - difference).mean()),
        "mean": float(difference.abs().mean()),
        "max": float(difference.abs().max()),
        "equal": float((difference == 0).double().mean()),
    }


@torch.no_grad()
def random_policy(name: str, layers: int, positions: int, device: torch.device) -> PreTrainedModel:
    """Weights that keep the scale of what they multiply; logits have a standard deviation of 3."""
    shape = replace(SHAPES[name], layers=layers)
    policy = load_model(shape.config(positions), dtype=DTYPE, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for path, weight in policy.named_parameters():
        if weight.dim() == 1:
            weight.normal_(1, 0.1, generator=generator)
        elif "embed" in path and not shape.tied:
            weight.normal_(0, 1, generator=generator)
        else:
            logits = "embed" in path or path.startswith("lm_head")
            weight.normal_(0, (3 if logits else 1) / weight.shape[1] ** 0.5, generator=generator)
    return policy


def prompts_of(setting: Setting) -> list[Prompt]:
    """Prompts of one length, so that the rows of a pass say whose they are."""
    if setting.model in SHAPES:
        generator = torch.Generator().manual_seed(1)
        shape = setting.prompts, setting.prompt
        ids = torch.randint(3, SHAPES[setting.model].vocabulary, shape, generator=generator).tolist()
        return [Prompt(i, tuple(row)) for i, row in enumerate(ids)]
    from prompts import make_prompts

    found = make_prompts(load_tokenizer(setting.model), 4 * setting.prompts)
    ((length, _),) = Counter(len(p.input_ids) for p in found).most_common(1)
    return [p for p in found if len(p.input_ids) == length][: setting.prompts]


class Captured(NamedTuple):
    """A few sequences in vLLM, twice.

    Attributes:
        ids: ``[S, L]``; the last token of each is not fed.
        logprobs: ``[S, tokens]`` that the sampled tokens had.
        runs: ``decode`` while they were sampled, ``prefill`` of all in one pass.
    """

    ids: Tensor
    logprobs: Tensor
    runs: dict[str, Run]


class Subject:
    """A policy with the vLLM that samples from it.

    Raises:
        ValueError, RuntimeError: when the format does not fit the policy, or this vLLM does not have it.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, torch.device(setting.device)
        self.scheme = QuantScheme.preset(setting.format)
        self.prompts = prompts_of(setting)
        self.start = len(self.prompts[0].input_ids)
        longest = self.start + setting.tokens + 2
        random = setting.model in SHAPES
        self.policy = (
            random_policy(setting.model, setting.layers, longest, self.device)
            if random
            else load_model(resolve_source(setting.model), dtype=DTYPE, device=self.device)
        ).eval()
        if self.scheme.quantizes:
            prepare_(self.policy, self.scheme, export_dtype=DTYPE)
        spec = EngineSpec(self.policy.config, self.scheme, DTYPE, self.device, longest, ())
        self.engine = VLLMEngineFactory(
            max_num_seqs=len(self.prompts),
            gpu_memory_utilization=None if setting.device == "cpu" else 0.3,
            kv_cache_bytes=2**26 if setting.device == "cpu" else 2**29,
            count_changes=False,
            fp32_head=setting.mode == "fp32_head",
            engine_args={
                "enforce_eager": setting.mode != "compiled",
                "enable_prefix_caching": False,
                "async_scheduling": False,
                "max_num_batched_tokens": max(2048, longest * len(self.prompts)),
            },
        )(spec)
        weights = export_weights(self.policy, self.scheme, export_dtype=DTYPE)
        self.engine.update_weights(weights, policy_version=0)
        shared = {id(parameter): parameter for parameter in self.policy.parameters()}
        self._own = Scorer(copy.deepcopy(self.policy, shared), 1.0, DTYPE)
        self._follower = Scorer(self.policy, 1.0, DTYPE)
        self._follower.follow_(self.engine.arithmetic)
        self._rounds = self._follower.rounds_logits

    @contextmanager
    def learner(self, way: str) -> Iterator[Scorer]:
        """A learner with linear layers of ``way``."""
        scorer = self._follower if way in FOLLOW else self._own
        self._follower.rounds_logits = self._rounds and way == FOLLOW[1]
        layers = [module for module in scorer.modules() if isinstance(module, AlignedLinear)]
        methods = [layer.method for layer in layers]
        try:
            for layer, method in zip(layers, methods, strict=True):
                layer.method = WAYS[way](method)
                layer.invalidate()
            yield scorer
        finally:
            for layer, method in zip(layers, methods, strict=True):
                layer.method = method
                layer.invalidate()

    def sample(self, count: int, seed: int) -> tuple[Tensor, list[Completion]]:
        """Whole sequences ``[count, L]``, and what was sampled."""
        params = SamplingParams(max_tokens=self.setting.tokens, ignore_eos=True)
        sampled = [group[0] for group in self.engine.generate(self.prompts[:count], params, seed=seed)]
        ids = [[*p.input_ids, *c.token_ids.tolist()] for p, c in zip(self.prompts[:count], sampled, strict=True)]
        return torch.tensor(ids, device=self.device), sampled

    # ---------------------------------------------------------------- log-probs

    @torch.no_grad()
    def logprobs(self, seed: int) -> list[dict[str, Any]]:
        """Each learner, and vLLM's own forward pass, against what vLLM sampled with."""
        ids, sampled = self.sample(len(self.prompts), seed)
        theirs = torch.stack([c.logprobs for c in sampled])
        rows = []
        for way in WAYS if self.scheme.quantizes else ("not aligned", *FOLLOW):
            with self.learner(way) as scorer:
                ours = scorer.score(ids, torch.ones_like(ids, dtype=torch.bool))
            rows.append({"learner": way, **gap(ours[:, self.start :].cpu(), theirs)})
        again = torch.stack(self.engine.score(ids.tolist()))[:, self.start :]
        return [*rows, {"learner": "vLLM itself, in one pass", **gap(again, theirs)}]

    # ---------------------------------------------------------------- capture

    def model(self) -> Any:
        """vLLM's."""
        (model,) = self.engine._llm.collective_rpc(lambda worker: worker.get_model())
        return model

    def vllm_config(self) -> Any:
        """vLLM's."""
        return self.engine._llm.llm_engine.vllm_config

    @torch.no_grad()
    def capture(self) -> Captured:
        """Record what the parts of vLLM are given and give, while it samples and in one pass over the same tokens."""
        model = self.model()
        with recording(model) as recorder:
            ids, sampled = self.sample(self.setting.sequences, seed=0)
        runs = {"decode": recorder.run(ids.tolist())}
        fed = ids[:, :-1].tolist()
        with recording(model) as recorder:
            whole = [Prompt(i, tuple(row)) for i, row in enumerate(fed)]
            self.engine.generate(whole, SamplingParams(max_tokens=1, ignore_eos=True), seed=0)
        runs["prefill"] = recorder.run(fed)
        for name, run in runs.items():
            if run.lengths != [len(row) for row in fed]:
                raise RuntimeError(f"vLLM computed {run.lengths} tokens of the sequences in its {name} run")
        return Captured(ids, torch.stack([c.logprobs for c in sampled]), runs)
