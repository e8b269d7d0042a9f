"""One round of rollouts: generate, decode, score, and (DAPO) refill the groups that teach nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from lqrl.data.budget import RolloutBudget
from lqrl.engines.base import RolloutEngine, StaleEngineError
from lqrl.phases import phase
from lqrl.rewards.base import RewardSum
from lqrl.rollouts.batching import pad_rollouts
from lqrl.types import Completion, Prompt, RolloutBatch, SamplingParams

Decode = Callable[[Sequence[int]], str]
DrawMore = Callable[[int], "list[Prompt] | None"]
Beliefs = Callable[[Sequence[int]], "Tensor | None"]


@dataclass(frozen=True)
class Refill:
    """DAPO's dynamic sampling (arXiv 2503.14476): replace groups whose rewards are all equal by fresh prompts.

    A group is judged by the raw accuracy, not the shaped reward: a length bonus breaks ties without teaching anything.

    Attributes:
        max_rounds: most generation rounds of an iteration, the first included; a hard cap.
        on_exhausted: what to do when the cap is reached with groups still missing.

    Differs from the paper: only the missing prompts are drawn (the paper draws three batches at once and truncates).
    """

    max_rounds: int = 4
    on_exhausted: Literal["raise", "train_partial"] = "train_partial"

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ValueError(f"Refill.max_rounds must be at least 1, got {self.max_rounds}")

    def check_exhausted(self, missing: int, wanted: int, rounds: int) -> None:
        """Raise a RuntimeError if told to, when ``missing`` of ``wanted`` groups have no signal after ``rounds``."""
        if self.on_exhausted == "raise":
            raise RuntimeError(
                f"{missing} of {wanted} groups still have equal rewards after {rounds} rounds; "
                "raise Refill.max_rounds, choose easier or harder prompts, or set on_exhausted: train_partial"
            )


@dataclass
class Rollouts:
    """What `collect` returns.

    Attributes:
        batch: the groups that are trained on, padded.
        prompts, groups: the same on the host, with texts.
        outcomes: ``(prompt id, successes, trials)`` of every generated group, those given up by refill included.
        rounds: generation rounds.
        generated_groups, generated_tokens: what was paid for, given-up groups included.
        seconds: wall time of ``generate`` and of scoring.
    """

    batch: RolloutBatch
    prompts: list[Prompt]
    groups: list[list[Completion]]
    outcomes: list[tuple[int, float, int]]
    rounds: int
    generated_groups: int
    generated_tokens: int
    seconds: dict[str, float] = field(default_factory=dict)


def check_fresh(engine: RolloutEngine, policy_version: int, max_staleness: int) -> None:
    """Refuse an engine whose weights are older than allowed.

    Raises:
        StaleEngineError: when the engine lags more than ``max_staleness`` versions, or never got weights.
    """
    if engine.policy_version < 0:
        raise StaleEngineError(
            "the engine holds no weights (no refresh yet, or the last one failed); "
            "add lqrl.callbacks.EngineRefresh to trainer.callbacks"
        )
    lag = policy_version - engine.policy_version
    if lag < 0:
        raise StaleEngineError(
            f"the engine serves policy version {engine.policy_version}, the learner is back at {policy_version}: "
            "an older checkpoint was loaded; refresh the engine (lqrl.callbacks.EngineRefresh) before generating"
        )
    if lag > max_staleness:
        raise StaleEngineError(
            f"the engine serves policy version {engine.policy_version}, the learner is at {policy_version} "
            f"(max_staleness={max_staleness}); add lqrl.callbacks.EngineRefresh to trainer.callbacks, "
            "or raise max_staleness if stale rollouts are intended"
        )


def collect(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    reward: RewardSum,
    *,
    decode: Decode,
    budget: RolloutBudget,
    pad_token_id: int,
    seed: int,
    refill: Refill | None = None,
    draw_more: DrawMore | None = None,
    beliefs: Beliefs | None = None,
    oldest_version: int | None = None,
) -> Rollouts:
    """Generate and score completions of ``prompts``, refilling groups without a signal if asked to.

    Args:
        engine: a fresh engine (`check_fresh`), which is awake afterwards.
        prompts: the iteration's prompts on this rank.
        params: sampling settings; ``n`` is replaced by what ``budget`` says.
        reward: scores whole groups.
        decode: token ids to text.
        budget: completions of each prompt.
        pad_token_id: fills the padded columns.
        seed: of this iteration; a sample's draw is a function of it, the prompt's id and the sample's index.
        refill: dynamic sampling, off when ``None``.
        draw_more: draws that many fresh prompts; called by every rank in every round (it may be collective), and
            returns ``None`` when no rank needs more.
        beliefs: expected success rates of prompts, for budgets that differ by prompt.
        oldest_version: take what the engine has finished (`RolloutEngine.generate_some`), groups that an earlier call
            began included, if no token is of an older version. ``None`` takes all groups of ``prompts`` and no other.

    Raises:
        RewardError: when a reward raises or returns something unusable.
        StaleEngineError: for tokens that are older than ``oldest_version``.
        RuntimeError: when refill is exhausted and told to raise.
    """
    engine.wake()
    wanted, generated, pending = len(prompts), list[_Scored](), list(prompts)
    seconds, rounds = {"generate": 0.0, "reward": 0.0}, 0
    while True:
        rounds += 1
        ids = [p.id for p in pending]
        counts = budget(ids, beliefs(ids) if beliefs is not None else None)
        if pending:
            sampling = replace(params, n=tuple(counts))
            generated += _round(engine, pending, sampling, reward, decode, seed, oldest_version, seconds)
        missing = max(0, wanted - sum(refill is None or s.informative for s in generated))
        if refill is None or draw_more is None or rounds >= refill.max_rounds:
            break
        if (more := draw_more(missing)) is None:
            break
        pending = more
    if missing and refill is not None:
        refill.check_exhausted(missing, wanted, rounds)
    # Groups without a signal fill the places nobody else took, so that a batch is never empty or of another size.
    final = [s for s in generated if refill is None or s.informative]
    final += [s for s in generated if refill is not None and not s.informative][:missing]
    return _join(final, generated, reward, pad_token_id, rounds, seconds)


@dataclass
class _Scored:
    prompt: Prompt
    completions: list[Completion]
    rewards: Tensor
    terms: Tensor
    accuracy: Tensor

    @property
    def scores(self) -> Tensor:
        """Accuracies that could be judged."""
        return self.accuracy[~self.accuracy.isnan()]

    @property
    def informative(self) -> bool:
        return len(self.scores) > 0 and bool(self.scores.max() > self.scores.min())

    @property
    def outcome(self) -> tuple[int, float, int]:
        return self.prompt.id, float(self.scores.sum()), len(self.scores)


def _round(
    engine: RolloutEngine,
    asked: list[Prompt],
    params: SamplingParams,
    reward: RewardSum,
    decode: Decode,
    seed: int,
    oldest_version: int | None,
    seconds: dict[str, float],
) -> list[_Scored]:
    started = time.perf_counter()
    with phase("generate"):
        if oldest_version is None:
            prompts, drawn = asked, engine.generate(asked, params, seed=seed)
        else:
            some = engine.generate_some(asked, params, seed=seed)
            prompts, drawn = [prompt for prompt, _ in some], [group for _, group in some]
            _check_tokens_fresh(drawn, oldest_version)
    if not prompts:
        return []
    generated = time.perf_counter()
    with phase("reward"):
        groups = [[replace(c, text=decode(c.token_ids.tolist())) for c in group] for group in drawn]
        output = reward.score(prompts, groups)
    seconds["generate"] += generated - started
    seconds["reward"] += time.perf_counter() - generated
    sizes = [len(g) for g in groups]
    parts = zip(output.rewards.split(sizes), output.terms.split(sizes), output.accuracy.split(sizes), strict=True)
    return [_Scored(p, g, *part) for p, g, part in zip(prompts, groups, parts, strict=True)]


def _check_tokens_fresh(groups: list[list[Completion]], oldest_version: int) -> None:
    found = min((c.policy_version for group in groups for c in group), default=oldest_version)
    if found < oldest_version:
        raise StaleEngineError(
            f"the engine finished rollouts that policy version {found} began, the oldest allowed is {oldest_version}; "
            f"raise max_staleness by {oldest_version - found}, or lower the engine's partial.max_lag"
        )


def _join(
    scored: list[_Scored],
    generated: list[_Scored],
    reward: RewardSum,
    pad_token_id: int,
    rounds: int,
    seconds: dict[str, float],
) -> Rollouts:
    prompts, groups = [s.prompt for s in scored], [s.completions for s in scored]
    names = tuple(reward.names)
    batch = pad_rollouts(
        prompts,
        groups,
        rewards=torch.cat([s.rewards for s in scored]) if scored else torch.zeros(0),
        reward_terms=torch.cat([s.terms for s in scored]) if scored else torch.zeros(0, len(names)),
        accuracy=torch.cat([s.accuracy for s in scored]) if scored else torch.zeros(0),
        term_names=names,
        pad_token_id=pad_token_id,
    )
    outcomes = [s.outcome for s in generated]
    tokens = sum(len(c.token_ids) for s in generated for c in s.completions)
    return Rollouts(batch, prompts, groups, outcomes, rounds, len(outcomes), tokens, seconds)
