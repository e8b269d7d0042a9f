"""Engines whose rollouts are known: obvious maths instead of mocks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch

from lqrl.engines.base import Digests, NamedTensors, RolloutEngine
from lqrl.types import Completion, Prompt, RefreshReport, SamplingParams


class ScriptedEngine(RolloutEngine):
    """Answers with tokens that a function names; log-probs are those of a fair choice among ``vocab_size`` tokens.

    Args:
        script: ``(prompt, sample index) -> token ids``.
        vocab_size: see above.
    """

    def __init__(self, script: Callable[[Prompt, int], Sequence[int]], vocab_size: int = 64) -> None:
        self.script, self.vocab_size = script, vocab_size
        self.calls: list[tuple[list[int], SamplingParams, int]] = []

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int) -> list[list[Completion]]:
        """One completion a sample, cut at ``params.max_tokens``."""
        self.calls.append(([p.id for p in prompts], params, seed))
        counts = params.counts(len(prompts))
        return [
            [self._complete(p, i, params, seed) for i in range(params.first_sample, params.first_sample + n)]
            for p, n in zip(prompts, counts, strict=True)
        ]

    def _complete(self, prompt: Prompt, index: int, params: SamplingParams, seed: int) -> Completion:
        wanted = self.tokens(prompt, index, seed)
        tokens = torch.tensor(list(wanted)[: params.max_tokens], dtype=torch.long)
        return Completion(
            prompt_id=prompt.id,
            sample_index=index,
            token_ids=tokens,
            logprobs=torch.full(tokens.shape, -math.log(self.vocab_size)),
            log_mass=torch.zeros(tokens.shape),
            finish_reason="stop" if len(wanted) <= params.max_tokens else "length",
            policy_version=self.policy_version,
        )

    def tokens(self, prompt: Prompt, index: int, seed: int) -> Sequence[int]:
        """What a sample says."""
        return self.script(prompt, index)

    def update_weights(
        self, weights: NamedTensors, *, policy_version: int, frozen: Digests | None = None
    ) -> RefreshReport:
        """Count the tensors and take the version."""
        tensors = list(weights)
        self.policy_version = policy_version
        elements = sum(t.numel() for _, t in tensors)
        return RefreshReport(policy_version, len(tensors), elements, 1.0, 1.0, 0.0, "scripted")


class BernoulliEngine(ScriptedEngine):
    """Answers token 1 (right) with a known probability a prompt, else token 0: samplers and budgets without a model.

    Args:
        pass_rates: probability of token 1 by prompt id.
    """

    def __init__(self, pass_rates: Mapping[int, float]) -> None:
        super().__init__(lambda prompt, index: [0], vocab_size=2)
        self.pass_rates = pass_rates

    def tokens(self, prompt: Prompt, index: int, seed: int) -> Sequence[int]:
        """A draw that depends on seed, prompt and sample alone."""
        draw = random.Random(f"{seed}/{prompt.id}/{index}").random()
        return [int(draw < self.pass_rates[prompt.id])]
