"""`SignalWatch`: a run that learned nothing says so at its end."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L

from lqrl.learner import PolicyModule
from lqrl.rewards import ExactAnswer


class SignalWatch(L.Callback):
    """Warn after the last iteration when none of them took an optimizer step: the policy is the one it began with.

    A group whose rewards are all equal has no advantage, and an iteration of such groups alone has no row to learn from
    (``train/rows`` 0). It also warns of an `ExactAnswer` whose pattern or marker no completion held. ``lqrl fit`` adds
    the callback by itself.
    """

    def __init__(self) -> None:
        self._iterations = self._stepped = self._with_rows = 0
        self._unmatched: dict[str, ExactAnswer] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count anew; what a resumed run did before is not known."""
        self._iterations = self._stepped = self._with_rows = 0
        terms = pl_module.reward.terms if isinstance(pl_module, PolicyModule) else []
        found = {term.name: term.fn for term in terms if isinstance(term.fn, ExactAnswer)}
        self._unmatched = {name: fn for name, fn in found.items() if fn.pattern or fn.after}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the iteration."""
        metrics = trainer.callback_metrics
        self._iterations += 1
        self._with_rows += float(metrics.get("train/rows", 1.0)) > 0
        self._stepped += float(metrics.get("train/grad_norm", 1.0)) > 0  # 0 where every step was skipped
        if self._unmatched and isinstance(pl_module, PolicyModule) and pl_module.last_rollouts is not None:
            texts = [completion.text for group in pl_module.last_rollouts.groups for completion in group]
            missing = {n: fn for n, fn in self._unmatched.items() if all(fn.extract(text) is None for text in texts)}
            self._unmatched = missing

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say it once."""
        if not self._iterations:
            return
        for name, fn in self._unmatched.items():
            option = f"pattern {fn.pattern!r}" if fn.pattern else f"marker (after) {fn.after!r}"
            warnings.warn(
                f"the reward {name!r} was 0 throughout: no completion of the {self._iterations} iterations held its "
                f"{option}; ask for it in the prompt, correct it, or leave it out: the whole completion is then the "
                "answer",
                stacklevel=1,
            )
        if self._stepped:
            return
        why = "no gradient was finite and above 0; lower the learning rate, or check the loss"
        if not self._with_rows:
            why = (
                "the rewards of every group were all equal (train/rows 0); look at rollout/accuracy and "
                "rollout/truncated_fraction, and whether completions hold what the reward looks for, then raise "
                "model.init_args.sampling.max_tokens, take easier or harder prompts, or draw more samples of each "
                "(model.init_args.budget)"
            )
        warnings.warn(
            f"nothing was learned: none of the {self._iterations} iterations took an optimizer step, because {why}",
            stacklevel=1,
        )
