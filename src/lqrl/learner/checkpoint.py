"""What a checkpoint says beside its tensors, and the refusal of one that belongs to something else."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lqrl.learner.frozen import add_frozen_, frozen_digest
from lqrl.quant.kv import SCALE_NAMES

if TYPE_CHECKING:
    from lqrl.learner.module import PolicyModule

PREFIX = "policy."


def learner_state(module: PolicyModule) -> dict[str, Any]:
    """Plain values only: Lightning resumes with ``weights_only``."""
    return {
        "policy_version": module.policy_version,
        "iteration": module.iteration,
        "validations": [[version, dict(scores)] for version, scores in module.validation.history],
        "frozen": frozen_digest(module),
        "unfinished": module.engine.unfinished() if "engine" in vars(module) else [],
        **run_options(module),
    }


def restore_learner(module: PolicyModule, state: dict[str, Any]) -> None:
    """Set what `learner_state` said; samples that the engine had begun are given to it where there is one.

    Raises:
        ValueError: when the engine cannot continue them.
    """
    module.policy_version, module.iteration = state["policy_version"], state["iteration"]
    module.validation.history = [(version, dict(scores)) for version, scores in state["validations"]]
    if "engine" in vars(module):
        module.engine.take_up(state.get("unfinished", []))


def run_options(module: PolicyModule) -> dict[str, Any]:
    """What must not change in the middle of a run."""
    return {
        "model_type": module.policy.config.model_type,
        "scheme": module.scheme.name,
        "formats": str(module.scheme),
        "aligned": module.aligned,
        "exact": module.exact,
        "dtype": str(module.compute_dtype),
        "master_dtype": str(module.master_dtype),
        "transforms": [repr(transform) for transform in module.transforms],
        "backward": module.backward_mode,
        "lora": None if module.lora is None else str(module.lora),
        "temperature": module.sampling.temperature,
        "top_p": module.sampling.top_p,
        "top_k": module.sampling.top_k,
        "seed": module.seed,
    }


def check_checkpoint(module: PolicyModule, checkpoint: dict[str, Any], *, resumes: bool) -> dict[str, Any]:
    """The checkpoint's learner state, after `check_same_model` and, for a run that ``resumes``, `check_same_run`.

    Weights may be validated under another scheme than they were trained with. That is said in a warning.

    Raises:
        ValueError: see both.
    """
    state = check_same_model(module, checkpoint)
    if resumes:
        check_same_run(module, checkpoint)
    elif others := _other_options(module, state):
        changes = ", ".join(f"{name}={ours} (checkpoint: {theirs})" for name, (theirs, ours) in others.items())
        warnings.warn(
            f"the checkpoint was written under other options, and its weights are evaluated with {changes}",
            stacklevel=2,
        )
    return state


def _other_options(module: PolicyModule, state: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options of `run_options` that a checkpoint's learner state has otherwise: its value, and the module's."""
    others = {name: (state[name], value) for name, value in run_options(module).items() if state[name] != value}
    if "scheme" in others:
        others.pop("formats", None)  # they go with it
    return others


def check_same_model(module: PolicyModule, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's learner state, after checking that it is a checkpoint of this model.

    Frozen tensors that it leaves out are added to it, from the configured model.

    Raises:
        ValueError: when the file was not written by lqrl, it has adapters and the configured model has none (or the
            reverse), or its tensors are not those of the configured model.
    """
    state = checkpoint.get("lqrl")
    if state is None:
        raise ValueError("this checkpoint was not written by lqrl.learner.PolicyModule: it has no 'lqrl' state")
    if (state["lora"] is None) != (module.lora is None):
        fix = "set model.init_args.lora to null" if state["lora"] is None else "set model.init_args.lora to the same"
        raise ValueError(
            f"the checkpoint was written with lora={state['lora']}, the config says {module.lora}; {fix}, or "
            "resume with the run's own config.yaml"
        )
    add_frozen_(module, checkpoint)
    ours = {n: tuple(p.shape) for n, p in module.state_dict().items() if n.startswith(PREFIX)}
    theirs = {n: tuple(p.shape) for n, p in checkpoint["state_dict"].items() if n.startswith(PREFIX)}
    odd = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if odd and all(n.rpartition(".")[2] in SCALE_NAMES for n in odd):
        raise ValueError(
            f"the checkpoint was written with scheme {state['scheme']}, the config says {module.scheme.name}: one of "
            "them has calibrated scales of the key/value cache and the other has none; set model.init_args.scheme to "
            "one with the checkpoint's cache"
        )
    if odd:
        n = odd[0]
        fix = f"model to the model that wrote it (a {state['model_type']})"
        if state["lora"] not in (None, str(module.lora)):
            fix = f"lora to {state['lora']}"
        raise ValueError(
            f"the checkpoint is of another model: {len(odd)} tensors differ, first {n} "
            f"(checkpoint {theirs.get(n, 'absent')}, configured model {ours.get(n, 'absent')}); "
            f"set model.init_args.{fix}"
        )
    return state


def check_same_run(module: PolicyModule, checkpoint: dict[str, Any]) -> None:
    """Refuse to continue a run under options that change what it computes.

    Raises:
        ValueError: naming the option, or a learning-rate schedule that came or went.
    """
    state = checkpoint["lqrl"]
    others = _other_options(module, state)
    if others:
        name, (theirs, ours) = next(iter(others.items()))
        raise ValueError(
            f"the checkpoint was written with {name}={theirs}, the config says {ours}; "
            f"resume with the run's own config.yaml, or start a new run from its export"
        )
    if bool(checkpoint.get("lr_schedulers")) != (module.lr_scheduler is not None):
        raise ValueError(
            "lr_scheduler was added or removed since the checkpoint; resume with the run's own config.yaml"
        )
