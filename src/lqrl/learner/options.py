"""Combinations of options that would compute something else than they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lqrl.algorithms import NoCorrection, TokenTIS

if TYPE_CHECKING:
    from lqrl.learner.module import PolicyModule


def check_options(module: PolicyModule) -> None:
    """Refuse what cannot work before anything is paid for.

    Raises:
        ValueError: naming the option and what to set instead.
    """
    loss, correction = module.loss, module.correction
    if min(module.num_minibatches, module.num_epochs, module.token_budget, module.val_samples) < 1:
        raise ValueError("num_minibatches, num_epochs, token_budget and val_samples must be at least 1")
    if loss.corrects_mismatch and not isinstance(correction, NoCorrection):
        raise ValueError(
            f"{type(loss).__name__} weighs the rollout mismatch itself: set correction to "
            f"lqrl.algorithms.NoCorrection, not {type(correction).__name__}, or every token is weighed twice"
        )
    if not loss.accepts_clip_scale and isinstance(correction, TokenTIS) and correction.acr:
        raise ValueError(
            f"{type(loss).__name__} clips sequence ratios, ACR widens the bound of token ratios: set correction to "
            "lqrl.algorithms.SequenceTIS, or to TokenTIS with acr: false"
        )
    if module.sampling.n != 1 or module.sampling.first_sample != 0:
        raise ValueError("sampling.n and sampling.first_sample are not read here: set budget, such as UniformBudget(8)")


def check_precision(precision: str | None) -> None:
    """The Trainer must leave the forward pass alone: autocast or cast masters would part learner and engine.

    Raises:
        ValueError: for any precision but 32-true.
    """
    if precision != "32-true":
        raise ValueError(
            f"trainer.precision is {precision}, but the learner must compute as the engine does: leave it at 32-true "
            "and set model.init_args.dtype: bfloat16 (parameters stay in master_dtype)"
        )
