"""All that a vLLM model computes with: parameters and buffers, and what its layers and kernels keep in attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lqrl.engines.digest import tensor_digests
from lqrl.engines.transaction import all_tensors
from lqrl.quant.walk import walk

_OWN = frozenset(vars(nn.Module()))  # attributes of every module
_SCRATCH = frozenset({"kv_cache"})  # what generation fills
# Where layers and kernels come from.
_LAYERS = ("vllm.model_executor.", "vllm.v1.attention.", "vllm.attention.", "vllm._custom_ops")
_PLAIN = (str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


class Number(NamedTuple):
    """A float that a layer keeps in an attribute, alone or as a tensor's only element, and where it can be set."""

    owner: MutableMapping[str, Any]
    key: str

    @property
    def value(self) -> float:
        """What it is."""
        return float(self.owner[self.key])

    def set(self, value: float) -> None:
        """Make it ``value``."""
        if isinstance(self.owner[self.key], Tensor):
            self.owner[self.key].fill_(value)
        else:
            self.owner[self.key] = value


class Held(NamedTuple):
    """What a model holds, by name.

    Attributes:
        tensors: parameters and buffers, tied ones once, and tensors in attributes.
        registered: names of the former.
        numbers: floats in attributes, single elements of tensors there included.
        others: integers, floats that cannot be set, and objects of compiled code, which are the same only where nothing
            made them anew.
    """

    tensors: dict[str, Tensor]
    registered: frozenset[str]
    numbers: dict[str, Number]
    others: dict[str, Any]


def all_held(model: nn.Module) -> Held:
    """What ``model`` holds.

    Attributes of modules are followed into containers, closures, and objects of vLLM's layers, kernels and attention;
    not into its configuration, its compiler or its runner. A cache of keys and values is left out.
    """
    registered = dict(all_tensors(model))
    held = Held(dict(registered), frozenset(registered), {}, {})
    modules = walk(model)
    visit = _Visit(held, {id(each) for each in [*registered.values(), *(module for _, module in modules)]})
    for prefix, module in modules:
        visit.mapping(f"{prefix}." if prefix else "", vars(module), skip=_OWN)
    return held


class _Visit:
    """A walk through attributes, each object once."""

    def __init__(self, held: Held, seen: set[int]) -> None:
        self._held, self.seen = held, seen

    def mapping(self, prefix: str, items: MutableMapping[str, Any], skip: frozenset[str] = frozenset()) -> None:
        """All that is in ``items``."""
        for key, value in list(items.items()):
            if key in skip or key in _SCRATCH:
                continue
            alone = isinstance(value, Tensor) and id(value) not in self.seen and _is_number(value)
            if isinstance(value, float) or alone:
                self._held.numbers[f"{prefix}{key}"] = Number(items, key)
            else:
                self._any(f"{prefix}{key}", value)

    def _any(self, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            return
        if isinstance(value, (bool, int, float)):
            self._held.others[name] = value
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_meta:
                self._held.tensors[name] = value
        elif isinstance(value, MutableMapping):
            self.mapping(f"{name}.", value)
        elif isinstance(value, (list, tuple)):
            for i, each in enumerate(value):
                self._any(f"{name}.{i}", each)
        elif isinstance(value, (FunctionType, MethodType)):
            self._function(name, value)
        elif type(value).__module__.startswith(_LAYERS):
            self.mapping(f"{name}.", getattr(value, "__dict__", {}))
        elif isinstance(value, torch.ScriptObject):
            self._held.others[name] = value

    def _function(self, name: str, function: FunctionType | MethodType) -> None:
        if isinstance(function, MethodType):
            self._any(f"{name}.self", function.__self__)
        elif str(function.__module__).startswith(_LAYERS):  # not what a compiler made
            for i, cell in enumerate(function.__closure__ or ()):
                try:
                    self._any(f"{name}.{i}", cell.cell_contents)
                except ValueError:  # nothing is in it yet
                    continue


def _is_number(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and tensor.is_floating_point() and not tensor.is_meta


def state_of(held: Held) -> dict[str, str]:
    """What `all_held` found, each as a text that is equal where all bits are: of tensors a digest."""
    digests = tensor_digests([in_order(tensor) for tensor in held.tensors.values()])
    state = {
        name: f"{tuple(tensor.shape)} {tensor.dtype} {value}"
        for (name, tensor), value in zip(held.tensors.items(), digests, strict=True)
    }
    state |= {name: number.value.hex() for name, number in held.numbers.items()}
    return state | {
        name: repr(value) if isinstance(value, (int, float)) else f"{type(value).__name__} at {id(value)}"
        for name, value in held.others.items()
    }


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[str]:
    """Names under which two states differ, in the order of ``a``."""
    yield from (name for name, value in a.items() if b.get(name) != value)
    yield from (name for name in b if name not in a)


def in_order(tensor: Tensor) -> Tensor:
    """A transposed matrix as it lies in memory, which is hashed without a copy."""
    return tensor.t() if tensor.dim() == 2 and tensor.t().is_contiguous() else tensor
