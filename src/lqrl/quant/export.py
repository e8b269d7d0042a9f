"""Export of the learner's weights: everything that an engine of a scheme loads, as its forward uses it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lqrl.quant.experts import AlignedExperts, shipped_experts
from lqrl.quant.finite_checks import FiniteChecks
from lqrl.quant.kv import SCALE_NAMES, calibrates_kv
from lqrl.quant.linear import AlignedLinear, quantize_layers
from lqrl.quant.lora import AdaptedLinear, LoraLinear
from lqrl.quant.methods import FullPrecision, LinearMethod, linear_method
from lqrl.quant.numerics import shared_amax
from lqrl.quant.prepare import sibling_groups
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.stream import StableTensors
from lqrl.quant.targets import LowBitLinear, target_modules
from lqrl.quant.walk import walk


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

    def sent(checked: bool) -> Iterator[tuple[str, Tensor]]:
        tensors = _tensors(model, scheme, export_dtype, adapters, skip)
        return _checked(tensors) if checked else ((name, tensor) for name, tensor, _ in tensors)

    return StableTensors(sent(True), lambda: sent(False))


_Sent = tuple[str, Tensor, str]
"""A tensor, its name, and the name that is blamed when it holds NaN: a bad scale is a bad weight."""


def _checked(tensors: Iterator[_Sent]) -> Iterator[tuple[str, Tensor]]:
    checks = FiniteChecks()
    for name, tensor, blamed in tensors:
        checks.note(blamed, name, tensor)
        yield name, tensor
    checks.refuse()


class _Plan(NamedTuple):
    """What an export reads off the module tree, for as long as the tree stays as it is.

    Attributes:
        scheme: of the export.
        modules: by name, without the model itself.
        stacks: see `_stacks`.
        siblings: names of each target's group, by its own.
        method: of the targets.
        embedding: name of the input embedding.
    """

    scheme: QuantScheme
    modules: dict[str, nn.Module]
    stacks: list[tuple[str, str, torch.Size]]
    siblings: dict[str, list[str]]
    method: LinearMethod | None
    embedding: str | None


# Of the last export of each model. A plan holds no model, which would keep it alive.
_plans: WeakKeyDictionary[nn.Module, _Plan] = WeakKeyDictionary()


def _plan(model: nn.Module, scheme: QuantScheme) -> _Plan:
    modules = dict(walk(model))
    known = _plans.get(model)
    stacks = _stacks(modules)
    same = known is not None and known.scheme == scheme and known.stacks == stacks
    if known is not None and same and {"": model, **known.modules} == modules:
        return known
    _check_learner(modules)
    targets = target_modules(model, scheme)
    embedding = model.get_input_embeddings() if isinstance(model, _HasInputEmbeddings) else None
    names = [name for name, module in modules.items() if module is embedding and isinstance(module, nn.Embedding)]
    plan = _Plan(
        scheme,
        {name: module for name, module in modules.items() if name},
        stacks,
        {name: group for group in sibling_groups(targets) for name in group},
        linear_method(scheme) if targets else None,
        names[0] if names else None,
    )
    _plans[model] = plan
    return plan


def _stacks(modules: Mapping[str, nn.Module]) -> list[tuple[str, str, torch.Size]]:
    """Module, name and shape of every parameter of three dimensions: a known module may come to hold experts."""
    return [
        (path, name, parameter.shape)
        for path, module in modules.items()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.ndim == 3
    ]


def _tensors(
    model: nn.Module, scheme: QuantScheme, export_dtype: torch.dtype, adapters: bool, skip: Collection[str]
) -> Iterator[_Sent]:
    plan = _plan(model, scheme)
    modules = {"": model, **plan.modules}
    layers = [modules[name] for name in plan.siblings]
    # A layer with an adapter beside its codes gives more than codes.
    plain = [m for m in layers if isinstance(m, AlignedLinear) and not isinstance(m, AdaptedLinear)]
    aligned = [m for m in plain if m.export_dtype == export_dtype]
    codes = quantize_layers([m for m in aligned if m.method.format == plan.method])
    # Tied weights are exported under the input embedding's name.
    tied = {} if plan.embedding is None else {id(modules[plan.embedding].weight): f"{plan.embedding}.weight"}
    done: set[int] = set()
    for prefix, module in modules.items():
        dot = f"{prefix}." if prefix else ""
        if ".lora_" in prefix:
            continue  # sent with its layer
        if isinstance(module, LoraLinear) or prefix in plan.siblings:
            if isinstance(module, AlignedLinear) and module in codes:
                parts = [*codes[module].items(), *_bias(module, export_dtype)]
            else:
                group = [modules[name] for name in plan.siblings.get(prefix, ())]
                parts = _layer(prefix, module, group, plan.method, export_dtype, adapters)
            for name, tensor in parts:
                if (full := f"{dot}{name}") not in skip:
                    yield full, tensor, f"{dot}weight" if name.startswith("weight") else full
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in done:
                continue
            done.add(id(parameter))
            full = tied.get(id(parameter), f"{dot}{name}")
            if full not in skip:
                yield full, _exported(parameter, export_dtype), full
        yield from _buffers(dot, module, scheme, export_dtype)


def _buffers(dot: str, module: nn.Module, scheme: QuantScheme, export_dtype: torch.dtype) -> Iterator[_Sent]:
    if not module._buffers:
        return
    with_kv_scales = calibrates_kv(scheme)
    for name, buffer in module._buffers.items():
        if buffer is None or name in module._non_persistent_buffers_set:
            continue
        if name not in SCALE_NAMES or with_kv_scales:
            # Scales stay in fp32, like those of codes.
            dtype = buffer.dtype if name in SCALE_NAMES else export_dtype
            yield f"{dot}{name}", _exported(buffer, dtype), f"{dot}{name}"


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
    yield from _bias(linear, export_dtype)
    if isinstance(linear, AdaptedLinear) and adapters:
        yield "lora_A.weight", linear.lora_A.weight.detach().to(export_dtype)
        yield "lora_B.weight", linear.lora_B.weight.detach().to(export_dtype)


def _bias(linear: nn.Linear, export_dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    return [] if linear.bias is None else [("bias", linear.bias.detach().to(export_dtype))]


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


def _exported(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach()
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
