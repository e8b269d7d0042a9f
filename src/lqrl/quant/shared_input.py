"""A learner's linear layers that read one input: quantized once, multiplied at once where a kernel can, one gradient.

Outputs have the bits of one layer called after the other, and so have the gradients of weights and biases. The
gradient of the input is summed by the products themselves, rounded once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lqrl.quant.carried import take
from lqrl.quant.linear import AlignedLinear, Quantized, codes_of
from lqrl.quant.methods.base import Coded, Operands, TokenCodes
from lqrl.quant.rows import quantize_fp8_token, quantize_int8_token


def shared_codes(layers: Sequence[nn.Module], device: torch.device) -> TokenCodes | None:
    """The codes of tokens on ``device`` that all ``layers`` take in `products`; ``None`` where a layer has a say.

    That is any layer but a plain aligned one, layers of several kinds, hooks, those of all modules too, a ``forward``
    of a layer's own, and autocast.
    """
    if _has_any_global_hook():
        return None
    kind = None
    for layer in layers:
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        if type(layer) is not AlignedLinear or any(hooks) or "forward" in vars(layer):
            return None
        own = layer.method.token_codes
        if own is None or kind not in (None, own):
            return None
        kind = own
    return None if torch.is_autocast_enabled(device.type) else kind


def products(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """What each of ``layers`` makes of ``x`` ``[..., K]``, with the bits of one call after the other.

    Aligned layers of a format that quantizes tokens share the codes of ``x``: those that it carries, or new ones.
    """
    kind = shared_codes(layers, x.device)
    if kind is None:
        return [layer(x) for layer in layers]
    coded = take(x, kind, len(layers))
    if coded is None:
        with torch.no_grad():
            rows = x.reshape(-1, x.shape[-1])
            coded = Coded(*(quantize_int8_token(rows) if kind == "int8" else quantize_fp8_token(rows)))
    aligned = [layer for layer in layers if isinstance(layer, AlignedLinear)]
    if len(aligned) == 1:
        return [aligned[0].coded(x, coded)]
    weights, biases = [layer.weight for layer in aligned], [layer.bias for layer in aligned]
    return list(_SharedInput.apply(x, coded, aligned, codes_of(aligned), *weights, *biases))


def _forward(x: Tensor, coded: Coded, layers: Sequence[AlignedLinear], codes: Sequence[Quantized]) -> list[Tensor]:
    method = codes[0].method
    shipped = [None if layer.bias is None else layer.bias.to(layer.export_dtype) for layer in layers]
    if all(made.method == method for made in codes):
        biases = [bias for bias in shipped if bias is not None]
        operands = _joined(codes) if len(biases) in (0, len(layers)) else None
        if operands is not None:
            bias = torch.cat(biases) if biases else None
            outs = method.coded_apart(coded, operands, bias, [layer.out_features for layer in layers], x.dtype)
            if outs is not None:
                return outs
    each = zip(codes, shipped, strict=True)
    return [made.method.coded_linear(coded, made.operands, bias, x.dtype) for made, bias in each]


def _joined(codes: Sequence[Quantized]) -> Operands | None:
    """`_side_by_side`, found once: what is found keeps the memory, so no other tensor comes to lie at its addresses."""
    places = tuple(operand.data_ptr() for made in codes for operand in made.operands)
    found = codes[0].joined
    if places in found:
        return found[places]
    joined = _side_by_side([made.operands for made in codes])
    found.clear()  # others' codes that are no more
    found[places] = joined
    return joined


def _side_by_side(operands: Sequence[Operands]) -> Operands | None:
    """The operands of all layers as one layer's, if each one's rows lie behind those of the one before."""
    whole = []
    for parts in zip(*operands, strict=True):
        first = parts[0]
        if first.ndim != 2 or any(not _follows(a, b) for a, b in pairwise(parts)):
            return None
        rows = sum(part.shape[0] for part in parts)
        whole.append(first.as_strided((rows, first.shape[1]), first.stride()))
    return tuple(whole)


def _follows(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape[1:] != b.shape[1:] or not (a.is_contiguous() and b.is_contiguous()):
        return False
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()  # neighbors by chance are no tensor
    return same and a.data_ptr() + a.nbytes == b.data_ptr()


class _SharedInput(torch.autograd.Function):
    """Forward: the engine's kernels. Backward: straight-through, see `AlignedLinear`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        coded: Coded,
        layers: Sequence[AlignedLinear],
        codes: Sequence[Quantized],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(layers)
        ctx.save_for_backward(x, *parameters[:count])
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in parameters[count:]]
        ctx.used = [
            made if layer.backward_mode == "dequantized" else None for layer, made in zip(layers, codes, strict=True)
        ]
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in _forward(x, coded, layers, codes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        needed, count = ctx.needs_input_grad[4:], len(weights)
        grad_x: Tensor | None = None
        inputs: dict[Any, Tensor] = {}
        grad_weights: list[Tensor | None] = []
        grad_biases: list[Tensor | None] = []
        for place, (grad, weight, used) in enumerate(zip(grads, weights, ctx.used, strict=True)):
            rows = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                values = weight.to(rows.dtype) if used is None else used.method.dequantize(used.tensors, rows.dtype)
                grad_x = rows @ values if grad_x is None else grad_x.addmm_(rows, values)
            grad_w = grad_b = None
            if needed[place]:
                method = None if used is None else used.method
                if method not in inputs:
                    inputs[method] = (x if method is None else method.round_input(x)).reshape(-1, x.shape[-1])
                grad_w = (rows.t() @ inputs[method]).to(weight.dtype)
            if needed[count + place]:
                grad_b = rows.sum(0).to(ctx.bias_dtypes[place])
            grad_weights.append(grad_w)
            grad_biases.append(grad_b)
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        return grad_x, None, None, None, *grad_weights, *grad_biases
