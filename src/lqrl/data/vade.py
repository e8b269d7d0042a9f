"""VADE: prompts that are hard but not hopeless, by Thompson sampling of their success rates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lqrl.data.samplers import SamplerFactory, SeededSampler


@dataclass(frozen=True)
class VADE(SamplerFactory):
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


class VADESampler(SeededSampler):
    """Thompson sampling of prompts that are hard but not hopeless; see `VADE`.

    Attributes:
        alpha, beta: ``[N]`` float64 pseudo-counts of success and failure by dataset index; 0 is the uniform prior.
    """

    needs_feedback: ClassVar[bool] = True

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
