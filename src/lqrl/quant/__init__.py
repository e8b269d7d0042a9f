"""Low precision: the scheme, its numerics and kernels, and the swap of linear layers on both sides."""

from __future__ import annotations

from lqrl.quant.adapters import add_adapters_, attach_adapters_, load_adapters_
from lqrl.quant.experts import AlignedExperts, QuantizedExperts
from lqrl.quant.export import export_weights
from lqrl.quant.linear import AlignedLinear, BackwardMode, QuantizedLinear
from lqrl.quant.lora import Lora
from lqrl.quant.prepare import convert_, pack_, prepare_
from lqrl.quant.scheme import QuantScheme, TensorFormat
from lqrl.quant.targets import target_modules
from lqrl.quant.transforms import (
    HadamardRotation,
    InvariantTransform,
    SmoothQuant,
    UpdateAwareScaling,
    fold_all_,
)

__all__ = [
    "AlignedExperts",
    "AlignedLinear",
    "BackwardMode",
    "HadamardRotation",
    "InvariantTransform",
    "Lora",
    "QuantScheme",
    "QuantizedExperts",
    "QuantizedLinear",
    "SmoothQuant",
    "TensorFormat",
    "UpdateAwareScaling",
    "add_adapters_",
    "attach_adapters_",
    "convert_",
    "export_weights",
    "fold_all_",
    "load_adapters_",
    "pack_",
    "prepare_",
    "target_modules",
]
