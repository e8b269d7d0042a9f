"""Swap a model's linear layers, and export what the engine loads; all three follow `target_modules`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lqrl.quant.linear import AlignedLinear, LinearMethod, QuantizedLinear, linear_method
from lqrl.quant.scheme import LowBitLinear, QuantScheme, target_modules


def prepare_(model: nn.Module, scheme: QuantScheme, *, export_dtype: torch.dtype) -> list[str]:
    """Swap the learner's target layers for `AlignedLinear`, in place; parameters and their names stay.

    Args:
        model: the learner.
        scheme: the identity scheme swaps nothing.
        export_dtype: dtype of the exported weights, which is the engine's dtype.

    Returns:
        Names of the swapped layers; empty for the identity scheme.

    Raises:
        ValueError: when nothing matches, no kernel computes the scheme, or the model was swapped before.
    """
    targets = target_modules(model, scheme)
    for name in targets:
        linear = _plain_linear(model, name)
        _replace(model, name, AlignedLinear(linear, linear_method(scheme), export_dtype))
    return targets


def convert_(model: nn.Module, scheme: QuantScheme) -> list[str]:
    """Swap the engine's target layers for `QuantizedLinear`, in place.

    The layers hold the model's own weights, quantized, until others are loaded. A model on the meta device is
    converted without memory; follow with ``to_empty``.

    Returns:
        Names of the swapped layers; empty for the identity scheme.

    Raises:
        ValueError: when nothing matches, no kernel computes the scheme, or the model was swapped before.
        RuntimeError: under ``torch.inference_mode()``.
    """
    targets = target_modules(model, scheme)
    for name in targets:
        _replace(model, name, QuantizedLinear(_plain_linear(model, name), linear_method(scheme)))
    return targets


def pack_(model: nn.Module) -> int:
    """Call `QuantizedLinear.pack` on every layer that has it, after a refresh wrote the codes; returns how many."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    for layer in layers:
        layer.pack()
    return len(layers)


def _plain_linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    if isinstance(module, (AlignedLinear, LowBitLinear)) or not isinstance(module, nn.Linear):
        raise ValueError(
            f"{name} is already a {type(module).__name__}: prepare_ and convert_ take an unswapped model, once"
        )
    return module


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


@runtime_checkable
class _HasInputEmbeddings(Protocol):
    def get_input_embeddings(self) -> nn.Module: ...


def export_weights(model: nn.Module, scheme: QuantScheme, *, export_dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield everything an engine of ``scheme`` loads, in module order, under the model's state-dict names.

    A quantized layer gives ``<name>.weight`` (codes), ``<name>.weight_scale`` (fp32) and ``<name>.bias``; master
    weights are rounded to ``export_dtype`` *before* they are quantized. All other parameters and persistent buffers
    come in ``export_dtype`` (integer ones as they are). Tied parameters come once, under the input embedding's name.
    A prepared model exports the codes of its own forward; a plain one is quantized here. The identity scheme exports
    full-precision weights of a prepared model too.

    The tensors may share memory with the model: consume them before it changes.

    Raises:
        ValueError: naming the tensor that holds NaN or inf; or when the model was prepared with another dtype or
            format, or is itself an engine's.
    """
    targets = set(target_modules(model, scheme))
    method = linear_method(scheme) if targets else None
    tied_name = _embedding_name(model)
    done: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, LowBitLinear):
            raise ValueError(
                f"{prefix} holds low-bit codes: export_weights takes the learner's model, with master weights"
            )
        dot = f"{prefix}." if prefix else ""
        if method is not None and prefix in targets and isinstance(module, nn.Linear):
            codes, scale = _codes(prefix, module, method, export_dtype)
            yield f"{dot}weight", codes
            yield f"{dot}weight_scale", _finite(f"{dot}weight", scale)
            if module.bias is not None:
                yield f"{dot}bias", _finite(f"{dot}bias", module.bias.detach().to(export_dtype))
            continue
        for name, parameter in module.named_parameters(recurse=False):
            key = id(parameter)
            if key in done:
                continue
            done.add(key)
            full = tied_name.get(key, f"{dot}{name}")
            yield full, _exported(full, parameter, export_dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{dot}{name}", _exported(f"{dot}{name}", buffer, export_dtype)


def _embedding_name(model: nn.Module) -> dict[int, str]:
    """The input embedding's weight by identity: the name that tied weights are exported under."""
    if not isinstance(model, _HasInputEmbeddings):
        return {}
    embedding = model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is embedding]
    return {id(embedding.weight): f"{names[0]}.weight"} if isinstance(embedding, nn.Embedding) else {}


def _codes(name: str, linear: nn.Linear, method: LinearMethod, export_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not isinstance(linear, AlignedLinear):
        with torch.no_grad():
            return method.quantize(linear.weight.detach().to(export_dtype))
    if linear.export_dtype != export_dtype or linear.method != method:
        raise ValueError(
            f"{name} was prepared for another format or export dtype ({linear.export_dtype}) than is exported "
            f"({export_dtype}); pass prepare_ and export_weights the same scheme and dtype"
        )
    return linear.quantized_weight()


def _exported(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach()
    return _finite(name, tensor.to(dtype)) if tensor.is_floating_point() else tensor


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} holds NaN or inf in its export dtype; the update that made it must be undone")
    return tensor
