"""Records that flow through one RL iteration, and the glossary of shapes.

Shapes:

    P   prompts of an iteration
    B   completions of an iteration, ``B = sum(n_i)``; ``n_i`` may differ per prompt
    T   columns: prompt, then completion, then right padding
    K   reward terms
    V   vocabulary

Every ``[B, T]`` column ``t`` speaks of token ``t``: ``logprobs[:, t]`` is the log-probability of ``input_ids[:, t]``
given the tokens before it. Column 0 has no predecessor, holds 0 and is never trained. There are no ``T - 1`` tensors.

Every log-probability is named by whose it is:

    rollout_logprobs   the engine's, of what it sampled with: after temperature, top-k and top-p
    old_logprobs       the learner's before the update (the proximal policy)
    logprobs           the learner's now
    ref_logprobs       the reference model's
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]

_LEAST_TEMPERATURE = 1e-30  # float32 holds logits of up to 1e8 divided by it


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt.

    Attributes:
        id: stable identity of the row; samplers, seeds and resume are keyed by it.
        input_ids: prompt tokens, at least one.
        text: what was tokenised.
        answer: the reference answer, if the task has one.
        fields: the remaining columns of the row, for rewards that need more than ``answer``.
        where: file and line, or data set and number, of the row; for messages.

    Raises:
        ValueError: for an id that does not fit 64 bits.
    """

    id: int
    input_ids: tuple[int, ...]
    text: str = ""
    answer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def __post_init__(self) -> None:
        if not -(2**63) <= self.id < 2**63:
            raise ValueError(f"Prompt.id must fit 64 bits, got {self.id}; take a hash of what identifies the row")


@dataclass
class PromptBatch:
    """The prompts of one iteration on one rank; ragged and on the host."""

    prompts: list[Prompt]

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def to(self, *_: Any, **__: Any) -> PromptBatch:
        """Return itself: prompts stay on the host (Lightning moves every batch that has ``to``)."""
        return self


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn; the names are vLLM's.

    Attributes:
        n: completions a prompt, one number or one for each prompt.
        temperature: divides the logits, in float32; 0 is greedy (log-probs are then those of temperature 1).
        top_p: smallest set of tokens with at least this mass; 1 keeps all.
        top_k: this many most likely tokens; 0 keeps all.
        max_tokens: most new tokens of a completion.
        stop_token_ids: end a completion in addition to the model's EOS; the stop token is part of the completion.
        ignore_eos: sample on after EOS (benchmarks).
        first_sample: index of the first sample; a second draw for the same prompt starts where the first ended.

    Raises:
        ValueError: when a value is outside its range.
    """

    n: int | tuple[int, ...] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    first_sample: int = 0

    def __post_init__(self) -> None:
        counts = (self.n,) if isinstance(self.n, int) else tuple(self.n)
        if any(n < 1 for n in counts):
            raise ValueError(f"SamplingParams.n must be at least 1, got {self.n}")
        if self.temperature != 0 and not _LEAST_TEMPERATURE <= self.temperature <= 1 / _LEAST_TEMPERATURE:
            raise ValueError(
                f"SamplingParams.temperature must be 0 or between {_LEAST_TEMPERATURE:g} and "
                f"{1 / _LEAST_TEMPERATURE:g}, got {self.temperature}; use 0 for greedy"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p must be in (0, 1], got {self.top_p}; use 1 to keep every token")
        if self.top_k < 0:
            raise ValueError(f"SamplingParams.top_k must be >= 0, got {self.top_k}; use 0 to keep every token")
        if self.max_tokens < 1:
            raise ValueError(f"SamplingParams.max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.first_sample <= 2**63 - max(counts, default=0):
            raise ValueError(
                f"SamplingParams.first_sample must be at least 0 and its samples must fit 64 bits, got "
                f"{self.first_sample}; 0 is the first sample"
            )

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p removes tokens from the distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    def counts(self, prompts: int) -> list[int]:
        """Completions for each of ``prompts`` prompts.

        Raises:
            ValueError: when ``n`` lists another number of prompts.
        """
        if isinstance(self.n, int):
            return [self.n] * prompts
        if len(self.n) != prompts:
            raise ValueError(f"SamplingParams.n lists {len(self.n)} counts for {prompts} prompts")
        return list(self.n)


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        prompt_id: the prompt's stable id.
        sample_index: which sample of that prompt; with the seed it fixes the draw.
        token_ids: ``[L]`` int64 on the host, stop token included.
        logprobs: ``[L]`` float32, the engine's processed log-probs of ``token_ids``.
        log_mass: ``[L]`` float32, log of the probability mass that top-k/top-p kept; 0 without truncation. The
            untruncated log-prob is ``logprobs + log_mass``.
        finish_reason: ``stop`` (EOS or stop token) or ``length``.
        policy_version: version of the weights that sampled it, the oldest of several.
        text: decoded tokens; filled in by ``rollouts.collect``.
        token_versions: ``[L]`` int64, version of the weights that sampled each token of a completion that was continued
            under newer ones; ``None`` where ``policy_version`` sampled all.
    """

    prompt_id: int
    sample_index: int
    token_ids: Tensor
    logprobs: Tensor
    log_mass: Tensor
    finish_reason: FinishReason
    policy_version: int
    text: str = ""
    token_versions: Tensor | None = None


class Ratio(NamedTuple):
    """A mean that is still a sum and a count, so that micro-batches and ranks add up exactly."""

    total: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride] - a tuple's count() is never wanted here

    def __add__(self, other: object) -> Ratio:
        if not isinstance(other, Ratio) or isinstance(other, Maximum):
            return NotImplemented
        return Ratio(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Tensor:
        """The mean; 0 when nothing was counted."""
        return self.total / self.count.clamp_min(1e-12)


class Maximum(Ratio):
    """The largest of some values, of which micro-batches and ranks keep the largest.

    Attributes:
        total: the largest; of none, minus infinity.
        count: 1; of none, 0.
    """

    __slots__ = ()

    def __add__(self, other: object) -> Maximum:
        if not isinstance(other, Maximum):
            return NotImplemented
        return Maximum(torch.maximum(self.total, other.total), torch.maximum(self.count, other.count))

    @property
    def value(self) -> Tensor:
        """The largest; 0 of none."""
        return torch.where(self.count > 0, self.total, 0)


class _Rows:
    """Row selection and device moves shared by the ``[B, ...]`` records."""

    def _map(self, fn: Any) -> Any:
        changes = {f.name: fn(v) for f in dataclasses.fields(self) if isinstance(v := getattr(self, f.name), Tensor)}  # type: ignore[arg-type]
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def rows(self, index: Tensor) -> Any:
        """The same record with only the rows of ``index`` (int64 or bool ``[B]``)."""
        return self._map(lambda x: x[index.to(x.device)])

    def to(self, device: torch.device | str) -> Any:
        """The same record on ``device``."""
        return self._map(lambda x: x.to(device, non_blocking=True))


@dataclass
class RolloutBatch(_Rows):
    """What happened: completions of all prompts, padded.

    Attributes:
        input_ids: ``[B, T]`` int64, prompt then completion, right-padded.
        attention_mask: ``[B, T]`` bool, true on prompt and completion.
        completion_mask: ``[B, T]`` bool, true on sampled tokens.
        rollout_logprobs: ``[B, T]`` float32, 0 outside the completion.
        rollout_log_mass: ``[B, T]`` float32, see ``Completion.log_mass``.
        rewards: ``[B]`` float32, weighted sum of the terms.
        reward_terms: ``[B, K]`` float32, unweighted.
        accuracy: ``[B]`` float32, the raw success signal (not shaped by length or format); what samplers learn from.
        prompt_ids: ``[B]`` int64, stable ids.
        group_ids: ``[B]`` int64; rows of one group share a baseline.
        sample_index: ``[B]`` int64.
        truncated: ``[B]`` bool, ended by length.
        policy_versions: ``[B]`` int64, of each row's oldest token.
        term_names: names of the K columns of ``reward_terms``.
        token_versions: ``[B, T]`` int64, version of the weights that sampled each token, -1 outside the completion; or
            ``None`` in a batch made by hand.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    rollout_logprobs: Tensor
    rollout_log_mass: Tensor
    rewards: Tensor
    reward_terms: Tensor
    accuracy: Tensor
    prompt_ids: Tensor
    group_ids: Tensor
    sample_index: Tensor
    truncated: Tensor
    policy_versions: Tensor
    term_names: tuple[str, ...] = ()
    token_versions: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> Tensor:
        """``[B]`` completion lengths."""
        return self.completion_mask.sum(1)


@dataclass
class Advantages:
    """Credit, and what is not worth a forward pass.

    Attributes:
        values: ``[B]`` or ``[B, T]`` float32.
        keep: ``[B]`` bool; rows that are trained on.
        token_keep: ``[B, T]`` bool or ``None`` for all tokens.
        metrics: plain numbers to log.
    """

    values: Tensor
    keep: Tensor
    token_keep: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class TrainBatch(_Rows):
    """What to learn: the kept rows, and what the losses read.

    Attributes:
        input_ids, attention_mask, rollout_logprobs, rollout_log_mass, group_ids: as in ``RolloutBatch``.
        prompt_ids, policy_versions, token_versions: as in ``RolloutBatch``, or ``None`` in a batch made by hand.
        loss_mask: ``[B, T]`` bool; tokens that are trained. Every denominator counts these unless it says otherwise.
        advantages: ``[B, T]`` float32.
        old_logprobs: ``[B, T]`` float32 or ``None`` before the proximal pass.
        ref_logprobs: ``[B, T]`` float32 or ``None`` without a reference.
        correction_weights: ``[B, T]`` float32 detached, or ``None``; multiplies each token's (or sequence's) objective.
        clip_scale: ``[B, T]`` float32 detached, >= 1, or ``None``; ACR's ``1 / r_t``, widens the upper clip bound.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    rollout_log_mass: Tensor
    group_ids: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    correction_weights: Tensor | None = None
    clip_scale: Tensor | None = None
    prompt_ids: Tensor | None = None
    policy_versions: Tensor | None = None
    token_versions: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def behavior_logprobs(self) -> Tensor:
        """``[B, T]`` the engine's log-probs before top-k/top-p, comparable with the learner's full distribution."""
        return self.rollout_logprobs + self.rollout_log_mass


@dataclass(frozen=True)
class ClipRange:
    """Clip widths of the policy ratio; ``low`` and ``high`` are distances from 1, ``dual`` the dual-clip constant.

    Raises:
        ValueError: when a width is negative or ``dual`` is not above 1.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < 0:
            raise ValueError(f"ClipRange widths must be >= 0, got low={self.low}, high={self.high}")
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"ClipRange.dual must be above 1, got {self.dual}; use null to switch the dual clip off")


@dataclass
class LossOutput:
    """A scalar to differentiate, and sums to log."""

    loss: Tensor
    metrics: dict[str, Ratio] = field(default_factory=dict)


@dataclass(frozen=True)
class RefreshReport:
    """What one refresh of the engine did.

    Attributes:
        policy_version: the version that now serves.
        tensors, elements: how much was written; with ``frozen_elements`` it is what the engine holds, or the refresh
            has failed.
        elements_changed_fraction: share of unquantized elements whose bits changed.
        codes_changed_fraction: share of low-bit codes that changed (0 when the scheme has none).
        seconds: wall time.
        digest: digest of all parameters and buffers after the refresh.
        frozen_elements: how much was not sent, and found by its digest to be what the engine held already.
    """

    policy_version: int
    tensors: int
    elements: int
    elements_changed_fraction: float
    codes_changed_fraction: float
    seconds: float
    digest: str
    frozen_elements: int = 0
