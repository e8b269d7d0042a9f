"""Swap a model's linear layers for those of the learner or of the engine; both follow `target_modules`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import nn

from lqrl.quant.codes import CodeModule
from lqrl.quant.experts import AlignedExperts, QuantizedExperts, check_experts
from lqrl.quant.linear import AlignedLinear, BackwardMode, QuantizedLinear
from lqrl.quant.methods import LinearMethod, linear_method
from lqrl.quant.numerics import shared_amax
from lqrl.quant.scheme import PRESETS, QuantScheme
from lqrl.quant.targets import LowBitLinear, target_modules
from lqrl.quant.walk import walk

_SMALLEST_GROUPS = "int4_w4a16_g32"  # a preset whose groups divide most widths

# Last names of the layers of a block that engines run as one product; some formats give these one scale.
_FUSED = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))


def sibling_groups(names: Sequence[str]) -> list[list[str]]:
    """``names`` in groups that engines fuse (q, k, v; gate, up, of one parent); others stand alone."""
    groups: dict[tuple[str, object], list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        fused = next((i for i, siblings in enumerate(_FUSED) if last in siblings), name)
        groups.setdefault((parent, fused), []).append(name)
    return list(groups.values())


def prepare_(
    model: nn.Module, scheme: QuantScheme, *, export_dtype: torch.dtype, backward: BackwardMode = "high_precision"
) -> list[str]:
    """Swap the learner's target layers for `AlignedLinear` and `AlignedExperts`, in place; parameters keep their names.

    Args:
        model: the learner.
        scheme: the identity scheme swaps nothing.
        export_dtype: dtype of the exported weights, which is the engine's dtype.
        backward: see `AlignedLinear`.

    Returns:
        Names of the swapped layers; empty for the identity scheme.

    Raises:
        ValueError: when nothing matches, no kernel computes the scheme, or the model was swapped before.
    """
    targets = target_modules(model, scheme)
    if not targets:
        return targets
    method = linear_method(scheme)
    _check_shapes(model, targets, method, scheme)
    layers: dict[str, AlignedLinear] = {}
    for name in targets:
        module = _unswapped(model, name)
        if isinstance(module, nn.Linear):
            layers[name] = AlignedLinear(module, method, export_dtype, backward)
            model.set_submodule(name, layers[name])
        else:
            model.set_submodule(name, AlignedExperts(module, method, export_dtype, backward))
    if method.shares_amax:
        for group in sibling_groups(list(layers)):
            for name in group:
                layers[name].share_scale([layers[sibling] for sibling in group])
    return targets


def convert_(model: nn.Module, scheme: QuantScheme) -> list[str]:
    """Swap the engine's target layers for `QuantizedLinear` and `QuantizedExperts`, in place.

    The layers hold the model's own weights, quantized, until others are loaded. A model on the meta device is
    converted without memory; follow with ``to_empty``.

    Returns:
        Names of the swapped layers; empty for the identity scheme.

    Raises:
        ValueError: when nothing matches, no kernel computes the scheme, or the model was swapped before.
        RuntimeError: under ``torch.inference_mode()``.
    """
    targets = target_modules(model, scheme)
    if not targets:
        return targets
    method = linear_method(scheme)
    _check_shapes(model, targets, method, scheme)
    for group in sibling_groups(targets):
        modules = {name: _unswapped(model, name) for name in group}
        linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
        shares = method.shares_amax and linears
        amax = shared_amax([linear.weight.detach() for linear in linears.values()]) if shares else None
        for name, linear in linears.items():
            model.set_submodule(name, QuantizedLinear(linear, method, amax))
        for name in modules.keys() - linears.keys():
            model.set_submodule(name, QuantizedExperts(modules[name], method))
    return targets


def _check_shapes(model: nn.Module, targets: list[str], method: LinearMethod, scheme: QuantScheme) -> None:
    """Quantize one row of each width, so that a width that the format cannot hold is known before anything is swapped.

    Raises:
        ValueError: naming a layer of each such width and what to do about all of them.
    """
    refused: dict[int, ValueError] = {}
    names: dict[int, list[str]] = {}
    for name in targets:
        module = _unswapped(model, name)
        if not isinstance(module, nn.Linear):
            check_experts(name, module, method)
            continue
        names.setdefault(module.in_features, []).append(name)
    for width in names:
        try:
            method.quantize(torch.zeros(1, width))
        except ValueError as error:
            refused[width] = error
    if not refused:
        return
    which = ", ".join(f"{names[width][0]} has {width} inputs" for width in refused)
    layers = [name for name in targets if any(name in names[width] for width in refused)]
    fixes = [f"take {_SMALLEST_GROUPS}"] if all(width % 32 == 0 for width in refused) else []
    if {_last(name) for name in layers} != {_last(name) for name in targets}:
        fixes.append(f"leave such layers in high precision with {_skipping(scheme, layers)}")
    first = next(iter(refused.values()))
    reason = str(first).partition(":")[0]  # the advice behind it knows of no scheme
    fix = ", or ".join(fixes) or "take a preset without groups, such as int8_w8a8 or fp8_per_channel"
    raise ValueError(f"{which}, which scheme {scheme.name!r} cannot hold: {reason}; {fix}") from first


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _skipping(scheme: QuantScheme, names: list[str]) -> str:
    """How a recipe, and the command line, spell ``scheme`` without the layers of these names."""
    patterns = dict.fromkeys([*scheme.skip, *(f"*.{_last(name)}" for name in names)])
    skip = json.dumps(list(patterns))
    if scheme.name.split("+")[0] not in PRESETS:
        return f"skip: {skip} in the scheme"
    option = "--model.init_args.scheme"
    return f"scheme: {{name: {scheme.name}, skip: {skip}}} ({option}.name {scheme.name} {option}.skip '{skip}')"


def pack_(model: nn.Module) -> int:
    """Call `CodeModule.pack` on every layer that has it, after a refresh wrote the codes; returns how many."""
    layers = [module for _, module in walk(model) if isinstance(module, CodeModule)]
    for layer in layers:
        layer.pack()
    return len(layers)


def _unswapped(model: nn.Module, name: str) -> nn.Module:
    """The linear layer or stacked experts of that name."""
    module = model.get_submodule(name)
    if isinstance(module, (AlignedLinear, AlignedExperts, LowBitLinear)):
        raise ValueError(
            f"{name} is already a {type(module).__name__}: prepare_ and convert_ take an unswapped model, once"
        )
    return module
