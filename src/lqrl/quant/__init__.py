"""Low precision: the scheme, its numerics and kernels, and the swap of linear layers on both sides."""

from __future__ import annotations

from lqrl.quant.linear import AlignedLinear, QuantizedLinear
from lqrl.quant.prepare import convert_, export_weights, pack_, prepare_
from lqrl.quant.scaling import fold_, unfold_
from lqrl.quant.scheme import QuantScheme, TensorFormat, target_modules

__all__ = [
    "AlignedLinear",
    "QuantScheme",
    "QuantizedLinear",
    "TensorFormat",
    "convert_",
    "export_weights",
    "fold_",
    "pack_",
    "prepare_",
    "target_modules",
    "unfold_",
]
