"""Where a model's routed experts are, in which layout, and what must not be taken for anything but a router."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

PROJECTIONS = ("gate_up_proj", "down_proj")
"""Stacked weights of routed experts: ``[E, 2 * I, H]``, gate above up, and ``[E, H, I]``."""

# Linear layers that may have as many outputs as there are experts and are no routers.
_KNOWN = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})


def holds_stacked_weights(module: nn.Module) -> bool:
    """Whether ``module`` itself has a parameter of three dimensions that is no convolution's: weights of experts."""
    # `_parameters` and no generators: a walk over all modules of a model asks this thousands of times a refresh.
    for parameter in module._parameters.values():
        if parameter is not None and parameter.ndim == 3 and min(parameter.shape) > 1:
            return not isinstance(module, _ConvNd)
    return False


def check_layout(name: str, experts: nn.Module) -> None:
    """Refuse stacked weights that are not laid out as transformers' Qwen3-MoE has them.

    Raises:
        ValueError: naming the module and how to leave it in high precision.
    """
    own: dict[str, Tensor] = dict(experts.named_parameters(recurse=False))
    children = sorted(child for child, _ in experts.named_children())
    if set(own) != set(PROJECTIONS):
        found = f"it holds {sorted(own)}"
    elif children != ["act_fn"]:
        found = f"its modules are {children}"
    else:
        gate_up, down = (own[projection] for projection in PROJECTIONS)
        count, rows, hidden = gate_up.shape
        if rows % 2 == 0 and down.shape == (count, hidden, rows // 2):
            return
        found = f"its shapes are {tuple(gate_up.shape)} and {tuple(down.shape)}"
    raise ValueError(
        f"{name} ({type(experts).__name__}) has stacked weights that cannot be quantized: {found}, supported are "
        f"gate_up_proj [E, 2I, H], down_proj [E, H, I] and act_fn, as in Qwen3-MoE; keep it in high precision with "
        f"skip=['*.{name.rpartition('.')[2]}']"
    )


def expert_counts(modules: Mapping[str, nn.Module]) -> set[int]:
    """Numbers of experts that occur in a model: of stacked weights, and of lists of modules named ``experts``."""
    counts = {
        parameter.shape[0]
        for module in modules.values()
        if holds_stacked_weights(module)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 3
    }
    lists = (m for n, m in modules.items() if n.rpartition(".")[2] == "experts" and isinstance(m, nn.ModuleList))
    return counts | {len(experts) for experts in lists}


def check_routers(targets: Iterable[str], modules: Mapping[str, nn.Module]) -> None:
    """Refuse to quantize a linear layer that has an output for each expert: it is taken for a router.

    A quantized router sends tokens to other experts than the learner's, and one that is neither skipped nor shipped
    stays as it was. Names say little about it, so the width decides; the known projections of attention and MLPs may
    have any.

    Raises:
        ValueError: naming the layer and the skip pattern that it needs.
    """
    counts = expert_counts(modules)
    for name in targets:
        module, last = modules[name], name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and module.out_features in counts and last not in _KNOWN:
            raise ValueError(
                f"{name} has {module.out_features} outputs, as many as there are experts, so it looks like a router; "
                f"routers are never quantized: add skip=['*.{last}'] to the scheme"
            )
