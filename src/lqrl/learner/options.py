"""Combinations of options that would compute something else than they say."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from lqrl.algorithms import NoCorrection, TokenTIS
from lqrl.learner.optim import BFloat16AdamW

if TYPE_CHECKING:
    from lqrl.learner.module import PolicyModule

_SMALL_LR = 1e-4


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
    if module.backward_mode != "high_precision" and not (module.aligned and module.scheme.quantizes):
        raise ValueError(
            f"backward: {module.backward_mode} belongs to aligned low-bit layers, and there are none: set aligned: "
            "true and a scheme that quantizes, or backward: high_precision"
        )
    if module.exact and not module.aligned:
        raise ValueError("exact: true needs aligned: true; a learner in full precision is another policy")
    if module.sampling.n != 1 or module.sampling.first_sample != 0:
        raise ValueError("sampling.n and sampling.first_sample are not read here: set budget, such as UniformBudget(8)")
    if module.master_dtype == torch.bfloat16 and module.lora is None:  # adapters are fp32
        warn_of_lost_steps(module.optimizer([("weight", nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))]))


def check_precision(precision: str | None) -> None:
    """The Trainer must leave the forward pass alone: autocast or cast masters would part learner and engine.

    Raises:
        ValueError: for any precision but 32-true.
    """
    if precision != "32-true":
        raise ValueError(
            f"precision is {precision}, but the learner must compute as the engine does: leave it at 32-true "
            "and set model.init_args.dtype: bfloat16 (parameters stay in master_dtype)"
        )


def warn_of_lost_steps(optimizer: torch.optim.Optimizer) -> None:
    """Say that bf16 parameters will not move, when ``optimizer`` rounds them to the nearest and its steps are small.

    A bf16 weight in ``[2^e, 2^(e+1))`` moves to its neighbor from a step of ``2^(e-8)`` on, so none above 512 steps
    does; a step of Adam is about the learning rate.
    """
    # torchao's optimizers say it in this attribute
    if isinstance(optimizer, BFloat16AdamW) or vars(optimizer).get("bf16_stochastic_round", False):
        return
    lr = max(float(group["lr"]) for group in optimizer.param_groups)
    if lr <= _SMALL_LR:
        warnings.warn(
            f"master_dtype is bfloat16 and {type(optimizer).__name__} rounds to nearest: at lr={lr:g} weights above "
            f"about {512 * lr:.1g} do not move at all; set optimizer to lqrl.learner.KahanAdamW or "
            "lqrl.learner.StochasticAdamW, or master_dtype to float32",
            stacklevel=2,
        )
