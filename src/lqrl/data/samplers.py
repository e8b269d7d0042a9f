"""Which prompts an iteration trains on, and what is learnt from how they went.

Samplers draw *dataset indices* and observe *prompt ids*; the mapping is fixed when a sampler is built. They know
nothing of ranks: every rank builds the same sampler, feeds it the same outcomes and draws the same indices.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class PromptSampler(Protocol):
    """Draws the prompts of each iteration.

    Attributes:
        needs_feedback: whether the draws depend on outcomes, so that an iteration without `observe` is a mistake.
    """

    needs_feedback: ClassVar[bool]

    def __len__(self) -> int:
        """Iterations an epoch."""
        ...

    def __iter__(self) -> Iterator[list[int]]:
        """Dataset indices of each iteration of one epoch; drawn when asked for, not before."""
        ...

    def draw(self, count: int, exclude: Collection[int] = ()) -> list[int]:
        """``count`` further distinct dataset indices that are not in ``exclude``."""
        ...

    def observe(self, prompt_ids: Sequence[int], successes: Sequence[float], trials: Sequence[float]) -> None:
        """Learn from the outcomes of an iteration, those of all ranks, in any order."""
        ...

    def beliefs(self, prompt_ids: Sequence[int]) -> Tensor | None:
        """``[P]`` expected success rates, or ``None`` when the sampler has no idea."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; together with the observations they fix every later draw."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was taken."""
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers to log."""
        ...


class SamplerFactory(ABC):
    """Options of a sampler; what depends on the run comes when it is built."""

    @abstractmethod
    def __call__(self, ids: Sequence[int], *, batch_size: int, iterations: int, seed: int) -> PromptSampler:
        """Build a sampler.

        Args:
            ids: stable prompt ids by dataset index.
            batch_size: prompts an iteration, over all ranks.
            iterations: iterations an epoch.
            seed: of the draws.
        """
        ...


class SeededSampler(ABC):
    """What samplers share: the index of ids, the generator, and the envelope of their state.

    Subclasses implement `draw`, and `tensors` (their state, changed in place when a state is loaded).

    Raises:
        ValueError: when the batch is larger than the dataset, ids repeat, or a number is not positive.
    """

    needs_feedback: ClassVar[bool] = False

    def __init__(self, ids: Sequence[int], *, batch_size: int, iterations: int, seed: int) -> None:
        if batch_size < 1 or iterations < 1:
            raise ValueError(f"a sampler needs batch_size and iterations >= 1, got {batch_size} and {iterations}")
        if batch_size > len(ids):
            raise ValueError(
                f"{batch_size} prompts an iteration, but the data set has {len(ids)}; lower prompts_per_iteration or "
                "add data"
            )
        self.ids = tuple(ids)
        self.index_of = {prompt_id: index for index, prompt_id in enumerate(self.ids)}
        if len(self.index_of) != len(self.ids):
            raise ValueError("prompt ids repeat; give every row its own id")
        self.batch_size = batch_size
        self.iterations = iterations
        self.iteration = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = torch.zeros(len(self.ids), dtype=torch.bool)
        self.ids_digest = hashlib.sha256(repr(self.ids).encode()).hexdigest()

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.iterations):
            indices = self.draw(self.batch_size)
            self.iteration += 1
            yield indices

    @abstractmethod
    def draw(self, count: int, exclude: Collection[int] = ()) -> list[int]:
        """``count`` distinct dataset indices that are not in ``exclude``."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The sampler's own state."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned."""

    def observe(self, prompt_ids: Sequence[int], successes: Sequence[float], trials: Sequence[float]) -> None:
        """Remember which prompts were tried; see `check_outcomes` for what is refused."""
        indices, _, tried = self.check_outcomes(prompt_ids, successes, trials)
        self.seen[indices[tried > 0]] = True

    def beliefs(self, prompt_ids: Sequence[int]) -> Tensor | None:
        """``None``."""
        return None

    def metrics(self) -> dict[str, float]:
        """``sampler/coverage``, the share of prompts tried at least once."""
        return {"sampler/coverage": self.seen.double().mean().item()}

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, copied."""
        return {
            "kind": type(self).__name__,
            "size": len(self.ids),
            "ids_digest": self.ids_digest,
            "iteration": self.iteration,
            "generator": self.generator.get_state(),
            "seen": self.seen.clone(),
            "tensors": {name: tensor.clone() for name, tensor in self.tensors().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was taken.

        Raises:
            ValueError: when the state is of another kind of sampler or of other prompts.
        """
        if state["kind"] != type(self).__name__:
            raise ValueError(
                f"the checkpoint holds the state of a {state['kind']}, this run uses a {type(self).__name__}; resume "
                "with the same sampler, or start a new run from the weights"
            )
        if state["size"] != len(self.ids) or state["ids_digest"] != self.ids_digest:
            raise ValueError(
                f"the checkpoint's sampler knows {state['size']} prompts, this run has {len(self.ids)} or other ones; "
                "resume with the same training data, or start a new run from the weights"
            )
        self.iteration = int(state["iteration"])
        self.generator.set_state(state["generator"].cpu())
        self.seen.copy_(state["seen"])
        self.load_tensors(state["tensors"])

    def check_outcomes(
        self, prompt_ids: Sequence[int], successes: Sequence[float], trials: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Dataset indices (int64), successes and trials (float64), each ``[n]``.

        Raises:
            ValueError: for an unknown or repeated prompt id, lists of different lengths, or successes outside
                ``[0, trials]``.
        """
        if not len(prompt_ids) == len(successes) == len(trials):
            raise ValueError(
                f"{len(prompt_ids)} ids, {len(successes)} successes and {len(trials)} trials; give one each"
            )
        unknown = [prompt_id for prompt_id in prompt_ids if prompt_id not in self.index_of]
        if unknown:
            raise ValueError(f"outcomes of prompts that are not in the training data: {unknown[:5]}")
        if len(set(prompt_ids)) != len(prompt_ids):
            raise ValueError("outcomes name a prompt twice; add them up before observe()")
        indices = torch.tensor([self.index_of[prompt_id] for prompt_id in prompt_ids], dtype=torch.int64)
        won, tried = torch.tensor(successes, dtype=torch.float64), torch.tensor(trials, dtype=torch.float64)
        bad = ~((won >= 0) & (won <= tried) & tried.isfinite())
        if bad.any():
            i = int(bad.nonzero()[0])
            raise ValueError(
                f"prompt {prompt_ids[i]}: {won[i].item()} successes in {tried[i].item()} trials; successes must be in "
                "[0, trials]; leave out completions that could not be scored"
            )
        return indices, won, tried

    def _check_draw(self, count: int, exclude: Collection[int]) -> set[int]:
        banned = set(exclude)
        if not 0 <= count <= len(self.ids) - len(banned):
            raise ValueError(f"cannot draw {count} of {len(self.ids)} prompts with {len(banned)} excluded")
        return banned


class UniformSampler(SeededSampler):
    """Shuffled epochs of the data without replacement, one after the other.

    A batch across the end of an epoch has no prompt twice: one that would repeat waits for the next draw.
    """

    def __init__(self, ids: Sequence[int], *, batch_size: int, iterations: int, seed: int) -> None:
        super().__init__(ids, batch_size=batch_size, iterations=iterations, seed=seed)
        self.waiting = torch.empty(0, dtype=torch.int64)

    def draw(self, count: int, exclude: Collection[int] = ()) -> list[int]:
        """The next ``count`` indices of the shuffled data that are not in ``exclude``."""
        banned = self._check_draw(count, exclude)
        drawn: list[int] = []
        skipped: list[int] = []
        waiting = self.waiting.tolist()
        position = 0
        while len(drawn) < count:
            if position == len(waiting):
                waiting += torch.randperm(len(self.ids), generator=self.generator).tolist()
            index = waiting[position]
            position += 1
            if index in banned:
                skipped.append(index)
            else:
                banned.add(index)
                drawn.append(index)
        self.waiting = torch.tensor(skipped + waiting[position:], dtype=torch.int64)
        return drawn

    def tensors(self) -> dict[str, Tensor]:
        """Indices that wait for their turn."""
        return {"waiting": self.waiting}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned."""
        self.waiting = tensors["waiting"].clone()


@dataclass(frozen=True)
class Uniform(SamplerFactory):
    """Options of `UniformSampler`; it has none."""

    def __call__(self, ids: Sequence[int], *, batch_size: int, iterations: int, seed: int) -> UniformSampler:
        """Build the sampler."""
        return UniformSampler(ids, batch_size=batch_size, iterations=iterations, seed=seed)
