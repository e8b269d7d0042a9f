"""A short cut through the common decoder layer: the same arithmetic as transformers', in fewer and cheaper calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lqrl.modeling.attention import AttentionContext
from lqrl.modeling.backbone import AttentionShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RowFn = Callable[[Tensor], Tensor]
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not follow the length


@dataclass(frozen=True)
class _Layer:
    """The functions of one layer, each ``[N, in]`` to ``[N, out]`` (head norms: over the last dimension)."""

    input_norm: RowFn
    query: RowFn
    key: RowFn
    value: RowFn
    query_norm: RowFn | None
    key_norm: RowFn | None
    output: RowFn
    post_norm: RowFn
    gate: RowFn
    up: RowFn
    activation: RowFn
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

    Raises:
        NotImplementedError: when the model is built otherwise.
    """

    def __init__(
        self, model: PreTrainedModel, shapes: Mapping[int, AttentionShape], max_positions: int, fused_norms: bool
    ) -> None:
        decoder: nn.Module = model.get_decoder()
        parts = _children(decoder, {"embed_tokens", "layers", "norm", "rotary_emb"})
        config: Any = model.config
        if config.rope_parameters.get("rope_type", "default") not in _STATIC_ROPE:
            raise NotImplementedError("rotary frequencies that follow the length have no table")
        norm = partial(_norm, eps=config.rms_norm_eps, fused=fused_norms)
        self._embed = parts["embed_tokens"].forward
        self._norm = norm(parts["norm"])
        self._layers = [_layer(layer, norm, shapes[i]) for i, layer in enumerate(parts["layers"].children())]
        weight = next(parts["embed_tokens"].parameters())
        self._cos, self._sin = _rotary_table(parts["rotary_emb"], weight, max_positions)
        if self._cos.shape[1] != shapes[0].key_width:
            raise NotImplementedError("heads are rotated in part")

    def __call__(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states ``[N, H]`` of ``tokens`` ``[N]`` at ``positions`` ``[N]``."""
        x = self._embed(tokens)
        cos, sin = (table.index_select(0, positions)[:, None] for table in (self._cos, self._sin))
        for index, layer in enumerate(self._layers):
            x = x + self._attention(index, layer, layer.input_norm(x), cos, sin, context)
            h = layer.post_norm(x)
            x = x + layer.down(layer.activation(layer.gate(h)) * layer.up(h))
        return self._norm(x)

    @staticmethod
    def _attention(index: int, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        tokens, shape = h.shape[0], layer.shape
        q = layer.query(h).view(tokens, -1, shape.key_width)
        k = layer.key(h).view(tokens, -1, shape.key_width)
        v = layer.value(h).view(tokens, -1, shape.value_width)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = layer.query_norm(q), layer.key_norm(k)
        both, half = torch.cat([q, k], 1), shape.key_width // 2
        turned = torch.cat([both[..., half:], both[..., :half]], -1).mul_(sin)
        q, k = both.mul_(cos).add_(turned).transpose(0, 1)[None].split([q.shape[1], k.shape[1]], 1)
        out = context.attend(index, q, k, v.transpose(0, 1)[None], shape.scaling, shape.sliding_window)
        return layer.output(out.reshape(tokens, -1))


def _layer(layer: nn.Module, norm: Callable[[nn.Module], RowFn], shape: AttentionShape) -> _Layer:
    parts = _children(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    head_norms = {"q_norm", "k_norm"}
    attention = _children(parts["self_attn"], projections, head_norms)
    mlp = _children(parts["mlp"], {"gate_proj", "up_proj", "down_proj", "act_fn"})
    with_norms = head_norms <= attention.keys()
    return _Layer(
        input_norm=norm(parts["input_layernorm"]),
        query=_linear(attention["q_proj"]),
        key=_linear(attention["k_proj"]),
        value=_linear(attention["v_proj"]),
        query_norm=norm(attention["q_norm"]) if with_norms else None,
        key_norm=norm(attention["k_norm"]) if with_norms else None,
        output=_linear(attention["o_proj"]),
        post_norm=norm(parts["post_attention_layernorm"]),
        gate=_linear(mlp["gate_proj"]),
        up=_linear(mlp["up_proj"]),
        activation=mlp["act_fn"].forward,
        down=_linear(mlp["down_proj"]),
        shape=shape,
    )


def _children(module: nn.Module, needed: set[str], optional: set[str] | None = None) -> dict[str, nn.Module]:
    children = dict(module.named_children())
    extra = children.keys() - needed - (optional or set())
    if extra or needed - children.keys():
        raise NotImplementedError(f"{type(module).__name__} holds {sorted(children)}, not {sorted(needed)}")
    return children


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
