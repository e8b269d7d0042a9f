"""Prompts and sampling settings as requests, one a sample, and what comes back as completions.

Nothing here knows vLLM: the fields have the names of its ``SamplingParams`` and of its servers alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lqrl.engines import prompts as prompts_of_engines
from lqrl.engines.sampling import sample_keys
from lqrl.types import Completion, FinishReason, Prompt, SamplingParams

CUT = "abort"
"""vLLM's word for why a sample ended that it was told to stop."""
ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""Its words for why one ended by itself."""
_LEAST_TEMPERATURE = 0.01  # vLLM takes this one for all between 0 and it


@dataclass(frozen=True)
class Sample:
    """One completion to draw.

    Attributes:
        prompt: what to complete.
        index: which sample of that prompt.
        seed: of its random numbers, in [0, 2**63).
    """

    prompt: Prompt
    index: int
    seed: int


@dataclass(frozen=True)
class Generated:
    """What an engine says of one sample.

    Attributes:
        token_ids: sampled tokens, the stop token included.
        logprobs: of these tokens, under the distribution that they were drawn from.
        log_mass: log of the mass that truncation kept, for each token; ``None`` where nothing was truncated.
        finish_reason: vLLM's word for why it ended.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    log_mass: Sequence[float] | None
    finish_reason: str | None


def samples(prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Sample]:
    """All samples of a call, prompt by prompt; seeds depend on seed, prompt id and sample index alone.

    The keys are those of `lqrl.engines.sampling.sample_keys`; what vLLM draws from them is its own.
    """
    counts = params.counts(len(prompts))
    owners = [prompt for prompt, n in zip(prompts, counts, strict=True) for _ in range(n)]
    indices = [params.first_sample + i for n in counts for i in range(n)]
    ids = torch.tensor([prompt.id for prompt in owners], dtype=torch.int64)
    keys = sample_keys(seed, ids, torch.tensor(indices, dtype=torch.int64)) & (2**63 - 1)
    return [Sample(*drawn) for drawn in zip(owners, indices, keys.tolist(), strict=True)]


def check_prompts(
    prompts: Sequence[Prompt], params: SamplingParams, *, vocabulary: int, max_model_len: int, eos: Sequence[int]
) -> None:
    """`lqrl.engines.prompts.check_prompts`, and what vLLM would change on the way.

    Raises:
        ValueError: see there; and for a temperature that vLLM replaces by another.
    """
    prompts_of_engines.check_prompts(prompts, params, vocabulary=vocabulary, max_model_len=max_model_len, eos=eos)
    if 0 < params.temperature < _LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature={params.temperature}: vLLM samples at {_LEAST_TEMPERATURE} below that; use 0 for greedy"
        )


def sampling_fields(params: SamplingParams, eos: Sequence[int]) -> dict[str, Any]:
    """The sampling settings that all samples of a call share, in vLLM's words; truncation is left out.

    vLLM's own end-of-sequence token is switched off, and ours are stop tokens: they come from one place, `EngineSpec`.
    """
    stops = () if params.ignore_eos else eos
    return {
        "n": 1,
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "stop_token_ids": list(dict.fromkeys((*stops, *params.stop_token_ids))),
        "ignore_eos": True,
        "logprobs": 0,  # the sampled token's alone
    }


def completion(sample: Sample, generated: Generated, policy_version: int) -> Completion:
    """The record of one sample.

    Raises:
        RuntimeError: when it was not finished, a log-prob is missing or NaN.
    """
    reason = ENDS.get(generated.finish_reason or "")
    if reason is None:
        raise RuntimeError(
            f"vLLM ended sample {sample.index} of prompt {sample.prompt.id} with {generated.finish_reason!r}, neither "
            "'stop' nor 'length'; see its log"
        )
    length = len(generated.token_ids)
    logprobs = torch.tensor(generated.logprobs, dtype=torch.float32)
    if length == 0 or len(logprobs) != length or bool(logprobs.isnan().any()):
        raise RuntimeError(
            f"vLLM gave {length} tokens and {len(logprobs)} log-probs for sample {sample.index} of prompt "
            f"{sample.prompt.id}, or NaN among them; the weights or an engine option are broken"
        )
    return Completion(
        prompt_id=sample.prompt.id,
        sample_index=sample.index,
        token_ids=torch.tensor(generated.token_ids, dtype=torch.int64),
        logprobs=logprobs,
        log_mass=torch.zeros(length) if generated.log_mass is None else torch.tensor(generated.log_mass),
        finish_reason=reason,
        policy_version=policy_version,
    )


def grouped(completions: Sequence[Completion], counts: Sequence[int]) -> list[list[Completion]]:
    """Completions in the order of `samples`, one list a prompt."""
    remaining = iter(completions)
    return [[next(remaining) for _ in range(n)] for n in counts]
