"""`QuantScheme`: the one description of low precision that learner, export and engine read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn


@dataclass(frozen=True)
class TensorFormat:
    """How one kind of tensor is held in low precision; the words are those of compressed-tensors.

    Attributes:
        dtype: type of the codes.
        granularity: what shares a scale: ``channel`` (a row of the weight) or ``token`` (a row of the activations).
        dynamic: scales are computed when the tensor is used (activations), not stored beside the codes.
        symmetric: no zero point.
    """

    dtype: Literal["int8"]
    granularity: Literal["channel", "token"]
    dynamic: bool = False
    symmetric: bool = True


@dataclass(frozen=True)
class QuantScheme:
    """Which linear layers run in which format.

    A format that nothing can compute is refused where the layers are swapped (`lqrl.quant.linear.linear_method`).

    Attributes:
        name: what it is called in logs and reports.
        weight: format of the linear weights, or ``None`` for no quantization (the identity scheme).
        activation: format of the linear layers' inputs, or ``None`` for weight-only.
        skip: fnmatch patterns of module names that stay in high precision, besides those `target_modules` leaves out.
        lm_head: the output head is quantized too. Tied weights are shipped twice then: the embedding's in full
            precision, the head's as codes.

    Raises:
        ValueError: when ``activation``, ``skip`` or ``lm_head`` is set without ``weight``, since it would do nothing.
    """

    name: str
    weight: TensorFormat | None = None
    activation: TensorFormat | None = None
    skip: tuple[str, ...] = ()
    lm_head: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", tuple(self.skip))
        if self.weight is None and (self.activation is not None or self.skip or self.lm_head):
            raise ValueError(
                f"QuantScheme {self.name!r} sets activation, skip or lm_head without a weight format, which has no "
                f"effect; set weight, or use QuantScheme.preset('none')"
            )

    @property
    def quantizes(self) -> bool:
        """Whether any layer is quantized; false for the identity scheme."""
        return self.weight is not None

    @classmethod
    def preset(cls, name: str) -> QuantScheme:
        """A named scheme: ``int8_w8a8``, or ``none`` (alias ``bf16``: the engine keeps its dtype).

        ``+lm_head`` after the name quantizes the output head too: ``int8_w8a8+lm_head``.

        Raises:
            ValueError: when ``name`` is unknown, and lists the names; or an addition is.
        """
        base, *additions = name.split("+")
        if base not in PRESETS:
            raise ValueError(f"unknown quantization scheme {base!r}; use one of {', '.join(sorted(PRESETS))}")
        scheme = PRESETS[base]
        for addition in additions:
            if addition not in ADDITIONS:
                raise ValueError(f"unknown addition {addition!r} to scheme {base!r}; use one of {', '.join(ADDITIONS)}")
            scheme = replace(scheme, name=name, **ADDITIONS[addition])
        return scheme

    @classmethod
    def parse(cls, value: str | QuantScheme) -> QuantScheme:
        """A scheme from what a config holds: a preset's name, or a whole scheme.

        Raises:
            ValueError: when a name is unknown.
        """
        return value if isinstance(value, QuantScheme) else cls.preset(value)


_IDENTITY = QuantScheme("none")

PRESETS: dict[str, QuantScheme] = {
    "none": _IDENTITY,
    "bf16": _IDENTITY,
    "int8_w8a8": QuantScheme(
        "int8_w8a8",
        weight=TensorFormat("int8", "channel"),
        activation=TensorFormat("int8", "token", dynamic=True),
    ),
}


ADDITIONS: dict[str, dict[str, Any]] = {"lm_head": {"lm_head": True}}
"""What may follow a preset's name after ``+``, and the fields it sets."""


class LowBitLinear(nn.Module):
    """Base of the modules that stand where an ``nn.Linear`` was and are not one; `target_modules` finds them."""


@runtime_checkable
class _HasOutputEmbeddings(Protocol):
    def get_output_embeddings(self) -> nn.Module | None: ...


# Last name of a linear layer that stays in high precision: other heads, and what routes tokens to experts.
_NEVER = frozenset({"lm_head", "gate", "router", "shared_expert_gate"})


def target_modules(model: nn.Module, scheme: QuantScheme) -> list[str]:
    """Names of the linear layers that ``scheme`` quantizes, in module order; learner, export and engine use this list.

    Targets are ``nn.Linear`` and what has replaced one, except the output head (unless ``scheme.lm_head``), routers
    and gates of experts (a last name of ``gate``, ``router`` or ``shared_expert_gate``, or anything inside a
    ``router``) and ``scheme.skip``. Embeddings and norms are no linear layers. Expert weights kept as stacked
    parameters are not found.

    Raises:
        ValueError: when a quantizing scheme matches no layer, a skip pattern matches none, or ``scheme.lm_head`` finds
            no output head.
    """
    if not scheme.quantizes:
        return []
    head = model.get_output_embeddings() if isinstance(model, _HasOutputEmbeddings) else None
    candidates = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if not isinstance(module, (nn.Linear, LowBitLinear)):
            continue
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
    return targets
