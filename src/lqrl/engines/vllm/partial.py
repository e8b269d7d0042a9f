"""Partial rollouts: samples that are cut off, kept, and continued under the weights of a later call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lqrl.engines.sampling import sample_keys
from lqrl.engines.vllm.requests import CUT, Generated, Sample, completion, samples
from lqrl.types import Completion, Prompt, SamplingParams


@dataclass(frozen=True)
class Partial:
    """When a call to `RolloutEngine.generate_some` stops waiting for samples; the first limit that is reached counts.

    A call waits for one whole group at least, and for those that were begun ``max_lag`` versions before. Those that
    were begun earlier than that, since several refreshes came without a call between, are begun anew, and waited for.

    Attributes:
        limit_s: seconds.
        limit_fraction: share of the call's samples that are finished, those of earlier calls included.
        max_lag: most versions between the oldest token of a completion and the one that finishes it; the learner's
            ``max_staleness`` must be as large.

    Raises:
        ValueError: without a limit, or for one that is outside its range.
    """

    limit_s: float | None = None
    limit_fraction: float | None = None
    max_lag: int = 1

    def __post_init__(self) -> None:
        if self.limit_s is None and self.limit_fraction is None:
            raise ValueError("Partial needs limit_s or limit_fraction; leave partial out to wait for all samples")
        if self.limit_s is not None and not self.limit_s > 0:
            raise ValueError(f"Partial.limit_s must be above 0, got {self.limit_s}")
        if self.limit_fraction is not None and not 0 < self.limit_fraction < 1:
            raise ValueError(f"Partial.limit_fraction must be in (0, 1), got {self.limit_fraction}")
        if self.max_lag < 1:
            raise ValueError(f"Partial.max_lag must be at least 1, got {self.max_lag}; leave partial out to wait")

    def reached(self, seconds: float, finished: int, asked: int) -> bool:
        """Whether a limit is reached, ``finished`` of ``asked`` samples being done."""
        in_time = self.limit_s is None or seconds < self.limit_s
        too_few = self.limit_fraction is None or finished < math.ceil(self.limit_fraction * asked)
        return not (in_time and too_few)


@dataclass(frozen=True)
class Draft:
    """A sample as far as it has come.

    Attributes:
        sample: what is drawn.
        token_ids, logprobs: of all its tokens, in order.
        versions: of the weights that drew each of them.
        finish_reason: ``None`` while it is not finished.
    """

    sample: Sample
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: str | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """What is to be continued."""
        return (*self.sample.prompt.input_ids, *self.token_ids)

    @property
    def seed(self) -> int:
        """Of the random numbers of what follows; vLLM starts its generator anew with every request."""
        done = len(self.token_ids)
        if not done:
            return self.sample.seed
        prompt, index = torch.tensor([self.sample.prompt.id]), torch.tensor([done])
        return int(sample_keys(self.sample.seed, prompt, index)) & (2**63 - 1)

    def continued(self, more: Generated, version: int, max_tokens: int) -> Draft:
        """With ``more`` behind it, which weights of ``version`` drew; it ends at ``max_tokens``, cut off or not.

        Raises:
            RuntimeError: when log-probs are missing.
        """
        if len(more.token_ids) != len(more.logprobs):
            raise RuntimeError(
                f"vLLM gave {len(more.token_ids)} tokens and {len(more.logprobs)} log-probs for sample "
                f"{self.sample.index} of prompt {self.sample.prompt.id}; the weights or an engine option are broken"
            )
        length = len(self.token_ids) + len(more.token_ids)
        reason = more.finish_reason
        if reason == CUT:
            reason = None if length < max_tokens else "length"
        return replace(
            self,
            token_ids=(*self.token_ids, *more.token_ids),
            logprobs=(*self.logprobs, *more.logprobs),
            versions=(*self.versions, *[version] * len(more.token_ids)),
            finish_reason=reason,
        )

    def completion(self) -> Completion:
        """The record of one that is finished; see `lqrl.engines.vllm.requests.completion`."""
        generated = Generated(self.token_ids, self.logprobs, None, self.finish_reason)
        done = completion(self.sample, generated, min(self.versions, default=-1))
        mixed = len(set(self.versions)) > 1
        return replace(done, token_versions=torch.tensor(self.versions)) if mixed else done


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, and how they are drawn.

    Attributes:
        prompt: what is completed.
        params: of the call that began it.
        drafts: its samples.
    """

    prompt: Prompt
    params: SamplingParams
    drafts: tuple[Draft, ...]

    @property
    def finished(self) -> bool:
        """Whether all of its samples are."""
        return all(draft.finish_reason is not None for draft in self.drafts)

    def age(self, version: int) -> int:
        """Versions between its oldest token and weights of ``version``, which may be earlier; 0 without tokens."""
        return max((version - draft.versions[0] for draft in self.drafts if draft.versions), default=0)

    def anew(self) -> Group:
        """The same samples without tokens."""
        return replace(self, drafts=tuple(Draft(draft.sample) for draft in self.drafts))

    def plain(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        drafts = [
            {name: value for name, value in vars(draft).items() if name != "sample"}
            | {"index": draft.sample.index, "seed": draft.sample.seed}
            for draft in self.drafts
        ]
        fields = dict(self.prompt.fields)
        return {"prompt": {**vars(self.prompt), "fields": fields}, "params": asdict(self.params), "drafts": drafts}

    @staticmethod
    def of_plain(values: Mapping[str, Any]) -> Group:
        """What `plain` said."""
        prompt = Prompt(**values["prompt"])
        drafts = []
        for draft in values["drafts"]:
            more = {name: value for name, value in draft.items() if name not in ("index", "seed")}
            drafts.append(Draft(Sample(prompt, draft["index"], draft["seed"]), **more))
        return Group(prompt, SamplingParams(**values["params"]), tuple(drafts))


def enough(left: Mapping[int, int], groups: int, due: Collection[int]) -> bool:
    """Whether a call may end: a group is whole, and so are all that must be.

    Args:
        left: samples that are not finished, by the group's place.
        groups: of the call.
        due: places of those that must be whole.
    """
    return any(not left.get(i) for i in range(groups)) and not any(left.get(i) for i in due)


def begun(prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Group]:
    """Groups of samples that have no tokens yet; one a prompt."""
    remaining = iter(samples(prompts, params, seed))
    return [
        Group(prompt, replace(params, n=n), tuple(Draft(next(remaining)) for _ in range(n)))
        for prompt, n in zip(prompts, params.counts(len(prompts)), strict=True)
    ]
