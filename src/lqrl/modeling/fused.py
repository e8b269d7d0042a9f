"""A learner's layers on CUDA with one kernel where transformers runs many: norms, rotary embeddings, gated SiLU.

Forward they compute what transformers computes, with its roundings; norms and SiLU are the kernels of the embedded
engine. Less is kept for the backward pass: a norm keeps its input, a gated SiLU its two. Where the linear layers
behind them quantize tokens, as their engine does, the same kernels give the codes. What a kernel does not serve, such
as another dtype, goes through transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lqrl.modeling.arithmetic import RMSNormFunction, known_types
from lqrl.modeling.attention import lqrl_attention
from lqrl.modeling.exact import is_silu
from lqrl.quant import exact
from lqrl.quant.carried import carry
from lqrl.quant.methods.base import Coded, TokenCodes
from lqrl.quant.shared_input import products, shared_codes
from lqrl.quant.triton_use import TENSOR_CORES_FP8, TENSOR_CORES_INT8, use_triton

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WIDEST = 16384  # elements of a row that one program norms
_CAPABILITY: dict[TokenCodes, tuple[int, int]] = {"int8": TENSOR_CORES_INT8, "fp8_e4m3": TENSOR_CORES_FP8}


class _Quantizing:
    """Kernels of a norm and of a gated SiLU that quantize what they make; the codes are kept until they are carried."""

    def __init__(self, kind: TokenCodes) -> None:
        self.kind: TokenCodes = kind
        self.coded: Coded | None = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`exact.rms_norm`."""
        from lqrl.quant.triton_norm_quantize import rms_norm_kept

        out, inverse, coded = rms_norm_kept(x, weight, eps, self.kind)
        self.coded = Coded(*coded)
        return out, inverse

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`exact.silu_mul`."""
        from lqrl.quant.triton_norm_quantize import silu_mul_kept

        gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
        out, coded = silu_mul_kept(gate, up, self.kind)
        self.coded = Coded(*coded)
        return out

    def carried_by(self, x: Tensor, readers: int) -> Tensor:
        """``x``, what was made, with its codes for ``readers`` layers."""
        if self.coded is not None:
            carry(x, self.kind, self.coded, readers)
        return x


class _GatedSiLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernel: Callable[[Tensor, Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        return kernel(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        from lqrl.quant.triton_gradients import silu_mul_gradient

        return *silu_mul_gradient(grad, *ctx.saved_tensors), None


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        from lqrl.quant.triton_gradients import rotate

        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        from lqrl.quant.triton_gradients import rotate

        return rotate(grad, *ctx.saved_tensors, back=True), None, None


def _norm(norm: Any, hidden_states: Tensor, readers: Callable[[], tuple[nn.Module, ...]] = tuple) -> Tensor:
    """``readers``: the linear layers that read the result, and nothing else does."""
    weight: Tensor = norm.weight
    fits = hidden_states.dtype == weight.dtype and weight.numel() <= _WIDEST
    if not fits or not use_triton(hidden_states):
        return type(norm).forward(norm, hidden_states)
    layers = readers()
    kind = shared_codes(layers, hidden_states.device)
    if kind is None or not use_triton(hidden_states, _CAPABILITY[kind]):
        return RMSNormFunction.apply(hidden_states, weight, norm.variance_epsilon, exact.rms_norm)
    quantizing = _Quantizing(kind)
    out = RMSNormFunction.apply(hidden_states, weight, norm.variance_epsilon, quantizing.rms_norm)
    return quantizing.carried_by(out, len(layers))


def _gated(mlp: Any, x: Tensor) -> Tensor:
    gate, up = products(x, _gate_up(mlp))
    if gate.dtype != up.dtype or not use_triton(gate):
        return mlp.down_proj(mlp.act_fn(gate) * up)
    down = (mlp.down_proj,)
    kind = shared_codes(down, gate.device)
    rows = gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1])
    if kind is None or not use_triton(gate, _CAPABILITY[kind]):
        return mlp.down_proj(_GatedSiLU.apply(*rows, exact.silu_mul).view(gate.shape))
    quantizing = _Quantizing(kind)
    product = _GatedSiLU.apply(*rows, quantizing.silu_mul).view(gate.shape)
    return products(quantizing.carried_by(product, 1), down)[0]


def _gate_up(mlp: Any) -> tuple[nn.Module, ...]:
    return mlp.gate_proj, mlp.up_proj


def _query_key_value(attention: Any) -> tuple[nn.Module, ...]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _attention(
    attention: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    cos, sin = position_embeddings
    if cos.dtype != hidden_states.dtype or not use_triton(hidden_states):  # such as angles in fp32
        return type(attention).forward(
            attention, hidden_states=hidden_states, position_embeddings=position_embeddings, **kwargs
        )
    rows, width = hidden_states.shape[:-1], attention.head_dim
    projections = products(hidden_states, _query_key_value(attention))
    query, key, value = (y.view(*rows, -1, width) for y in projections)
    if getattr(attention, "q_norm", None) is not None:
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key = (
        _Rotate.apply(x.flatten(0, -3), cos.flatten(0, -2), sin.flatten(0, -2)).view(x.shape) for x in (query, key)
    )
    out, _ = lqrl_attention(
        attention,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        sliding_window=_window(attention),
        **kwargs,
    )
    return attention.o_proj(out.reshape(*rows, -1)), None


def _window(attention: Any) -> int | None:
    """Where each architecture keeps it; Llama has none."""
    holder = attention.config if "Mistral" in type(attention).__name__ else attention
    return getattr(holder, "sliding_window", None)


def fuse_layers_(model: PreTrainedModel) -> int:
    """Give the layers of a decoder on CUDA these kernels, in place; modules and parameters keep their names.

    Call it after everything that replaces modules. Known are Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE as transformers
    has them; modules that something else has changed are left as they are.

    Args:
        model: loaded by `lqrl.modeling.backbone.load_model`.

    Returns:
        How many modules were changed.
    """
    norms, gated, attentions, layers = known_types("RMSNorm", "MLP", "Attention", "DecoderLayer")
    readers: dict[nn.Module, Callable[[], tuple[nn.Module, ...]]] = {}
    for layer in model.modules():
        if type(layer) in layers:
            attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
            readers[layer.get_submodule("input_layernorm")] = partial(_query_key_value, attention)
            if type(mlp) in gated:  # a router's experts read more than one tensor
                readers[layer.get_submodule("post_attention_layernorm")] = partial(_gate_up, mlp)
    changed = 0
    for module in model.modules():
        forward = None
        if "forward" in vars(module):
            continue
        if type(module) in norms:
            forward = _norm
        elif type(module) in gated and is_silu(module.get_submodule("act_fn")):
            forward = _gated
        elif type(module) in attentions:
            forward = _attention
        if forward is not None:
            module.forward = MethodType(forward, module)
            if module in readers:
                module.forward = partial(module.forward, readers=readers[module])
            changed += 1
    return changed
