"""A learner's layers on CUDA with one kernel where transformers runs many: norms, rotary embeddings, gated SiLU.

Forward they compute what transformers computes, with its roundings; norms and SiLU are the kernels of the embedded
engine. Less is kept for the backward pass: a norm keeps its input, a gated SiLU its two. What a kernel does not serve,
such as another dtype, goes through transformers' own code.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lqrl.modeling.arithmetic import RMSNormFunction, known_types
from lqrl.modeling.attention import lqrl_attention
from lqrl.modeling.exact import is_silu
from lqrl.quant import exact
from lqrl.quant.linear import products
from lqrl.quant.triton_use import use_triton

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WIDEST = 16384  # elements of a row that one program norms


class _GatedSiLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        return exact.silu_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        from lqrl.quant.triton_gradients import silu_mul_gradient

        return silu_mul_gradient(grad, *ctx.saved_tensors)


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


def _norm(norm: Any, hidden_states: Tensor) -> Tensor:
    weight: Tensor = norm.weight
    fits = hidden_states.dtype == weight.dtype and weight.numel() <= _WIDEST
    if not fits or not use_triton(hidden_states):
        return type(norm).forward(norm, hidden_states)
    return RMSNormFunction.apply(hidden_states, weight, norm.variance_epsilon, exact.rms_norm)


def _gated(mlp: Any, x: Tensor) -> Tensor:
    gate, up = products(x, (mlp.gate_proj, mlp.up_proj))
    if gate.dtype != up.dtype or not use_triton(gate):
        return mlp.down_proj(mlp.act_fn(gate) * up)
    product = _GatedSiLU.apply(gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1]))
    return mlp.down_proj(product.view(gate.shape))


def _attention(
    attention: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    cos, sin = position_embeddings
    if cos.dtype != hidden_states.dtype or not use_triton(hidden_states):  # such as angles in fp32
        return type(attention).forward(
            attention, hidden_states=hidden_states, position_embeddings=position_embeddings, **kwargs
        )
    rows, width = hidden_states.shape[:-1], attention.head_dim
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    query, key, value = (y.view(*rows, -1, width) for y in products(hidden_states, projections))
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
    norms, gated, attentions = known_types("RMSNorm", "MLP", "Attention")
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
            changed += 1
    return changed
