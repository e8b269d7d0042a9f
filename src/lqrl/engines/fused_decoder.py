"""The decoder layers on CUDA in few launches: norm, product, rotation and cache, attention, product; norm, and so on.

Sums, roundings and order are those of transformers' layers but for attention, which keeps fp32 where they round, and
for the sums inside norms. In exact mode all of it has the bits of the exact modules, whose kernels, or whose arithmetic
inside larger ones, these are. Keys and values never exist apart from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lqrl.engines import coded_steps
from lqrl.engines.layers import (
    DecoderParts,
    Fused,
    LayerParts,
    Rotation,
    RowFn,
    linear,
    split_product,
    take_apart,
)
from lqrl.engines.slots import PrefillContext, SlotContext
from lqrl.modeling.attention import AttentionContext
from lqrl.modeling.backbone import AttentionShape
from lqrl.modeling.exact import is_silu
from lqrl.quant import exact
from lqrl.quant.fused import PlainProduct

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WIDEST_HEAD = 256


@dataclass(frozen=True)
class _Layer:
    """The four steps of a layer around its attention.

    A step holds a product and what makes the product's input, so that a format that quantizes tokens can do both in
    one kernel.

    Attributes:
        project: stream and the last step's result to the new stream, and query, key and value.
        output: attention to the result that is added to the stream.
        expand: as ``project``, to gate and up, or to the activated product of the two alone.
        contract: what ``expand`` gives to the result that is added to the stream.
    """

    project: Callable[[Tensor, Tensor | None], tuple[Tensor, Sequence[Tensor]]]
    rotation: Rotation
    shape: AttentionShape
    output: RowFn
    expand: Callable[[Tensor, Tensor | None], tuple[Tensor, Sequence[Tensor]]]
    contract: Callable[[Sequence[Tensor]], Tensor]


class FusedDecoder:
    """Runs the layers of `lqrl.engines.layers.DecoderParts` on Triton kernels and the layers' own products.

    Args:
        model: whose modules are read; their tensors may change in place, not move.
        shapes: of each attention layer, see `lqrl.modeling.backbone.attention_shapes`.
        max_positions: length of the rotary table.
        fused: products of `lqrl.engines.layers.fuse_projections_`.

    Raises:
        NotImplementedError: when the model is built otherwise, or has norms or heads that the kernels do not know.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Mapping[int, AttentionShape],
        max_positions: int,
        fused: Fused = MappingProxyType({}),
    ) -> None:
        parts = take_apart(model, shapes, max_positions)
        self._embed = parts.embed.forward
        self._layers = [_layer(layer, parts, fused) for layer in parts.layers]
        self._norm = _add_norm(parts.norm)

    def __call__(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states ``[N, H]`` of ``tokens`` ``[N]`` at ``positions`` ``[N]``.

        Raises:
            TypeError: for a context without a slot cache.
        """
        if not isinstance(context, SlotContext):
            raise TypeError(f"fused layers attend over a slot cache, not through {type(context).__name__}")
        x, delta = self._through(self._layers, self._embed(tokens), context)
        return self._norm(x, delta)[1]

    def last(self, tokens: Tensor, context: PrefillContext) -> Tensor:
        """Hidden states ``[S, H]`` of the last token of each prompt of ``context``.

        Those of a call, up to rounding, and with its bits in exact mode. Of the last layer, the other tokens are given
        keys and values alone, which is what later tokens need of them.
        """
        *layers, layer = self._layers
        x, product = layer.project(*self._through(layers, self._embed(tokens), context))
        attended = context.attend_last(len(layers), product, layer.rotation, layer.shape)
        x, gate_up = layer.expand(x.index_select(0, context.last), layer.output(attended))
        return self._norm(x, layer.contract(gate_up))[1]

    @staticmethod
    def _through(layers: Sequence[_Layer], x: Tensor, context: SlotContext) -> tuple[Tensor, Tensor | None]:
        """The stream behind the first layers, in two summands."""
        delta = None
        for index, layer in enumerate(layers):
            x, product = layer.project(x, delta)
            delta = layer.output(context.attend_product(index, product, layer.rotation, layer.shape))
            x, gate_up = layer.expand(x, delta)
            delta = layer.contract(gate_up)
        return x, delta


def _layer(parts: LayerParts, decoder: DecoderParts, fused: Fused) -> _Layer:
    width, value_width = parts.shape.key_width, parts.shape.value_width
    if max(width, value_width) > _WIDEST_HEAD or width % 2:
        raise NotImplementedError(f"heads of {width} and {value_width} elements; the kernels take even ones up to 256")
    query_norm, key_norm = (
        None if norm is None else _norm_weight(norm)[0] for norm in (parts.query_norm, parts.key_norm)
    )
    gated = is_silu(parts.activation) and type(parts.down) is nn.Linear
    return _Layer(
        project=_normed_product(parts.input_norm, parts.query_key_value, fused),
        rotation=Rotation(*decoder.rotary, query_norm, key_norm, decoder.eps),
        shape=parts.shape,
        output=linear(parts.output, few_rows=True),
        expand=_normed_product(parts.post_norm, parts.gate_up, fused, gated=gated),
        contract=_gated_product(parts.activation, parts.down),
    )


def _norm_weight(norm: nn.Module) -> tuple[Tensor, float]:
    """Weight and epsilon of an RMSNorm as Llama has it; those of other models multiply otherwise."""
    names = [name for name, _ in norm.named_parameters()]
    eps: Any = getattr(norm, "variance_epsilon", None)
    if names != ["weight"] or eps is None:
        raise NotImplementedError(f"{type(norm).__name__} is another norm than the kernels compute")
    return norm.get_parameter("weight"), float(eps)


def _add_norm(norm: nn.Module) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    weight, eps = _norm_weight(norm)

    def add_norm(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return (x, exact.rms_norm(x, weight, eps)[0]) if delta is None else exact.add_rms_norm(x, delta, weight, eps)

    return add_norm


def _normed_product(
    norm: nn.Module, layers: Sequence[nn.Module], fused: Fused, *, gated: bool = False
) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Sequence[Tensor]]]:
    quantizing = coded_steps.normed_product(*_norm_weight(norm), layers, fused)
    if quantizing is not None:
        return quantizing
    add_norm, product, whole = _add_norm(norm), split_product(layers, fused, few_rows=True), fused.get(layers[0])

    def run(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        x, h = add_norm(x, delta)
        activated = whole.gated(h) if gated and isinstance(whole, PlainProduct) else None
        return x, product(h) if activated is None else (activated,)

    return run


def _gated_product(activation: nn.Module, down: nn.Module) -> Callable[[Sequence[Tensor]], Tensor]:
    product, function = linear(down, few_rows=True), activation.forward
    if is_silu(activation):
        quantizing = coded_steps.gated_product(down)
        if quantizing is not None:
            return quantizing
        return lambda gate_up: product(gate_up[0] if len(gate_up) == 1 else exact.silu_mul(*gate_up))
    return lambda gate_up: product(function(gate_up[0]) * gate_up[1])
