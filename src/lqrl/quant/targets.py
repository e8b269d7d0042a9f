"""`target_modules`: what a scheme quantizes in a model."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from torch import nn

from lqrl.quant.moe import check_layout, check_routers, holds_stacked_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.walk import walk


class LowBitLinear(nn.Module):
    """Base of what stands where an ``nn.Linear`` or stacked experts were and is neither; `target_modules` finds it."""


@runtime_checkable
class _HasOutputEmbeddings(Protocol):
    def get_output_embeddings(self) -> nn.Module | None: ...


# Last name of a linear layer that stays in high precision: other heads, and what routes tokens to experts.
_NEVER = frozenset({"lm_head", "gate", "router", "shared_expert_gate"})


def target_modules(model: nn.Module, scheme: QuantScheme) -> list[str]:
    """Names of the linear layers that ``scheme`` quantizes, in module order; learner, export and engine use this list.

    Targets are ``nn.Linear`` and what has replaced one, except the output head (unless ``scheme.lm_head``), routers
    and gates of experts (a last name of ``gate``, ``router`` or ``shared_expert_gate``, or anything inside a
    ``router``) and ``scheme.skip``. Embeddings and norms are no linear layers, adapters (``lora_A``, ``lora_B``) are
    never quantized; a layer that peft has wrapped goes by the name it had. Routed experts that are kept as stacked
    parameters are found as one module, ``mlp.experts``.

    Raises:
        ValueError: when a quantizing scheme matches no layer, a skip pattern matches none, ``scheme.lm_head`` finds
            no output head, a target looks like a router, or experts are stacked in a layout that is not supported.
    """
    if not scheme.quantizes:
        return []
    head = model.get_output_embeddings() if isinstance(model, _HasOutputEmbeddings) else None
    candidates, modules = [], {}
    for path, module in walk(model):
        name = path.removesuffix(".base_layer")  # where peft keeps a layer that it wraps
        modules[name] = module
        if not isinstance(module, (nn.Linear, LowBitLinear)) and not holds_stacked_weights(module):
            continue
        if ".lora_" in f".{name}":
            continue
        parts = name.split(".")
        wanted = scheme.lm_head if module is head else parts[-1] not in _NEVER and "router" not in parts
        if wanted:
            candidates.append(name)
    if scheme.lm_head and not isinstance(head, (nn.Linear, LowBitLinear)):
        raise ValueError(f"scheme {scheme.name!r} quantizes the output head, {type(model).__name__} has no linear one")
    for pattern in scheme.skip:
        if not any(fnmatchcase(name, pattern) for name in candidates):
            raise ValueError(
                f"skip pattern {pattern!r} of scheme {scheme.name!r} matches no linear layer; patterns match whole "
                f"module names such as {candidates[:2]}, for example '*.down_proj'"
            )
    targets = [name for name in candidates if not any(fnmatchcase(name, pattern) for pattern in scheme.skip)]
    if not targets:
        raise ValueError(
            f"scheme {scheme.name!r} matches no nn.Linear in {type(model).__name__}; loosen skip={list(scheme.skip)} "
            f"or use the scheme 'none'"
        )
    for name in targets:
        if holds_stacked_weights(modules[name]):
            check_layout(name, modules[name])
    check_routers(targets, modules)
    return targets
