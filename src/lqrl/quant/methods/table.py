"""Which method computes which pair of formats."""

from __future__ import annotations

from dataclasses import replace

from lqrl.quant.methods.base import LinearMethod
from lqrl.quant.methods.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from lqrl.quant.methods.integer import IntegerGemm
from lqrl.quant.methods.microscaling import Mxfp8, Nvfp4
from lqrl.quant.methods.nf4 import NF4_BLOCK, Nf4
from lqrl.quant.methods.weight_only import Int4Group, IntegerChannel, Mxfp4WeightOnly, Nvfp4WeightOnly
from lqrl.quant.scheme import QuantScheme, TensorFormat

_TOKEN8 = TensorFormat("int8", "token", dynamic=True)
_FP8_TOKEN = TensorFormat("fp8_e4m3", "token", dynamic=True)
_NVFP4 = TensorFormat("fp4_e2m1", "group", group_size=16, scale_dtype="fp8_e4m3")
_MXFP8 = TensorFormat("fp8_e4m3", "group", group_size=32, scale_dtype="e8m0")

METHODS: dict[tuple[TensorFormat | None, TensorFormat | None], LinearMethod] = {
    (TensorFormat("int8", "channel"), _TOKEN8): IntegerGemm(),
    (TensorFormat("int4", "channel"), _TOKEN8): IntegerGemm(7, 127),
    (TensorFormat("int4", "channel"), TensorFormat("int4", "token", dynamic=True)): IntegerGemm(7, 7),
    (TensorFormat("int8", "channel"), None): IntegerChannel(),
    (TensorFormat("int4", "channel"), None): IntegerChannel(7),
    **{(TensorFormat("int4", "group", group_size=size), None): Int4Group(size) for size in (32, 64, 128)},
    **{(TensorFormat("int3", "group", group_size=size), None): Int4Group(size, 3) for size in (32, 64, 128)},
    (TensorFormat("fp8_e4m3", "tensor"), _FP8_TOKEN): Fp8Tensor(),
    (TensorFormat("fp8_e4m3", "tensor"), TensorFormat("fp8_e4m3", "tensor", dynamic=True)): Fp8Tensor("tensor"),
    (TensorFormat("fp8_e4m3", "channel"), _FP8_TOKEN): Fp8Channel(),
    (TensorFormat("fp8_e4m3", "block"), TensorFormat("fp8_e4m3", "group", group_size=128, dynamic=True)): Fp8Block(),
    (_NVFP4, None): Nvfp4WeightOnly(),
    (_NVFP4, replace(_NVFP4, dynamic=True)): Nvfp4(),
    (TensorFormat("fp4_e2m1", "group", group_size=32, scale_dtype="e8m0"), None): Mxfp4WeightOnly(),
    (_MXFP8, replace(_MXFP8, dynamic=True)): Mxfp8(),
    (TensorFormat("nf4", "group", group_size=NF4_BLOCK), None): Nf4(),
}


def linear_method(scheme: QuantScheme) -> LinearMethod:
    """The operations that compute ``scheme``'s linear layers.

    Raises:
        ValueError: when no kernel computes this pair of formats; the message lists the pairs.
    """
    method = METHODS.get((scheme.weight, scheme.activation))
    if method is None:
        raise ValueError(
            f"no kernel computes scheme {scheme.name!r} (weight {scheme.weight}, activation {scheme.activation}); "
            f"{_nearest(scheme.weight)}"
        )
    return method


def _nearest(weight: TensorFormat | None) -> str:
    """The supported pairs that share the weight's format, or else its dtype, or else all."""
    same = [pair for pair in METHODS if pair[0] == weight]
    alike = [pair for pair in METHODS if pair[0] and weight and pair[0].dtype == weight.dtype]
    pairs = "; ".join(f"{w} with {a or 'high-precision'} activations" for w, a in same or alike or METHODS)
    return f"this weight goes as {pairs}" if same else f"supported: {pairs}"
