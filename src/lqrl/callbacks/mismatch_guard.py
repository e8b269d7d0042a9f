"""`MismatchGuard`: watch how far the engine's policy is from the learner's."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import lightning as L


class MismatchError(RuntimeError):
    """Engine and learner have drifted apart further than the guard allows."""


class MismatchGuard(L.Callback):
    """Act when the mismatch between rollout engine and learner stays too large.

    Args:
        max_k3: largest accepted ``mismatch/k3`` (nats a token, before truncation). Dense models sit at 1e-5 to 1e-3 in
            bf16; activation quantization brings 1e-2 to 5e-2.
        min_ess: smallest accepted ``mismatch/ess`` (share of the tokens the importance weights are worth).
        patience: iterations in a row before it acts.
        action: ``warn``, ``stop`` (finish the iteration, validate, save) or ``raise``.

    Raises:
        MismatchError: with ``action="raise"``; and a ValueError when the watched metrics are not logged at all.
    """

    def __init__(
        self,
        max_k3: float = 0.1,
        min_ess: float = 0.3,
        patience: int = 3,
        action: Literal["warn", "stop", "raise"] = "warn",
    ) -> None:
        self.max_k3, self.min_ess, self.patience, self.action = max_k3, min_ess, patience, action
        self.violations = 0

    @property
    def state_key(self) -> str:
        """The same for subclasses, so that they restore."""
        return "lqrl.MismatchGuard"

    def state_dict(self) -> dict[str, Any]:
        """Iterations in violation so far."""
        return {"violations": self.violations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count."""
        self.violations = int(state_dict["violations"])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judge the iteration."""
        metrics = trainer.callback_metrics
        if float(metrics.get("train/rows", 0.0)) == 0.0:
            return  # nothing was learned, so nothing was compared
        if "mismatch/k3" not in metrics or "mismatch/ess" not in metrics:
            raise ValueError("MismatchGuard: the correction logs no mismatch/k3 and mismatch/ess; remove the callback")
        k3, ess = float(metrics["mismatch/k3"]), float(metrics["mismatch/ess"])
        bad = not (k3 <= self.max_k3 and ess >= self.min_ess)
        self.violations = self.violations + 1 if bad else 0
        if self.violations < self.patience:
            return
        message = (
            f"engine and learner differ: mismatch/k3 {k3:.3g} (limit {self.max_k3:g}), mismatch/ess {ess:.3g} (limit "
            f"{self.min_ess:g}) for {self.violations} iterations; check that `aligned` is on and that the engine is "
            "refreshed, or choose a weight-only format"
        )
        if self.action == "raise":
            raise MismatchError(message)
        warnings.warn(message, stacklevel=1)
        if self.action == "stop":
            trainer.should_stop = True
