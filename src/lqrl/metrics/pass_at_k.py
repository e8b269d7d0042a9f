"""Pass@k over prompts and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class PassAtK(Metric):
    """Mean over prompts of the chance that at least one of ``k`` completions succeeds.

    The unbiased estimator from ``c`` successes in ``n >= k`` trials, ``1 - C(n - c, k) / C(n, k)`` (Codex, arXiv
    2107.03374, eq. 1), as a product of ``k`` factors: no factorial, nothing to overflow.

    Args:
        k: completions that may be tried.

    Raises:
        ValueError: when ``k`` is below 1.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    prompts: Tensor

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"PassAtK needs k >= 1, got {k}")
        self.k = k
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("prompts", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, successes: Tensor, trials: Tensor) -> None:
        """Add prompts.

        Args:
            successes: ``[P]`` completions of each prompt that succeeded.
            trials: ``[P]`` completions of each prompt.

        Raises:
            ValueError: when a prompt has fewer trials than ``k``, or more successes than trials.
        """
        if (trials < self.k).any():
            raise ValueError(
                f"pass@{self.k} needs at least {self.k} completions a prompt, got {int(trials.min())}; "
                "raise the number of completions or lower k"
            )
        if ((successes < 0) | (successes > trials)).any():
            raise ValueError("PassAtK.update: successes must be between 0 and trials")
        if (successes != successes.round()).any():
            raise ValueError("PassAtK.update: successes must be whole; say from which score on a completion passes")
        drawn = torch.arange(self.k, device=trials.device, dtype=torch.float64)
        # The chance that draw j fails too, after j failures; one factor is 0 when there are fewer failures than draws.
        all_fail = (((trials - successes)[:, None] - drawn) / (trials[:, None] - drawn)).prod(1)
        self.total += (1 - all_fail).sum()
        self.prompts += len(trials)

    def compute(self) -> Tensor:
        """A scalar in [0, 1]; 0 before the first prompt."""
        return (self.total / self.prompts.clamp_min(1)).float()
