"""Engine layers that read the same input as one product: query, key and value; gate and up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lqrl.quant.hopper_gemm import gated_linear, plain_linear
from lqrl.quant.linear import QuantizedLinear
from lqrl.quant.methods.base import Coded, LinearMethod, Operands, TokenCodes

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PlainProduct:
    """The product of one input with several weights in full precision.

    Attributes:
        weight: of all layers, one after the other.
        bias: of all layers, or none.
    """

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N1 + N2 + ...]``."""
        return F.linear(x, self.weight, self.bias)

    def few_rows(self, x: Tensor) -> Tensor:
        """The product up to rounding, for ``x`` ``[M, K]`` of few rows by a kernel that is made for them."""
        return plain_linear(x, self.weight) if self.bias is None else self(x)

    def gated(self, x: Tensor) -> Tensor | None:
        """SiLU of the first half of the outputs times the others, ``[M, N / 2]``; ``None`` if no kernel does it."""
        return gated_linear(x, self.weight) if self.bias is None else None


@dataclass(frozen=True, eq=False)
class QuantizedProduct:
    """The product of one input with several weights of a format.

    Attributes:
        method: the format's operations.
        operands: of all weights, one after the other.
        bias: of all layers, or none.
        shared: scales of whole tensors, each as every layer holds it; the product reads the first layer's.
    """

    method: LinearMethod
    operands: Operands
    bias: Tensor | None
    shared: tuple[tuple[Tensor, ...], ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N1 + N2 + ...]``."""
        return self.method.linear(x, self.operands, self.bias)

    @property
    def token_codes(self) -> TokenCodes | None:
        """What `coded` takes, see `LinearMethod.token_codes`."""
        return self.method.token_codes

    def coded(self, x: Coded, dtype: torch.dtype) -> Tensor:
        """The product of tokens that are quantized already, in ``dtype``, which theirs was."""
        return self.method.coded_linear(x, self.operands, self.bias, dtype)


def scales_agree(products: Iterable[Product]) -> bool:
    """Whether layers of one product hold equal scales for whole tensors, without which it is not theirs."""
    groups = [group for p in products if isinstance(p, QuantizedProduct) for group in p.shared]
    if not groups:
        return True
    firsts = [group[0].flatten() for group in groups for _ in group[1:]]
    return torch.equal(torch.cat(firsts), torch.cat([t.flatten() for group in groups for t in group[1:]]))


@torch.no_grad()
def fuse_(layers: Sequence[nn.Module]) -> Product | None:
    """Make the tensors of ``layers`` parts of common ones, and give the product with all of them.

    The layers go on as they were: their tensors become views of rows, so what a refresh writes there is what the
    product reads. Outputs lie side by side, ``[..., K]`` to ``[..., N1 + N2 + ...]``. Activations are quantized once.

    Args:
        layers: plain or quantized linear layers of one input width, without gradients.

    Returns:
        The product, or ``None``, with nothing changed, where there is none: layers of several kinds, some with a bias
        and some without, adapters, a format whose kernel reads a layout of its own or whose scales do not lie by rows.
    """
    with_bias = {getattr(layer, "bias", None) is not None for layer in layers}
    if len(with_bias) != 1:
        return None
    if all(type(layer) is nn.Linear for layer in layers):
        return _plain([layer for layer in layers if isinstance(layer, nn.Linear)])
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    return _quantized(quantized) if len(quantized) == len(layers) else None


def _plain(layers: Sequence[nn.Linear]) -> Product:
    widths = [layer.out_features for layer in layers]
    weight, bias = _common([layer.weight for layer in layers]), _bias(layers)
    for layer, own in zip(layers, weight.split(widths), strict=True):
        layer.weight = nn.Parameter(own, requires_grad=False)
    if bias is not None:
        for layer, own in zip(layers, bias.split(widths), strict=True):
            layer.bias = nn.Parameter(own, requires_grad=False)
    return PlainProduct(weight, bias)


def _quantized(layers: Sequence[QuantizedLinear]) -> Product | None:
    first, widths = layers[0], [layer.out_features for layer in layers]
    if any(layer.method != first.method or layer.lora_A is not None or layer.reads_copies for layer in layers):
        return None
    shipped = [layer.shipped() for layer in layers]
    parts = _row_counts(shipped, widths, first.method)
    if parts is None:
        return None
    whole = {n: _common([t[n] for t in shipped]) if n in parts else t for n, t in shipped[0].items()}
    operands = first.method.operands(whole, first.compute_dtype)
    if any(all(o.data_ptr() != t.data_ptr() for t in whole.values()) for o in operands):
        return None  # a layout of its own, which a refresh would not reach
    views = {name: whole[name].split(rows) for name, rows in parts.items()}
    for place, layer in enumerate(layers):
        layer.rehome({name: own[place] for name, own in views.items()})
    bias = _bias(layers)
    if bias is not None:
        for layer, own in zip(layers, bias.split(widths), strict=True):
            layer.bias = own
    shared = tuple(tuple(tensors[name] for tensors in shipped) for name in shipped[0].keys() - parts.keys())
    return QuantizedProduct(first.method, operands, bias, shared)


def _row_counts(
    shipped: Sequence[Mapping[str, Tensor]], widths: Sequence[int], method: LinearMethod
) -> dict[str, list[int]] | None:
    """Rows of each layer's tensor; ``None`` where they do not lie row by row, or a block would span two layers."""
    parts: dict[str, list[int]] = {}
    for name, tensor in shipped[0].items():
        rows = [tensors[name].shape[0] for tensors in shipped]
        if tensor.numel() == 1:
            if not method.shares_amax:
                return None
        elif widths in (rows, [n * method.row_block for n in rows]):
            parts[name] = rows
        else:
            return None
    return parts


def _common(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of all tensors, one after the other; fp8 is joined as bytes, which any device can copy."""
    if tensors[0].dtype == torch.float8_e4m3fn:
        return torch.cat([t.view(torch.uint8) for t in tensors]).view(torch.float8_e4m3fn)
    return torch.cat([t.detach() for t in tensors])


def _bias(layers: Sequence[nn.Linear] | Sequence[QuantizedLinear]) -> Tensor | None:
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None
