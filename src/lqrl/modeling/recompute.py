"""Activation checkpointing: a layer keeps its input alone, and its backward pass runs the forward pass again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Context = contextlib.AbstractContextManager[None]


def recompute_layers_(model: PreTrainedModel) -> int:
    """Checkpoint every decoder layer of ``model`` while it trains, in place.

    What ``gradient_checkpointing_enable`` of transformers does with ``use_reentrant=False``, and one thing more: under
    ``torch.func.functional_call`` the second forward pass gets the tensors that the first had in place of parameters.
    The gradients are those without checkpointing, bit for bit where the kernels repeat their bits.

    Returns:
        How many layers are checkpointed.

    Raises:
        NotImplementedError: when the model has decoder layers that transformers cannot checkpoint.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(layers) < wanted:
        raise NotImplementedError(
            f"{type(model).__name__}: {len(layers)} of {wanted} layers are transformers' GradientCheckpointingLayer, "
            "the others cannot be checkpointed; set activation_checkpointing: false and a smaller token_budget"
        )
    for layer in layers:  # the two attributes that the class documents; the method's name differs between versions
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_checkpointed, layer)  # type: ignore[assignment]
    return len(layers)


def _checkpointed(layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: _contexts(layer))


def _contexts(layer: nn.Module) -> tuple[Context, Context]:
    """Of the first forward pass and of its repetition."""
    return contextlib.nullcontext(), _StandIns(layer)


class _StandIns(Context):
    """Puts the tensors that stand in for a layer's parameters when it is made back in their places."""

    def __init__(self, layer: nn.Module) -> None:
        self.stand_ins = [
            (module._parameters, name, tensor)
            for module in layer.modules()
            for name, tensor in module._parameters.items()
            if tensor is not None and not isinstance(tensor, nn.Parameter)
        ]
        self.before: list[Tensor | None] = []

    def __enter__(self) -> None:
        self.before = [places[name] for places, name, _ in self.stand_ins]
        for places, name, tensor in self.stand_ins:
            places[name] = tensor  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        for (places, name, _), tensor in zip(self.stand_ins, self.before, strict=True):
            places[name] = tensor  # type: ignore[assignment]
