"""A short cut through the common decoder layer: the same arithmetic as transformers', in fewer and cheaper calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lqrl.engines.layers import Fused, LayerParts, RowFn, SplitFn, linear, split_product, take_apart
from lqrl.modeling.attention import AttentionContext
from lqrl.modeling.backbone import AttentionShape
from lqrl.modeling.exact import ExactRMSNorm, ExactSiLU
from lqrl.quant import exact

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AddNorm = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""The sum of two, the second of which may be missing, and its norm."""


@dataclass(frozen=True)
class _Layer:
    """The functions of one layer, ``[N, in]`` to ``[N, out]`` or to several (head norms: over the last dimension)."""

    input_norm: AddNorm
    query_key_value: SplitFn
    query_norm: RowFn | None
    key_norm: RowFn | None
    output: RowFn
    post_norm: AddNorm
    gate_up: SplitFn
    gated: Callable[[Tensor, Tensor], Tensor]
    down: RowFn
    shape: AttentionShape


class LeanDecoder:
    """Runs the layers of `lqrl.engines.layers.DecoderParts` on the weights of a transformers model.

    Rotary angles come from a table. What it may change is not the result: the engine uses it only when its hidden
    states equal transformers' bit for bit.

    Args:
        model: whose modules are read; their tensors may change in place, not move.
        shapes: of each attention layer, see `lqrl.modeling.backbone.attention_shapes`.
        max_positions: length of the rotary table.
        fused_norms: use ``F.rms_norm`` for the norms, which rounds like transformers' in fp32 on the CPU.
        fused: products of `lqrl.engines.layers.fuse_projections_`; layers without one are multiplied one by one.

    Raises:
        NotImplementedError: when the model is built otherwise.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Mapping[int, AttentionShape],
        max_positions: int,
        fused_norms: bool,
        fused: Fused = MappingProxyType({}),
    ) -> None:
        parts = take_apart(model, shapes, max_positions)
        norm = partial(_norm, eps=parts.eps, fused=fused_norms)
        self._embed = parts.embed.forward
        self._norm = _add_norm(parts.norm, norm)
        self._layers = [_layer(layer, norm, fused) for layer in parts.layers]
        self._rotary = parts.rotary

    def __call__(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states ``[N, H]`` of ``tokens`` ``[N]`` at ``positions`` ``[N]``."""
        x, delta = self._embed(tokens), None
        cos, sin = (table.index_select(0, positions)[:, None] for table in self._rotary)
        for index, layer in enumerate(self._layers):
            x, h = layer.input_norm(x, delta)
            x, h = layer.post_norm(x, self._attention(index, layer, h, cos, sin, context))
            delta = layer.down(layer.gated(*layer.gate_up(h)))
        return self._norm(x, delta)[1]

    @staticmethod
    def _attention(index: int, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        tokens, shape = h.shape[0], layer.shape
        widths = shape.key_width, shape.key_width, shape.value_width
        q, k, v = (x.view(tokens, -1, w) for x, w in zip(layer.query_key_value(h), widths, strict=True))
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = layer.query_norm(q), layer.key_norm(k)
        both, half = torch.cat([q, k], 1), shape.key_width // 2
        turned = torch.cat([both[..., half:], both[..., :half]], -1).mul_(sin)
        q, k = both.mul_(cos).add_(turned).transpose(0, 1)[None].split([q.shape[1], k.shape[1]], 1)
        out = context.attend(index, q, k, v.transpose(0, 1)[None], shape.scaling, shape.sliding_window)
        return layer.output(out.reshape(tokens, -1))


def _layer(parts: LayerParts, norm: Callable[[nn.Module], RowFn], fused: Fused) -> _Layer:
    return _Layer(
        input_norm=_add_norm(parts.input_norm, norm),
        query_key_value=split_product(parts.query_key_value, fused),
        query_norm=None if parts.query_norm is None else norm(parts.query_norm),
        key_norm=None if parts.key_norm is None else norm(parts.key_norm),
        output=linear(parts.output),
        post_norm=_add_norm(parts.post_norm, norm),
        gate_up=split_product(parts.gate_up, fused),
        gated=_gated(parts.activation),
        down=linear(parts.down),
        shape=parts.shape,
    )


def _add_norm(module: nn.Module, norm: Callable[[nn.Module], RowFn]) -> AddNorm:
    if isinstance(module, ExactRMSNorm):
        return partial(_add_exact_norm, weight=module.weight, eps=module.variance_epsilon)
    own = norm(module)

    def add_norm(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if delta is None else x + delta
        return x, own(x)

    return add_norm


def _add_exact_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (x, exact.rms_norm(x, weight, eps)[0]) if delta is None else exact.add_rms_norm(x, delta, weight, eps)


def _gated(activation: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(activation, ExactSiLU):
        return exact.silu_mul
    function = activation.forward
    return lambda gate, up: function(gate) * up


def _norm(module: nn.Module, *, eps: float, fused: bool) -> RowFn:
    if not fused:
        return module.forward
    weight = next(module.parameters())
    return partial(F.rms_norm, normalized_shape=list(weight.shape), weight=weight, eps=eps)
