"""A short cut through the common decoder layer: the same arithmetic as transformers', in fewer and cheaper calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lqrl.modeling.attention import AttentionContext
from lqrl.modeling.backbone import AttentionShape
from lqrl.modeling.exact import ExactRMSNorm, ExactSiLU
from lqrl.quant import exact
from lqrl.quant.fused import fuse_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RowFn = Callable[[Tensor], Tensor]
SplitFn = Callable[[Tensor], Sequence[Tensor]]
AddNorm = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""The sum of two, the second of which may be missing, and its norm."""
Fused = Mapping[nn.Module, RowFn]
"""The product of several layers by the first of them."""
_QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not follow the length


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
    """Runs ``embed, [norm, attention, norm, gated MLP] * layers, norm`` on the weights of a transformers model.

    Fits Llama, Mistral, Qwen2, Qwen3 and Gemma. Rotary angles come from a table. What it may change is not
    the result: the engine uses it only when its hidden states equal transformers' bit for bit.

    Args:
        model: whose modules are read; their tensors may change in place, not move.
        shapes: of each attention layer, see `lqrl.modeling.backbone.attention_shapes`.
        max_positions: length of the rotary table.
        fused_norms: use ``F.rms_norm`` for the norms, which rounds like transformers' in fp32 on the CPU.
        fused: products of `fuse_projections_`; layers without one are multiplied one by one.

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
        decoder: nn.Module = model.get_decoder()
        parts = _children(decoder, {"embed_tokens", "layers", "norm", "rotary_emb"})
        config: Any = model.config
        if config.rope_parameters.get("rope_type", "default") not in _STATIC_ROPE:
            raise NotImplementedError("rotary frequencies that follow the length have no table")
        norm = partial(_norm, eps=config.rms_norm_eps, fused=fused_norms)
        self._embed = parts["embed_tokens"].forward
        self._norm = _add_norm(parts["norm"], norm)
        self._layers = [_layer(layer, norm, shapes[i], fused) for i, layer in enumerate(parts["layers"].children())]
        weight = next(parts["embed_tokens"].parameters())
        self._cos, self._sin = _rotary_table(parts["rotary_emb"], weight, max_positions)
        if self._cos.shape[1] != shapes[0].key_width:
            raise NotImplementedError("heads are rotated in part")

    def __call__(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states ``[N, H]`` of ``tokens`` ``[N]`` at ``positions`` ``[N]``."""
        x, delta = self._embed(tokens), None
        cos, sin = (table.index_select(0, positions)[:, None] for table in (self._cos, self._sin))
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


def _layer(layer: nn.Module, norm: Callable[[nn.Module], RowFn], shape: AttentionShape, fused: Fused) -> _Layer:
    parts = _children(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    projections = {*_QUERY_KEY_VALUE, "o_proj"}
    head_norms = {"q_norm", "k_norm"}
    attention = _children(parts["self_attn"], projections, head_norms)
    mlp = _children(parts["mlp"], {*_GATE_UP, "down_proj", "act_fn"})
    with_norms = head_norms <= attention.keys()
    return _Layer(
        input_norm=_add_norm(parts["input_layernorm"], norm),
        query_key_value=_split([attention[name] for name in _QUERY_KEY_VALUE], fused),
        query_norm=norm(attention["q_norm"]) if with_norms else None,
        key_norm=norm(attention["k_norm"]) if with_norms else None,
        output=_linear(attention["o_proj"]),
        post_norm=_add_norm(parts["post_attention_layernorm"], norm),
        gate_up=_split([mlp[name] for name in _GATE_UP], fused),
        gated=_gated(mlp["act_fn"]),
        down=_linear(mlp["down_proj"]),
        shape=shape,
    )


def _children(module: nn.Module, needed: set[str], optional: set[str] | None = None) -> dict[str, nn.Module]:
    children = dict(module.named_children())
    extra = children.keys() - needed - (optional or set())
    if extra or needed - children.keys():
        raise NotImplementedError(f"{type(module).__name__} holds {sorted(children)}, not {sorted(needed)}")
    return children


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


def fuse_projections_(model: nn.Module) -> dict[nn.Module, RowFn]:
    """Give layers that read one input common tensors, see `lqrl.quant.fused.fuse_`; before weights are loaded."""
    fused: dict[nn.Module, RowFn] = {}
    for module in model.modules():
        for names in (_QUERY_KEY_VALUE, _GATE_UP):
            children = dict(module.named_children())
            layers = [children[name] for name in names if name in children]
            product = fuse_(layers) if len(layers) == len(names) else None
            if product is not None:
                fused[layers[0]] = product
    return fused


def _split(layers: Sequence[nn.Module], fused: Fused) -> SplitFn:
    product = fused.get(layers[0])
    if product is None:
        functions = [_linear(layer) for layer in layers]
        return lambda x: [function(x) for function in functions]
    widths = [int(layer.out_features) for layer in layers]  # pyright: ignore[reportArgumentType]
    return lambda x: product(x).split(widths, -1)


def _linear(module: nn.Module) -> RowFn:
    """The layer without the module call, which costs as much as a small product."""
    if type(module) is nn.Linear:
        return partial(F.linear, weight=module.weight, bias=module.bias)
    return module.forward


def _norm(module: nn.Module, *, eps: float, fused: bool) -> RowFn:
    if not fused:
        return module.forward
    weight = next(module.parameters())
    return partial(F.rms_norm, normalized_shape=list(weight.shape), weight=weight, eps=eps)


def _rotary_table(rotary: nn.Module, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cosines ``[length, D]`` and sines whose first half has its sign turned: rotation is then a swap of halves."""
    cos, sin = rotary(like.new_zeros(1, 1, 1), torch.arange(length, device=like.device)[None])
    half = sin.shape[-1] // 2
    return cos[0].contiguous(), torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
