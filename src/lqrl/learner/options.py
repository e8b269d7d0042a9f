"""Combinations of options that would compute something else than they say."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lqrl.algorithms import NoCorrection, TokenTIS
from lqrl.data.budget import UniformBudget
from lqrl.data.datamodule import PromptDataModule, prompt_data, shard
from lqrl.engines import TorchEngineFactory
from lqrl.learner.optim import BFloat16AdamW

if TYPE_CHECKING:
    from lqrl.learner.module import PolicyModule

_SMALL_LR = 1e-4

# Options of the Trainer that its automatic loop alone reads: the value that does nothing, and what a run reads instead.
_OURS: dict[str, tuple[Any, str]] = {
    "accumulate_grad_batches": (
        1,
        "an iteration's gradients are accumulated over as many passes as its tokens need: lower "
        "model.init_args.token_budget for less memory, raise data.init_args.prompts_per_iteration for larger steps",
    ),
    "gradient_clip_val": (None, "set model.init_args.max_grad_norm, the global norm that gradients are clipped to"),
    "gradient_clip_algorithm": (None, "gradients are clipped to the global norm model.init_args.max_grad_norm"),
    "overfit_batches": (0.0, "set data.init_args.train.limit, the number of prompts to train on"),
    "barebones": (False, "set trainer.logger: false, and trainer.enable_checkpointing and enable_progress_bar: false"),
    "sync_batchnorm": (False, "there is no batch norm in a language model; leave it out"),
}


def check_options(module: PolicyModule) -> None:
    """Refuse what cannot work before anything is paid for.

    Raises:
        ValueError: naming the option and what to set instead.
    """
    loss, correction = module.loss, module.correction
    check_numbers(module)
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


def check_numbers(module: PolicyModule) -> None:
    """Refuse numbers out of their range.

    Raises:
        ValueError: naming the option, its value and the range.
    """
    least = {"num_minibatches": 1, "num_epochs": 1, "token_budget": 1, "val_samples": 1, "max_staleness": 0}
    for name, bound in least.items():
        value = vars(module)[name]
        if value < bound:
            raise ValueError(f"model.init_args.{name} must be at least {bound}, got {value}")
    norm = module.max_grad_norm
    if norm is not None and not norm > 0:
        raise ValueError(
            f"model.init_args.max_grad_norm must be above 0, got {norm:g}: it is the global norm that gradients are "
            "clipped to; null does not clip"
        )


def check_run(module: PolicyModule, stage: str) -> None:
    """Refuse a Trainer, or data, that the module cannot be run with; before engines are built.

    Args:
        module: with a Trainer.
        stage: of Lightning's ``setup``.

    Raises:
        ValueError: see `check_precision`, `check_cache` and `check_data`.
        TypeError: when the Trainer of a fit has no `PromptDataModule`.
    """
    check_precision(module.trainer.precision)
    check_cache(module)
    if stage != "fit":
        return
    data = prompt_data(module.trainer)
    check_data(module, data)
    if data.awaits_feedback:
        raise ValueError(
            f"data.init_args.sampler: {type(data.sampler).__name__} learns from how its prompts went, and no callback "
            "tells it: add lqrl.callbacks.SamplerFeedback to trainer.callbacks, or set the sampler to lqrl.data.Uniform"
        )


def check_data(module: PolicyModule, data: PromptDataModule) -> None:
    """Refuse more minibatches than an iteration has rows: some would be empty, and their steps skipped.

    Raises:
        ValueError: naming both numbers.
    """
    if not isinstance(module.budget, UniformBudget):
        return  # what another budget gives is known when it is asked
    prompts, samples = data.prompts_per_iteration // shard()[1], module.budget.group_size
    if module.num_minibatches > prompts * samples:
        raise ValueError(
            f"model.init_args.num_minibatches is {module.num_minibatches}, but an iteration has {prompts * samples} "
            f"rows on a rank ({prompts} prompts, {samples} samples each): set it to {prompts * samples} at most, or "
            "raise data.init_args.prompts_per_iteration"
        )


def check_cache(module: PolicyModule) -> None:
    """Refuse a cache of the embedded engine that one of the run's samples would not fit.

    Raises:
        ValueError: naming the number to set.
    """
    data, engine = vars(module.trainer).get("datamodule"), module.engine_factory
    if not (isinstance(data, PromptDataModule) and isinstance(engine, TorchEngineFactory) and engine.kv_cache_tokens):
        return
    trainer = module.trainer
    drawn = [data.train_prompts] if trainer.state.fn == "fit" else []
    if trainer.limit_val_batches != 0:
        drawn.append(data.val_prompts)
    longest = max((len(p.input_ids) for source in drawn if source is not None for p in source.prompts), default=0)
    needed = longest + module.sampling.max_tokens
    if engine.kv_cache_tokens < needed:
        raise ValueError(
            f"model.init_args.engine.init_args.kv_cache_tokens is {engine.kv_cache_tokens}, but a sample may take "
            f"{needed} (the longest prompt has {longest} tokens, and max_tokens is {module.sampling.max_tokens}): set "
            f"it to {needed} at least, or to null"
        )


def check_trainer(options: Mapping[str, Any]) -> None:
    """Refuse options of the Trainer that have no effect here, or that Lightning refuses without saying what does.

    Args:
        options: of the Trainer, by name.

    Raises:
        ValueError: naming what to set instead.
    """
    for name, (off, instead) in _OURS.items():
        if options.get(name) not in (None, off):
            raise ValueError(f"trainer.{name}={options[name]} cannot be followed: {instead}")


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
