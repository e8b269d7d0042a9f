"""Which prompts an iteration trains on, and what is learnt from how they went.

Samplers draw *dataset indices* and observe *prompt ids*; the mapping is fixed when a sampler is built. They know nothing
of ranks: every rank builds the same sampler, feeds it the same outcomes and draws the same indices.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class PromptSampler(Protocol):
    """Draws the prompts of each iteration."""

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


class SamplerFactory(Protocol):
    """Options of a sampler; what depends on the run comes when it is built."""

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

    def __init__(self, ids: Sequence[int], *, batch_size: int, iterations: int, seed: int) -> None:
        if batch_size < 1 or iterations < 1:
            raise ValueError(f"a sampler needs batch_size and iterations >= 1, got {batch_size} and {iterations}")
        if batch_size > len(ids):
            raise ValueError(
                f"{batch_size} prompts an iteration, but the data set has {len(ids)}; lower prompts_per_iteration or add data"
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
            "ids_digest": self._ids_digest(),
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
                f"the checkpoint holds the state of a {state['kind']}, this run uses a {type(self).__name__}; resume with "
                "the same sampler, or start a new run from the weights"
            )
        if state["size"] != len(self.ids) or state["ids_digest"] != self._ids_digest():
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
            raise ValueError(f"prompt {prompt_ids[i]}: {won[i].item()} successes in {tried[i].item()} trials; successes "
                             "must be in [0, trials]; leave out completions that could not be scored")  # fmt: skip
        return indices, won, tried

    def _check_draw(self, count: int, exclude: Collection[int]) -> set[int]:
        banned = set(exclude)
        if not 0 <= count <= len(self.ids) - len(banned):
            raise ValueError(f"cannot draw {count} of {len(self.ids)} prompts with {len(banned)} excluded")
        return banned

    def _ids_digest(self) -> str:
        return hashlib.sha256(repr(self.ids).encode()).hexdigest()


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


class VADESampler(SeededSampler):
    """Thompson sampling of prompts that are hard but not hopeless; see `VADE`.

    Attributes:
        alpha, beta: ``[N]`` float64 pseudo-counts of success and failure by dataset index; 0 is the uniform prior.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        batch_size: int,
        iterations: int,
        seed: int,
        decay_selected: float,
        decay_unselected: float,
    ) -> None:
        super().__init__(ids, batch_size=batch_size, iterations=iterations, seed=seed)
        self.decay_selected = decay_selected
        self.decay_unselected = decay_unselected
        self.alpha = torch.zeros(len(self.ids), dtype=torch.float64)
        self.beta = torch.zeros(len(self.ids), dtype=torch.float64)
        self._last_score = 0.0

    def draw(self, count: int, exclude: Collection[int] = ()) -> list[int]:
        """The ``count`` indices with the largest ``I(p)``, ``p ~ Beta(alpha + 1, beta + 1)``."""
        banned = self._check_draw(count, exclude)
        scores = information(sample_beta(self.alpha + 1, self.beta + 1, self.generator))
        if banned:
            scores[torch.tensor(sorted(banned))] = -1.0
        order = torch.sort(scores, descending=True, stable=True).indices[:count]
        return order.tolist()

    def observe(self, prompt_ids: Sequence[int], successes: Sequence[float], trials: Sequence[float]) -> None:
        """Decay and add: ``alpha <- decay * alpha + r``, ``beta <- decay * beta + (G - r)``.

        Prompts without an outcome (or with 0 trials) only drift towards the uniform prior. One call is one iteration.
        """
        super().observe(prompt_ids, successes, trials)
        indices, won, tried = self.check_outcomes(prompt_ids, successes, trials)
        decay = torch.full_like(self.alpha, self.decay_unselected)
        decay[indices[tried > 0]] = self.decay_selected
        self.alpha = (self.alpha * decay).index_add(0, indices, won)
        self.beta = (self.beta * decay).index_add(0, indices, tried - won)

    def beliefs(self, prompt_ids: Sequence[int]) -> Tensor:
        """``[P]`` posterior means, float64."""
        indices = torch.tensor([self.index_of[prompt_id] for prompt_id in prompt_ids], dtype=torch.int64)
        return self._mean()[indices]

    def metrics(self) -> dict[str, float]:
        """Coverage; mean and spread of the posterior means; their expected score ``E[I]``."""
        mean = self._mean()
        return {
            **super().metrics(),
            "sampler/belief_mean": mean.mean().item(),
            "sampler/belief_std": mean.std(correction=0).item(),
            "sampler/expected_information": expected_information(self.alpha, self.beta).mean().item(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """The posteriors."""
        return {"alpha": self.alpha, "beta": self.beta}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned."""
        self.alpha, self.beta = tensors["alpha"].clone(), tensors["beta"].clone()

    def _mean(self) -> Tensor:
        return (self.alpha + 1) / (self.alpha + self.beta + 2)


@dataclass(frozen=True)
class Uniform:
    """Options of `UniformSampler`; it has none."""

    def __call__(self, ids: Sequence[int], *, batch_size: int, iterations: int, seed: int) -> UniformSampler:
        """Build the sampler."""
        return UniformSampler(ids, batch_size=batch_size, iterations=iterations, seed=seed)


@dataclass(frozen=True)
class VADE:
    """VADE (arXiv 2511.18902): Thompson sampling with the score ``I(p) = p (1 - p)^2`` and two-scale forgetting.

    Every prompt has a Beta posterior of its success rate. An iteration trains on the prompts with the largest ``I`` of
    one posterior draw each. Then the posteriors of the tried prompts forget fast (``decay_selected``) and take in the
    new outcomes; the others drift slowly (``decay_unselected``) back to the uniform prior. ``I`` is largest at
    ``p = 1/3``, so the sampler prefers prompts harder than even odds; until the data has been seen about once, it draws
    almost uniformly.

    Inferred: the decay values (from figures in the paper's project page) and the start at ``alpha = beta = 0``.
    Differs: fractional successes are taken as pseudo-counts.

    Attributes:
        decay_selected: lambda 1 of the paper.
        decay_unselected: lambda 2.

    Raises:
        ValueError: when a decay is outside ``[0, 1]``.
    """

    decay_selected: float = 0.2
    decay_unselected: float = 0.999

    def __post_init__(self) -> None:
        if not (0 <= self.decay_selected <= 1 and 0 <= self.decay_unselected <= 1):
            raise ValueError(f"VADE decays must be in [0, 1], got {self.decay_selected} and {self.decay_unselected}")

    def __call__(self, ids: Sequence[int], *, batch_size: int, iterations: int, seed: int) -> VADESampler:
        """Build the sampler."""
        return VADESampler(
            ids,
            batch_size=batch_size,
            iterations=iterations,
            seed=seed,
            decay_selected=self.decay_selected,
            decay_unselected=self.decay_unselected,
        )


def information(p: Tensor) -> Tensor:
    """VADE's score ``p (1 - p)^2`` of success rates ``p``; 4/27 at most, at 1/3."""
    return p * (1 - p).square()


def expected_information(alpha: Tensor, beta: Tensor) -> Tensor:
    """``E[I(p)]`` for ``p ~ Beta(a, b)``, ``a = alpha + 1``, ``b = beta + 1``: ``a b (b+1) / (s (s+1) (s+2))``."""
    a, b = alpha + 1, beta + 1
    s = a + b
    return a * b * (b + 1) / (s * (s + 1) * (s + 2))


def sample_beta(a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
    """One draw from each ``Beta(a_i, b_i)``, with ``a, b >= 1``; torch's own sampler takes no generator."""
    gammas = _sample_gamma(torch.cat([a, b]), generator)
    x, y = gammas[: len(a)], gammas[len(a) :]
    return x / (x + y)


def _sample_gamma(shape: Tensor, generator: torch.Generator) -> Tensor:
    """One draw from each ``Gamma(shape_i, 1)``, ``shape >= 1``: Marsaglia and Tsang (2000), about 1.05 rounds."""
    d = shape - 1 / 3
    c = 1 / (9 * d).sqrt()
    draws = torch.empty_like(shape)
    left = torch.arange(len(shape))
    while len(left):
        normal = torch.randn(len(left), generator=generator, dtype=shape.dtype)
        uniform = torch.rand(len(left), generator=generator, dtype=shape.dtype)
        cube = (1 + c[left] * normal).pow(3)
        positive = cube.clamp_min(torch.finfo(shape.dtype).tiny)
        bound = 0.5 * normal.square() + d[left] * (1 - cube + positive.log())
        accepted = (cube > 0) & (uniform.log() < bound)
        draws[left[accepted]] = (d[left] * cube)[accepted]
        left = left[~accepted]
    return draws
