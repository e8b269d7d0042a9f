"""Put adapters on the learner and on the embedded engine, and move them between names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lqrl.extras import pip_install
from lqrl.quant.linear import AlignedLinear, QuantizedLinear
from lqrl.quant.lora import ADAPTER_NAME, AdaptedLinear, Lora, LoraLinear, MergedLinear
from lqrl.quant.methods import FullPrecision
from lqrl.quant.prepare import sibling_groups


def add_adapters_(model: nn.Module, lora: Lora, *, export_dtype: torch.dtype, seed: int) -> list[str]:
    """Freeze the learner's model and give it adapters, in place; call it after `lqrl.quant.prepare_`.

    peft makes and initializes the adapters (``A`` uniform, ``B`` zero); its layers are then replaced by `AdaptedLinear`
    or `MergedLinear`, which keep the base's name and compute with the engine's codes.

    Args:
        model: the learner, its linear layers plain or prepared.
        lora: what to add.
        export_dtype: dtype of the exported weights, as for ``prepare_``.
        seed: of ``A``; the global generator is left as it was.

    Returns:
        Names of the layers with an adapter.

    Raises:
        ModuleNotFoundError: without peft.
        ValueError: when a target or the norms match nothing.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear as PeftLinear
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"Lora needs peft: {pip_install('peft')}") from error

    names = lora.targets(model)
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=names)  # pyright: ignore[reportArgumentType]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    model.requires_grad_(False)
    kind = MergedLinear if lora.refresh == "merge" else AdaptedLinear
    for name in names:
        wrapped = model.get_submodule(name)
        assert isinstance(wrapped, PeftLinear)
        base, a, b = wrapped.base_layer, wrapped.lora_A["default"], wrapped.lora_B["default"]
        assert isinstance(base, nn.Linear)
        assert isinstance(a, nn.Linear)
        assert isinstance(b, nn.Linear)
        if not isinstance(base, AlignedLinear):
            base = AlignedLinear(base, FullPrecision(), export_dtype)
        model.set_submodule(name, kind(base, a, b, lora.scaling))
    vars(model).pop("peft_config", None)  # no layer of peft's is left
    _share_scales(model)
    if lora.train_norms:
        _train_norms(model)
    return names


def _share_scales(model: nn.Module) -> None:
    """Siblings with one scale know each other as they are now."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, AlignedLinear) and module.method.shares_amax
    }
    for group in sibling_groups(list(layers)):
        for name in group:
            layers[name].share_scale([layers[sibling] for sibling in group])


def _train_norms(model: nn.Module) -> None:
    norms = [p for name, p in model.named_parameters() if p.dim() == 1 and name.endswith("norm.weight")]
    if not norms:
        vectors = [name for name, p in model.named_parameters() if p.dim() == 1]
        raise ValueError(
            f"Lora.train_norms finds no parameter named '*norm.weight' in {type(model).__name__}; its vectors are "
            f"{vectors[:5]}"
        )
    for parameter in norms:
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)


@torch.no_grad()
def attach_adapters_(model: nn.Module, lora: Lora, names: Iterable[str]) -> None:
    """Give the engine's layers room for adapters, in place; call it after `lqrl.quant.convert_`.

    Args:
        model: the engine's.
        lora: what the learner trains.
        names: `Lora.targets` of the model before it was converted.
    """
    for name in names:
        layer = model.get_submodule(name)
        if not isinstance(layer, QuantizedLinear):
            assert isinstance(layer, nn.Linear)
            layer = QuantizedLinear(layer, FullPrecision())
            model.set_submodule(name, layer)
        layer.add_low_rank(lora.r, lora.scaling)


def adapter_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The learner's layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters under the names that peft gives them in a file, in fp32."""
    for name, layer in adapter_layers(model).items():
        for factor, linear in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            yield f"base_model.model.{name}.{factor}.weight", linear.weight.detach()


@torch.no_grad()
def load_adapters_(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Copy a complete set of adapters into the learner's model.

    Args:
        model: with adapters (`add_adapters_`).
        tensors: named as peft names them, in a file or in a model; other tensors are refused.

    Returns:
        How many tensors were copied.

    Raises:
        ValueError: when a name or shape is not the model's, or one of the model's is missing.
    """
    targets: dict[str, Any] = {
        f"{name}.{factor}": linear.weight
        for name, layer in adapter_layers(model).items()
        for factor, linear in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
    }
    missing = set(targets)
    for name, tensor in tensors:
        match = ADAPTER_NAME.match(name)
        key = f"{match['layer']}.{match['factor']}" if match else name
        if key not in targets:
            raise ValueError(
                f"{name} belongs to no adapter of the model; it has {', '.join(sorted(targets)[:4])}, ... "
                f"({len(targets)} in all)"
            )
        if targets[key].shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, the model's is {tuple(targets[key].shape)}; set Lora.r")
        targets[key].copy_(tensor)
        missing.discard(key)
    if missing or not targets:
        raise ValueError(f"{len(missing)} of {len(targets)} adapter tensors are missing, first {sorted(missing)[:3]}")
    return len(targets)
