"""Formats of linear layers, and the table that finds one for a scheme."""

from __future__ import annotations

from lqrl.quant.methods.base import LinearMethod, Operands
from lqrl.quant.methods.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from lqrl.quant.methods.full_precision import FullPrecision
from lqrl.quant.methods.integer import IntegerGemm
from lqrl.quant.methods.microscaling import Mxfp8, Nvfp4
from lqrl.quant.methods.nf4 import Nf4
from lqrl.quant.methods.table import linear_method
from lqrl.quant.methods.weight_only import Int4Group, IntegerChannel, Mxfp4WeightOnly, Nvfp4WeightOnly

__all__ = [
    "Fp8Block",
    "Fp8Channel",
    "Fp8Tensor",
    "FullPrecision",
    "Int4Group",
    "IntegerChannel",
    "IntegerGemm",
    "LinearMethod",
    "Mxfp4WeightOnly",
    "Mxfp8",
    "Nf4",
    "Nvfp4",
    "Nvfp4WeightOnly",
    "Operands",
    "linear_method",
]
