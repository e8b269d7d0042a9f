"""Invariant transforms: other weights for the same function, chosen so that they quantize or train better."""

from __future__ import annotations

from lqrl.quant.transforms.base import InvariantTransform, fold_all_
from lqrl.quant.transforms.hadamard import HadamardRotation
from lqrl.quant.transforms.scaling import UpdateAwareScaling, uaq_equivalent_param_groups
from lqrl.quant.transforms.smooth import SmoothQuant, activation_amax

__all__ = [
    "HadamardRotation",
    "InvariantTransform",
    "SmoothQuant",
    "UpdateAwareScaling",
    "activation_amax",
    "fold_all_",
    "uaq_equivalent_param_groups",
]
