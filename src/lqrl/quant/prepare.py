"""Swap a model's linear layers, and export what the engine loads; all three follow `target_modules`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lqrl.quant.codes import CodeModule
from lqrl.quant.experts import AlignedExperts, QuantizedExperts, check_experts, shipped_experts
from lqrl.quant.finite_checks import FiniteChecks
from lqrl.quant.kv import SCALE_NAMES, calibrates_kv
from lqrl.quant.linear import AlignedLinear, BackwardMode, QuantizedLinear, quantize_layers
from lqrl.quant.lora import AdaptedLinear, LoraLinear
from lqrl.quant.methods import FullPrecision, LinearMethod, linear_method
from lqrl.quant.numerics import shared_amax
from lqrl.quant.scheme import LowBitLinear, QuantScheme, target_modules
from lqrl.quant.stream import StableTensors
from lqrl.quant.walk import walk

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
            _replace(model, name, layers[name])
        else:
            _replace(model, name, AlignedExperts(module, method, export_dtype, backward))
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
            _replace(model, name, QuantizedLinear(linear, method, amax))
        for name in modules.keys() - linears.keys():
            _replace(model, name, QuantizedExperts(modules[name], method))
    return targets


def _check_shapes(model: nn.Module, targets: list[str], method: LinearMethod, scheme: QuantScheme) -> None:
    """Quantize one row of each width, so that a width that the format cannot hold is known before anything is swapped.

    Raises:
        ValueError: naming the layer and what to do.
    """
    seen: set[int] = set()
    for name in targets:
        module = _unswapped(model, name)
        if not isinstance(module, nn.Linear):
            check_experts(name, module, method)
            continue
        width = module.in_features
        if width not in seen:
            seen.add(width)
            try:
                method.quantize(torch.zeros(1, width))
            except ValueError as error:
                raise ValueError(
                    f"{name} has {width} inputs, which scheme {scheme.name!r} cannot hold: {error}, for example "
                    f"skip=['*.{name.rpartition('.')[2]}']" + (", or int4_w4a16_g32" if width % 32 == 0 else "")
                ) from error


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


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


@runtime_checkable
class _HasInputEmbeddings(Protocol):
    def get_input_embeddings(self) -> nn.Module: ...


def export_weights(
    model: nn.Module,
    scheme: QuantScheme,
    *,
    export_dtype: torch.dtype,
    adapters: bool = False,
    skip: Collection[str] = (),
) -> StableTensors:
    """Yield everything an engine of ``scheme`` loads, in module order, under the model's state-dict names.

    A quantized layer gives its method's tensors (``<name>.weight`` and ``<name>.weight_scale`` for int8 and fp8) and
    ``<name>.bias``; master weights are rounded to ``export_dtype`` *before* they are quantized. All other parameters
    and persistent buffers come in ``export_dtype`` (integer ones as they are). Tied parameters come once, under the
    input embedding's name. A prepared model exports the codes of its own forward; a plain one is quantized here. The
    identity scheme exports full-precision weights of a prepared model too.

    The tensors may share memory with the model: consume them before it changes. Nothing is computed, and no error
    raised, before the first is asked for.

    Args:
        model: the learner's.
        scheme: the format.
        export_dtype: the engine's dtype.
        adapters: give the base and the adapters apart (``<name>.lora_A.weight``), for an engine that was built with
            them. Otherwise they are merged in fp32 and the names are those of the plain model.
        skip: names to leave out.

    Raises:
        ValueError: naming the tensor that holds NaN or inf; or when the model was prepared with another dtype or
            format, is itself an engine's, or holds adapters that cannot be exported so.
    """
    return StableTensors(_stream(model, scheme, export_dtype, adapters, skip))


def _stream(
    model: nn.Module, scheme: QuantScheme, export_dtype: torch.dtype, adapters: bool, skip: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    modules = dict(walk(model))
    _check_learner(modules)
    targets = target_modules(model, scheme)
    method = linear_method(scheme) if targets else None
    aligned = [m for m in map(modules.__getitem__, targets) if isinstance(m, AlignedLinear)]
    quantize_layers([m for m in aligned if m.method.format == method and m.export_dtype == export_dtype])
    siblings = {name: group for group in sibling_groups(targets) for name in group}
    tied_name = _embedding_name(model, modules)
    done: set[int] = set()
    checks = FiniteChecks()
    for prefix, module in modules.items():
        dot = f"{prefix}." if prefix else ""
        if ".lora_" in prefix:
            continue  # sent with its layer
        if isinstance(module, LoraLinear) or prefix in siblings:
            group = [modules[name] for name in siblings.get(prefix, ())]
            for name, tensor in _layer(prefix, module, group, method, export_dtype, adapters):
                if f"{dot}{name}" not in skip:
                    blamed = "weight" if name.startswith("weight") else name  # a bad scale is a bad weight
                    checks.note(f"{dot}{blamed}", name, tensor)
                    yield f"{dot}{name}", tensor
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in done:
                continue
            done.add(id(parameter))
            full = tied_name.get(id(parameter), f"{dot}{name}")
            if full not in skip:
                yield full, _exported(full, parameter, export_dtype, checks)
        yield from _buffers(dot, module, scheme, export_dtype, checks)
    checks.refuse()


def _buffers(
    dot: str, module: nn.Module, scheme: QuantScheme, export_dtype: torch.dtype, checks: FiniteChecks
) -> Iterator[tuple[str, Tensor]]:
    if not module._buffers:
        return
    with_kv_scales = calibrates_kv(scheme)
    for name, buffer in module._buffers.items():
        if buffer is None or name in module._non_persistent_buffers_set:
            continue
        if name not in SCALE_NAMES or with_kv_scales:
            # Scales stay in fp32, like those of codes.
            dtype = buffer.dtype if name in SCALE_NAMES else export_dtype
            yield f"{dot}{name}", _exported(f"{dot}{name}", buffer, dtype, checks)


def _embedding_name(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """The input embedding's weight by identity: the name that tied weights are exported under."""
    if not isinstance(model, _HasInputEmbeddings):
        return {}
    embedding = model.get_input_embeddings()
    names = [name for name, module in modules.items() if module is embedding]
    return {id(embedding.weight): f"{names[0]}.weight"} if isinstance(embedding, nn.Embedding) else {}


def _check_learner(modules: Mapping[str, nn.Module]) -> None:
    low_bit = [name for name, module in modules.items() if isinstance(module, LowBitLinear)]
    if low_bit:
        raise ValueError(
            f"{low_bit[0]} holds low-bit codes: export_weights takes the learner's model, with master weights"
        )
    wrapped = [name for name in modules if name.endswith(".base_layer")]
    if wrapped:
        raise ValueError(
            f"{wrapped[0].removesuffix('.base_layer')} is wrapped by peft, whose layers do not compute with the "
            "engine's codes; load the plain model and give it adapters with lqrl.quant.add_adapters_"
        )


def _layer(
    name: str,
    layer: nn.Module,
    group: list[nn.Module],
    method: LinearMethod | None,
    export_dtype: torch.dtype,
    adapters: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Codes of a target, or the full-precision weight of a layer with an adapter; bias; the adapter if it is apart."""
    if not isinstance(layer, nn.Linear):
        assert method is not None
        yield from _quantized_experts(name, layer, method, export_dtype).items()
        return
    linear, apart = layer, isinstance(layer, AdaptedLinear)
    if method is not None and group:
        if apart and not adapters:
            raise ValueError(
                f"{name} holds its adapter beside the codes, and codes of the merged weight would be another function; "
                "export with adapters=True, or in full precision"
            )
        yield from _quantized(name, linear, group, method, export_dtype).items()
    elif isinstance(linear, LoraLinear):
        weight = linear.weight.detach() if apart and adapters else linear.merged_weight()
        yield "weight", weight.to(export_dtype)
    if linear.bias is not None:
        yield "bias", linear.bias.detach().to(export_dtype)
    if isinstance(linear, AdaptedLinear) and adapters:
        yield "lora_A.weight", linear.lora_A.weight.detach().to(export_dtype)
        yield "lora_B.weight", linear.lora_B.weight.detach().to(export_dtype)


def _exported_weight(linear: nn.Linear, export_dtype: torch.dtype) -> Tensor:
    weight = linear.exported_weight() if isinstance(linear, AlignedLinear) else linear.weight
    return weight.detach().to(export_dtype)


def _quantized(
    name: str, linear: nn.Linear, group: list[nn.Module], method: LinearMethod, export_dtype: torch.dtype
) -> dict[str, Tensor]:
    if not isinstance(linear, AlignedLinear) or isinstance(linear.method.format, FullPrecision):
        with torch.no_grad():
            weights = [_exported_weight(m, export_dtype) for m in group if isinstance(m, nn.Linear)]
            amax = shared_amax(weights) if method.shares_amax else None
            return method.quantize(_exported_weight(linear, export_dtype), amax)
    if linear.export_dtype != export_dtype or linear.method.format != method:
        raise ValueError(
            f"{name} was prepared for another format or export dtype ({linear.export_dtype}) than is exported "
            f"({export_dtype}); pass prepare_ and export_weights the same scheme and dtype"
        )
    return linear.quantized_weight()


def _quantized_experts(
    name: str, experts: nn.Module, method: LinearMethod, export_dtype: torch.dtype
) -> dict[str, Tensor]:
    if not isinstance(experts, AlignedExperts):
        return shipped_experts(experts, method, export_dtype)
    if experts.export_dtype != export_dtype or experts.method != method:
        raise ValueError(
            f"{name} was prepared for another format or export dtype ({experts.export_dtype}) than is exported "
            f"({export_dtype}); pass prepare_ and export_weights the same scheme and dtype"
        )
    return experts.quantized_weights()


def _exported(name: str, tensor: Tensor, dtype: torch.dtype, checks: FiniteChecks) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
        checks.note(name, name, tensor)
    return tensor
