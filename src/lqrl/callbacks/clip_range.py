"""`ClipRangeScheduler`: clip widths, and ACR's cap, as functions of the iteration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L

from lqrl.algorithms import TokenTIS
from lqrl.learner.module import PolicyModule
from lqrl.types import ClipRange


class ClipRangeScheduler(L.Callback):
    """Move the clip range, and the cap of the truncated importance weights, linearly over the first iterations.

    The cap decides where ACR (QuRL, arXiv 2602.13953, eq. 9) begins to widen the upper bound: a token's bound is
    ``(1 + high) * max(1, rho / cap)``. As the mismatch between engine and learner grows over a run, a rising cap keeps
    the share of truncated tokens down at the price of variance. The schedule itself is lqrl's own; the paper keeps
    both constant.

    A function of the iteration alone, so a resumed run needs no state. Logged: ``clip/low``, ``clip/high`` and
    ``acr/cap``.

    Args:
        start, end: clip ranges before the first iteration and from ``iterations`` on; ``dual`` is not interpolated and
            must be equal.
        iterations: length of the schedule.
        cap_start, cap_end: the cap of `TokenTIS`, both or neither.
    """

    def __init__(
        self,
        start: ClipRange,
        end: ClipRange,
        iterations: int,
        cap_start: float | None = None,
        cap_end: float | None = None,
    ) -> None:
        if iterations < 1:
            raise ValueError(f"ClipRangeScheduler.iterations must be at least 1, got {iterations}")
        if start.dual != end.dual:
            raise ValueError(
                f"ClipRangeScheduler cannot interpolate dual ({start.dual} to {end.dual}); give both the same"
            )
        if (cap_start is None) != (cap_end is None):
            raise ValueError("ClipRangeScheduler needs both cap_start and cap_end, or neither")
        self.start, self.end, self.iterations = start, end, iterations
        self.cap_start, self.cap_end = cap_start, cap_end

    def clip_range(self, iteration: int) -> ClipRange:
        """The clip range of an iteration."""
        at = min(iteration / self.iterations, 1.0)
        return ClipRange(
            low=_between(self.start.low, self.end.low, at),
            high=_between(self.start.high, self.end.high, at),
            dual=self.start.dual,
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the values of the coming iteration."""
        assert isinstance(pl_module, PolicyModule)
        if not pl_module.loss.uses_clip_range:
            raise ValueError(
                f"{type(pl_module.loss).__name__} has clip widths of its own and does not read the clip range; remove "
                "ClipRangeScheduler"
            )
        pl_module.clip_range = self.clip_range(pl_module.iteration)
        values = {"clip/low": pl_module.clip_range.low, "clip/high": pl_module.clip_range.high}
        if self.cap_start is not None and self.cap_end is not None:
            if not isinstance(pl_module.correction, TokenTIS):
                raise ValueError(
                    f"ClipRangeScheduler schedules the cap of TokenTIS, the correction is a "
                    f"{type(pl_module.correction).__name__}; leave cap_start and cap_end out"
                )
            cap = _between(self.cap_start, self.cap_end, min(pl_module.iteration / self.iterations, 1.0))
            pl_module.correction = replace(pl_module.correction, cap=cap)
            values["acr/cap"] = cap
        pl_module.log_dict(values, batch_size=1)


def _between(start: float, end: float, at: float) -> float:
    return start + (end - start) * at
