"""Steps of a decoder layer on CUDA whose norm, or SiLU, makes the very codes that the next product takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lqrl.engines.layers import Fused
from lqrl.quant import triton_use
from lqrl.quant.fused import QuantizedProduct
from lqrl.quant.linear import QuantizedLinear
from lqrl.quant.methods.base import Coded, TokenCodes

NormedProduct = Callable[[Tensor, Tensor | None], tuple[Tensor, Sequence[Tensor]]]
"""Two summands, the second of which may be missing, to the sum and the products with its norm."""
CodedProduct = Callable[[Coded, torch.dtype], Sequence[Tensor]]


def _products(layers: Sequence[nn.Module], fused: Fused) -> tuple[TokenCodes, CodedProduct] | None:
    """What codes ``layers`` take, and their products with those; ``None`` if they do not all take the same."""
    whole = fused.get(layers[0])
    parts = [p for p in (layers if whole is None else (whole,)) if isinstance(p, (QuantizedLinear, QuantizedProduct))]
    kinds: set[TokenCodes | None] = {part.token_codes for part in parts}
    kind: TokenCodes | None = next(iter(kinds), None)
    if kind is None or len(kinds) > 1 or len(parts) < (len(layers) if whole is None else 1):
        return None
    if whole is None:
        return kind, lambda x, dtype: [part.coded(x, dtype) for part in parts]
    widths = [int(layer.out_features) for layer in layers]  # pyright: ignore[reportArgumentType]
    return kind, lambda x, dtype: parts[0].coded(x, dtype).split(widths, -1)


def _serves(kind: TokenCodes, device: torch.device) -> bool:
    least = triton_use.TENSOR_CORES_FP8 if kind == "fp8_e4m3" else triton_use.TENSOR_CORES_INT8
    return triton_use.serves(device, least)


def normed_product(weight: Tensor, eps: float, layers: Sequence[nn.Module], fused: Fused) -> NormedProduct | None:
    """Sum, norm and quantizer in one kernel, then the products of ``layers``; ``None`` where they take no codes.

    Args:
        weight: of the norm.
        eps: of the norm.
        layers: which read the norm's output.
        fused: products of several layers, see `lqrl.engines.layers.fuse_projections_`.
    """
    products = _products(layers, fused)
    if products is None or not _serves(products[0], weight.device):
        return None
    from lqrl.quant import triton_norm_quantize

    kind, product = products

    def run(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        total, codes, scale = triton_norm_quantize.add_rms_norm(x, delta, weight, eps, kind)
        return total, product(Coded(codes, scale), x.dtype)

    return run


def gated_product(down: nn.Module) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """SiLU of gate, times up, and quantizer in one kernel, then the product of ``down``; ``None`` as above."""
    products = _products((down,), {})
    if products is None or not _serves(products[0], next(down.buffers()).device):
        return None
    from lqrl.quant import triton_norm_quantize

    kind, product = products

    def run(gate_up: Sequence[Tensor]) -> Tensor:
        gate, up = gate_up
        return product(Coded(*triton_norm_quantize.silu_mul(gate, up, kind)), gate.dtype)[0]

    return run
