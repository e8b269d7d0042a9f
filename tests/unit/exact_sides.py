"""Both sides of exact mode: a learner, an engine refreshed from it, and the count of log-probs that differ."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.modeling.exact import exact_learner_
from lqrl.quant import Lora, QuantScheme, add_adapters_, export_weights, prepare_
from lqrl.quant.kv import kv_rounding, prepare_kv_
from lqrl.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass
class Sides:
    """A policy, the engine that holds its weights, and what the learner needs to score with it."""

    policy: PreTrainedModel
    engine: TorchEngine
    scheme: QuantScheme
    dtype: torch.dtype
    exact: bool

    def scorer(self, temperature: float) -> Scorer:
        return Scorer(self.policy, temperature, self.dtype, kv_rounding(self.policy, self.scheme), self.exact)


def both(
    source: str | PretrainedConfig,
    scheme: str,
    dtype: torch.dtype = torch.float32,
    *,
    exact: bool = True,
    lora: Lora | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    device: str | torch.device = "cpu",
    positions: int = 128,
) -> Sides:
    parsed = QuantScheme.parse(scheme)
    policy = load_model(source, dtype=torch.float32, device=device, seed=0)
    prepare_(policy, parsed, export_dtype=dtype)
    prepare_kv_(policy, parsed)
    if lora is not None:
        add_adapters_(policy, lora, export_dtype=dtype, seed=0)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:  # zero at first, and then nothing would be tested
                values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                with torch.no_grad():
                    parameter.copy_(values * 0.2)
    if exact:
        exact_learner_(policy, dtype)
    factory = TorchEngineFactory(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    beside = lora if lora is not None and lora.refresh == "adapter" else None
    engine = factory(EngineSpec(policy.config, parsed, dtype, torch.device(device), positions, (), beside, exact))
    weights = export_weights(policy, parsed, export_dtype=dtype, adapters=beside is not None)
    engine.update_weights(weights, policy_version=0)
    return Sides(policy, engine, parsed, dtype, exact)


def prompts(count: int, longest: int, vocabulary: int, seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    return [Prompt(i, tuple(draw.randrange(vocabulary) for _ in range(n))) for i, n in enumerate(lengths)]


def compared(
    sides: Sides, asked: Sequence[Prompt], params: SamplingParams, *, rows: int, seed: int = 0
) -> tuple[int, int]:
    """Sampled tokens, and how many have other bits on the learner's side, scored ``rows`` at a time, shuffled."""
    groups = sides.engine.generate(asked, params, seed=seed)
    samples = [(p, c) for p, group in zip(asked, groups, strict=True) for c in group]
    random.Random(seed).shuffle(samples)
    scorer, device, tokens, different = sides.scorer(params.temperature), sides.engine.spec.device, 0, 0
    for start in range(0, len(samples), rows):
        part = samples[start : start + rows]
        sequences = [torch.cat([torch.tensor(p.input_ids), c.token_ids]) for p, c in part]
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(s) for s in sequences])[:, None]
        with torch.no_grad():
            scores = scorer.score(ids.to(device), mask.to(device)).cpu()
        for score, (p, c) in zip(scores, part, strict=True):
            mine = score[len(p.input_ids) :][: len(c.token_ids)]
            different += int((mine.view(torch.int32) != (c.logprobs + c.log_mass).view(torch.int32)).sum())
            tokens += len(mine)
    return tokens, different
