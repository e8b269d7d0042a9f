"""Where a decoder rounds to its compute dtype, and a learner that rounds where its engine does.

Engines and transformers compute norms and rotary embeddings in fp32 and store bf16, but not after the same operations.
In fp32 all of them are one arithmetic. Each part of a learner is changed alone, so that it has the bits of the engine's
part on the same input; the gradient is that of the function without rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lqrl.modeling.trial import kernels_work

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NormKernel = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Rows ``[..., D]``, weight ``[D]`` and epsilon to normed rows and fp32 inverse root mean squares ``[..., 1]``."""


@dataclass(frozen=True)
class Arithmetic:
    """Where a decoder in a low-precision dtype rounds, besides what its parts give; the defaults are transformers'.

    Attributes:
        rounds_sums: what a norm reads is the residual sum as it is stored, not as it was added in fp32.
        rounds_normed: normed values are rounded before the norm's weight multiplies them.
        rounds_rotated: a rotary embedding rounds its products and then their sum; otherwise the sum alone.
        rounds_logits: logits are rounded, rather than fp32 sums.
    """

    rounds_sums: bool = True
    rounds_normed: bool = True
    rounds_rotated: bool = True
    rounds_logits: bool = False


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm by any kernel forward, with the gradient in fp32; it keeps nothing as large as its input but that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernel: NormKernel) -> Tensor:  # type: ignore[override]
        """Normed rows of ``x`` ``[..., D]`` as ``kernel`` gives them."""
        out, inverse = kernel(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Gradients of ``x`` and ``weight`` in their dtypes."""
        x, weight, inverse = ctx.saved_tensors
        if kernels_work(x.device):
            from lqrl.quant.triton_gradients import rms_norm_gradient

            return *rms_norm_gradient(grad, x, weight, inverse, ctx.needs_input_grad[1]), None, None
        normed = x.float() * inverse
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            inner = grad.float() * weight.float()
            d_x = (inverse * (inner - normed * (inner * normed).mean(-1, keepdim=True))).to(x.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = (grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)
        return d_x, d_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, rounds_normed: bool) -> tuple[Tensor, Tensor]:
    """RMSNorm in fp32, rounded to the dtype of ``weight`` at the end.

    Args:
        x: ``[..., D]``, in fp32 where sums are not rounded.
        weight: ``[D]``.
        eps: added to the mean of squares.
        rounds_normed: see `Arithmetic`; once more before the weight multiplies, as transformers does.

    Returns:
        ``[..., D]`` in the dtype of ``weight``, and the fp32 inverse root mean squares ``[..., 1]``.
    """
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * inverse
    if rounds_normed:
        normed = normed.to(weight.dtype)
    return (normed * weight.float()).to(weight.dtype), inverse


class RoundedRMSNorm(nn.Module):
    """RMSNorm over the last dimension with an engine's rounding; it takes over the ``weight`` of the norm it replaces.

    Args:
        weight: ``[D]``.
        eps: added to the mean of squares.
        arithmetic: the engine's.
    """

    def __init__(self, weight: nn.Parameter, eps: float, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.arithmetic = weight, eps, arithmetic

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., D]`` to the dtype of the weight."""
        return RMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon, self._kernel)

    def _kernel(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, eps, rounds_normed=self.arithmetic.rounds_normed)


class WideRotary(nn.Module):
    """Rotary angles as they are stored, in fp32: queries and keys are turned in fp32.

    `lqrl.modeling.attention.lqrl_attention` rounds them to the dtype of the values.

    Args:
        rotary: gives cosines and sines in the compute dtype.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B, N, D]`` at positions ``[B, N]``, with values that the dtype of ``x`` holds."""
        cos, sin = self.rotary(x, position_ids)
        return cos.float(), sin.float()


def use_arithmetic_(model: PreTrainedModel, arithmetic: Arithmetic) -> int:
    """Make a decoder round where ``arithmetic`` does, in place; parameters keep their names.

    Call it once, after everything that looks for norms by their type. Logits are the caller's, see
    `lqrl.modeling.head.output_head`.

    Args:
        model: loaded by `lqrl.modeling.backbone.load_model`.
        arithmetic: the engine's.

    Returns:
        How many modules were replaced or changed; 0 for an architecture whose rounding in the engine is not known
        here. Known are Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE.
    """
    norms, rotaries, layers = known_types("RMSNorm", "RotaryEmbedding", "DecoderLayer")
    modules = {name: module for name, module in model.named_modules() if type(module) in norms | rotaries | layers}
    changed = 0
    for name, module in modules.items():
        new: nn.Module | None = None
        if type(module) in norms and not (arithmetic.rounds_normed and arithmetic.rounds_sums):
            eps: Any = module.variance_epsilon
            new = RoundedRMSNorm(next(module.parameters()), eps, arithmetic)
        elif type(module) in rotaries and not arithmetic.rounds_rotated:
            new = WideRotary(module)
        elif type(module) in layers and not arithmetic.rounds_sums:
            module.forward = MethodType(_layer_with_wide_sums, module)
            changed += 1
        if new is not None:
            model.set_submodule(name, new)
            changed += 1
    return changed


def _layer_with_wide_sums(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """A layer whose norms read sums in fp32; the stream itself is rounded before the next addition.

    Args:
        layer: of a decoder.
        hidden_states: ``[B, N, H]``; the embedding, or the last sum of the layer before in fp32.
        kwargs: of its attention.

    Returns:
        ``[B, N, H]`` fp32.
    """
    dtype = layer.input_layernorm.weight.dtype
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    total = hidden_states.to(dtype).float() + attended
    return total.to(dtype).float() + layer.mlp(layer.post_attention_layernorm(total))


def known_types(*parts: str) -> list[set[type[nn.Module]]]:
    """For each part, such as ``RMSNorm``, the classes of the architectures whose arithmetic is written out here."""
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.mistral import modeling_mistral as mistral
    from transformers.models.qwen2 import modeling_qwen2 as qwen2
    from transformers.models.qwen3 import modeling_qwen3 as qwen3
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

    families = {"Llama": llama, "Mistral": mistral, "Qwen2": qwen2, "Qwen3": qwen3, "Qwen3Moe": qwen3_moe}
    return [{getattr(module, name + part) for name, module in families.items()} for part in parts]
