"""What a checkpoint says beside its tensors, and the refusal of one that belongs to something else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lqrl.learner.module import PolicyModule

PREFIX = "policy."


def learner_state(module: PolicyModule) -> dict[str, Any]:
    """Plain values only: Lightning resumes with ``weights_only``."""
    return {
        "policy_version": module.policy_version,
        "iteration": module.iteration,
        "scheme": module.scheme.name,
        "model_type": module.policy.config.model_type,
        "uaq_scale": module.uaq_scale,
        "seed": module.seed,
    }


def check_same_model(module: PolicyModule, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's learner state, after checking that it is a checkpoint of this model.

    Raises:
        ValueError: when the file was not written by lqrl, or its tensors are not those of the configured model.
    """
    state = checkpoint.get("lqrl")
    if state is None:
        raise ValueError("this checkpoint was not written by lqrl.learner.PolicyModule: it has no 'lqrl' state")
    ours = {n: tuple(p.shape) for n, p in module.state_dict().items() if n.startswith(PREFIX)}
    theirs = {n: tuple(p.shape) for n, p in checkpoint["state_dict"].items() if n.startswith(PREFIX)}
    odd = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if odd:
        n = odd[0]
        raise ValueError(
            f"the checkpoint is of another model: {len(odd)} tensors differ, first {n} "
            f"(checkpoint {theirs.get(n, 'absent')}, configured model {ours.get(n, 'absent')}); "
            f"set model.init_args.model to the model that wrote it (a {state['model_type']})"
        )
    for name, value in (("uaq_scale", module.uaq_scale), ("seed", module.seed)):
        if state[name] != value:
            raise ValueError(
                f"the checkpoint was written with {name}={state[name]}, the config says {value}; "
                f"resume with the run's own config.yaml, or start a new run from an exported model"
            )
    return state
