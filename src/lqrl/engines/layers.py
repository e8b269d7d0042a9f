"""The common decoder taken apart: which modules a layer is made of, and products of layers that read one input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lqrl.modeling.backbone import STATIC_ROPE, AttentionShape
from lqrl.quant.fused import PlainProduct, fuse_
from lqrl.quant.hopper_gemm import plain_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RowFn = Callable[[Tensor], Tensor]
SplitFn = Callable[[Tensor], Sequence[Tensor]]
Fused = Mapping[nn.Module, RowFn]
"""The product of several layers by the first of them."""
_QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class LayerParts:
    """The modules of one layer, and the shape of its attention."""

    input_norm: nn.Module
    query_key_value: tuple[nn.Module, ...]
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    output: nn.Module
    post_norm: nn.Module
    gate_up: tuple[nn.Module, ...]
    activation: nn.Module
    down: nn.Module
    shape: AttentionShape


class RotaryTable(NamedTuple):
    """Cosines ``[P, D]`` and sines whose first half has its sign turned: rotation is then a swap of halves."""

    cos: Tensor
    sin: Tensor


class Rotation(NamedTuple):
    """What turns the heads of one layer.

    Attributes:
        cos, sin: of `RotaryTable`, in the compute dtype.
        query_norm, key_norm: ``[D]`` weights of the head norms, or ``None``.
        eps: of the norms.
    """

    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class DecoderParts:
    """``embed, [norm, attention, norm, gated MLP] * layers, norm`` of Llama, Mistral, Qwen2, Qwen3 and Gemma.

    Attributes:
        eps: of all norms.
        rotary: in the dtype of the embedding.
    """

    embed: nn.Module
    layers: list[LayerParts]
    norm: nn.Module
    eps: float
    rotary: RotaryTable


def take_apart(model: PreTrainedModel, shapes: Mapping[int, AttentionShape], max_positions: int) -> DecoderParts:
    """The parts of ``model``, whose tensors may change in place, not move.

    Args:
        model: see `DecoderParts`.
        shapes: of each attention layer, see `lqrl.modeling.backbone.attention_shapes`.
        max_positions: length of the rotary table.

    Raises:
        NotImplementedError: when the model is built otherwise.
    """
    parts = _children(model.get_decoder(), {"embed_tokens", "layers", "norm", "rotary_emb"})
    config: Any = model.config
    if config.rope_parameters.get("rope_type", "default") not in STATIC_ROPE:
        raise NotImplementedError("rotary frequencies that follow the length have no table")
    layers = [_layer(layer, shapes[i]) for i, layer in enumerate(parts["layers"].children())]
    rotary = _rotary_table(parts["rotary_emb"], next(parts["embed_tokens"].parameters()), max_positions)
    if rotary.cos.shape[1] != shapes[0].key_width:
        raise NotImplementedError("heads are rotated in part")
    return DecoderParts(parts["embed_tokens"], layers, parts["norm"], config.rms_norm_eps, rotary)


def _layer(layer: nn.Module, shape: AttentionShape) -> LayerParts:
    parts = _children(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    head_norms = {"q_norm", "k_norm"}
    attention = _children(parts["self_attn"], {*_QUERY_KEY_VALUE, "o_proj"}, head_norms)
    mlp = _children(parts["mlp"], {*_GATE_UP, "down_proj", "act_fn"})
    with_norms = head_norms <= attention.keys()
    return LayerParts(
        input_norm=parts["input_layernorm"],
        query_key_value=tuple(attention[name] for name in _QUERY_KEY_VALUE),
        query_norm=attention["q_norm"] if with_norms else None,
        key_norm=attention["k_norm"] if with_norms else None,
        output=attention["o_proj"],
        post_norm=parts["post_attention_layernorm"],
        gate_up=tuple(mlp[name] for name in _GATE_UP),
        activation=mlp["act_fn"],
        down=mlp["down_proj"],
        shape=shape,
    )


def _children(module: nn.Module, needed: set[str], optional: set[str] | None = None) -> dict[str, nn.Module]:
    children = dict(module.named_children())
    extra = children.keys() - needed - (optional or set())
    if extra or needed - children.keys():
        raise NotImplementedError(f"{type(module).__name__} holds {sorted(children)}, not {sorted(needed)}")
    return children


def _rotary_table(rotary: nn.Module, like: Tensor, length: int) -> RotaryTable:
    cos, sin = rotary(like.new_zeros(1, 1, 1), torch.arange(length, device=like.device)[None])
    half = sin.shape[-1] // 2
    return RotaryTable(cos[0].contiguous(), torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1))


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


def split_product(layers: Sequence[nn.Module], fused: Fused, *, few_rows: bool = False) -> SplitFn:
    """The products of ``layers`` with one input, each ``[N, out]``: views of one where they are ``fused``.

    ``few_rows``: see `linear`.
    """
    product = fused.get(layers[0])
    if few_rows and isinstance(product, PlainProduct):
        product = product.few_rows
    if product is None:
        functions = [linear(layer, few_rows=few_rows) for layer in layers]
        return lambda x: [function(x) for function in functions]
    widths = [int(layer.out_features) for layer in layers]  # pyright: ignore[reportArgumentType]
    return lambda x: product(x).split(widths, -1)


def linear(module: nn.Module, *, few_rows: bool = False) -> RowFn:
    """The layer without the module call, which costs as much as a small product.

    ``few_rows``: a plain layer may round otherwise, as `lqrl.quant.hopper_gemm` does where it is faster.
    """
    if type(module) is nn.Linear:
        if few_rows and module.bias is None:
            return partial(plain_linear, weight=module.weight)
        return partial(F.linear, weight=module.weight, bias=module.bias)
    return module.forward
