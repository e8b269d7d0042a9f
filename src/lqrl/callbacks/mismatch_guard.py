"""`MismatchGuard`: watch how far the engine's policy is from the learner's."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal

import lightning as L
from torch import Tensor

from lqrl.engines.torch import TorchEngine
from lqrl.learner.divergence import divergence_of, rows_apart
from lqrl.learner.module import PolicyModule
from lqrl.learner.update import fresh_rows
from lqrl.types import TrainBatch

_LOCATED = 4  # rows that are run again, module by module


class MismatchError(RuntimeError):
    """Engine and learner have drifted apart further than the guard allows."""


class MismatchGuard(L.Callback):
    """Act when the mismatch between rollout engine and learner stays too large.

    In exact mode fresh tokens must have no mismatch at all, see `check_exact`: there one token is enough, whatever the
    limits, patience and action. Compared is what is learned from before the first optimizer step of an iteration: with
    several minibatches the tokens of the first one.

    Args:
        max_k3: largest accepted ``mismatch/k3`` (nats a token, before truncation). Dense models sit at 1e-5 to 1e-3 in
            bf16; activation quantization brings 1e-2 to 5e-2.
        min_ess: smallest accepted ``mismatch/ess`` (share of the tokens the importance weights are worth).
        patience: iterations in a row before it acts.
        action: ``warn``, ``stop`` (finish the iteration, validate, save) or ``raise``.

    Raises:
        MismatchError: with ``action="raise"``, and in exact mode; and a ValueError when the watched metrics are not
            logged at all.
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

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """In exact mode, see the log-probs of every iteration before its first step."""
        assert isinstance(pl_module, PolicyModule)
        if pl_module.exact:
            pl_module.watch = partial(check_exact, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The next Trainer may have no guard."""
        assert isinstance(pl_module, PolicyModule)
        pl_module.watch = None

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


def check_exact(module: PolicyModule, batch: TrainBatch, logprobs: Tensor) -> None:
    """Compare the learner's log-probs with the engine's, token by token.

    Args:
        module: the learner, before a step.
        batch: rows that it learns from; those of an older policy are not compared.
        logprobs: ``[B, T]`` of these rows, the learner's.

    Raises:
        MismatchError: when any differ. It names the first module where both part, see
            `lqrl.learner.divergence.divergence_of`.
    """
    compared = batch.loss_mask & fresh_rows(batch, module.policy_version)[:, None]
    apart = compared & (logprobs != batch.behavior_logprobs)
    count = int(apart.sum())
    if not count:
        return
    largest = float((logprobs - batch.behavior_logprobs)[apart].abs().max())
    raise MismatchError(
        f"exact: true, and the log-probs of {count} of {int(compared.sum())} fresh tokens in iteration "
        f"{module.iteration} differ by at most {largest:.3g}: {_located(module, batch, apart)}; set exact to false to "
        "train with the difference"
    )


def _located(module: PolicyModule, batch: TrainBatch, apart: Tensor) -> str:
    """Where engine and learner part on the tokens that differ."""
    if not isinstance(module.engine, TorchEngine):
        return f"{type(module.engine).__name__} does not show its layers' outputs"
    found = divergence_of(module.scorer, module.engine, rows_apart(batch, apart, _LOCATED))
    if found is None:
        return "scored on their own they are equal, so the learner's forward pass depends on more than its tokens"
    return f"on the first of them {found}"
