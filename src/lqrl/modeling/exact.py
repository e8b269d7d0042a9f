"""Exact mode: the modules of a decoder replaced by ones whose bits depend on nothing but a token and what precedes it.

Learner and engine call the same functions on the same numbers, row by row, so the log-probs of both are equal as bits.
What stays is exact already: gathers, and sums and products of two elements, which IEEE arithmetic rounds one way.
Backward passes may use any kernel. The learner may be built on the CPU and moved to the engine's device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lqrl.modeling.arithmetic import RMSNormFunction
from lqrl.modeling.backbone import STATIC_ROPE
from lqrl.quant import exact
from lqrl.quant.linear import AlignedLinear, QuantizedLinear
from lqrl.quant.lora import LoraLinear
from lqrl.quant.methods import FullPrecision
from lqrl.quant.methods.exact import exact_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SUPPORTED = "exact mode runs Llama, Mistral, Qwen2 and Qwen3"


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return exact.silu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


class ExactRMSNorm(nn.Module):
    """RMSNorm over the last dimension; it takes over the ``weight`` of the norm it replaces.

    Args:
        weight: ``[D]``.
        eps: added to the mean of squares.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., D]`` in its own dtype, which must be the weight's."""
        return RMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon, exact.rms_norm)


class ExactSiLU(nn.Module):
    """``x / (1 + exp(-x))``."""

    def forward(self, input: Tensor) -> Tensor:
        """Any shape."""
        return _SiLU.apply(input)


class ExactRotary(nn.Module):
    """Rotary angles from a table that grows; an entry depends on its position alone.

    Args:
        frequencies: ``[D / 2]``.
        scaling: factor of cosines and sines.
    """

    inv_freq: Tensor

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.attention_scaling = scaling
        self._table = torch.empty(2, 0, 0)  # on the device of the frequencies

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B, N, D]`` in the dtype of ``x`` at positions ``[B, N]``."""
        longest = int(position_ids.max()) + 1
        if longest > self._table.shape[1] or self._table.device != self.inv_freq.device:
            halves = exact.rotary_table(self.inv_freq, max(256, 1 << (longest - 1).bit_length()))
            self._table = torch.stack([torch.cat([half, half], -1) * self.attention_scaling for half in halves])
        rows = self._table.index_select(1, position_ids.flatten()).to(x.dtype)
        cos, sin = rows.view(2, *position_ids.shape, -1)
        return cos, sin


def exact_learner_(model: PreTrainedModel, export_dtype: torch.dtype) -> int:
    """Make the learner's forward exact, in place; parameters keep their names.

    Call it after `lqrl.quant.prepare_` and `lqrl.quant.add_adapters_`.

    Args:
        model: loaded by `lqrl.modeling.backbone.load_model`, with aligned layers or without.
        export_dtype: the engine's dtype.

    Returns:
        How many modules were replaced or changed.

    Raises:
        NotImplementedError: naming what cannot be exact.
    """

    def swap(name: str, linear: nn.Linear) -> nn.Module:
        if not isinstance(linear, AlignedLinear):
            return AlignedLinear(linear, exact_method(FullPrecision()), export_dtype)
        if isinstance(linear, LoraLinear):
            linear.exact = True
        linear.method = exact_method(linear.method)
        linear.invalidate()
        return linear

    return _swap_(model, swap)


def exact_engine_(model: PreTrainedModel) -> int:
    """Make the engine's layers exact, in place; call it after `lqrl.quant.convert_` and ``attach_adapters_``.

    A plain output head stays as it is: `lqrl.engines.decoder.Decoder` multiplies with its weight itself.

    Returns:
        How many modules were replaced or changed.

    Raises:
        NotImplementedError: naming what cannot be exact, the device too.
    """
    head = model.get_output_embeddings()

    def swap(name: str, linear: nn.Module) -> nn.Module:
        if linear is head and isinstance(linear, nn.Linear):
            return linear
        if isinstance(linear, nn.Linear):
            return QuantizedLinear(linear, exact_method(FullPrecision()))
        assert isinstance(linear, QuantizedLinear)
        linear.exact = True
        linear.use_method(exact_method(linear.method))
        return linear

    return _swap_(model, swap)


def _swap_(model: PreTrainedModel, linear: Callable[[str, Any], nn.Module]) -> int:
    """Replace every module that computes; what is not known is refused before anything is replaced."""
    exact.check_device(next(model.parameters()).device)
    norms, rotaries = _known(model)
    modules = dict(model.named_modules())
    replaced: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if isinstance(modules.get(name.rpartition(".")[0]), (LoraLinear, QuantizedLinear)):
            continue  # the factors of an adapter; its layer multiplies with them
        if isinstance(module, (nn.Linear, QuantizedLinear)):
            replaced[name] = module
        elif type(module) in norms:
            eps: Any = module.variance_epsilon
            replaced[name] = ExactRMSNorm(next(module.parameters()), eps)
        elif type(module) in rotaries:
            scaling: Any = module.attention_scaling
            replaced[name] = ExactRotary(module.get_buffer("inv_freq"), scaling)
        elif is_silu(module):
            replaced[name] = ExactSiLU()
        elif not isinstance(module, nn.Embedding) and next(module.children(), None) is None:
            raise NotImplementedError(f"{name} ({type(module).__name__}) has no exact counterpart; {_SUPPORTED}")
    for name, module in replaced.items():
        new = linear(name, module) if isinstance(module, (nn.Linear, QuantizedLinear)) else module
        model.set_submodule(name, new)
    return len(replaced)


def _known(model: PreTrainedModel) -> tuple[set[type[nn.Module]], set[type[nn.Module]]]:
    """Norms and rotary embeddings of the architectures whose forward is known to be row by row."""
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.mistral import modeling_mistral as mistral
    from transformers.models.qwen2 import modeling_qwen2 as qwen2
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    models = {llama.LlamaForCausalLM, mistral.MistralForCausalLM, qwen2.Qwen2ForCausalLM, qwen3.Qwen3ForCausalLM}
    if type(model) not in models:
        raise NotImplementedError(f"{type(model).__name__}: {_SUPPORTED}; set exact to false")
    config: Any = model.config
    if config.rope_parameters.get("rope_type", "default") not in STATIC_ROPE:
        raise NotImplementedError(f"{config.rope_parameters}: rotary frequencies that follow the length are not exact")
    return (
        {llama.LlamaRMSNorm, mistral.MistralRMSNorm, qwen2.Qwen2RMSNorm, qwen3.Qwen3RMSNorm},
        {
            llama.LlamaRotaryEmbedding,
            mistral.MistralRotaryEmbedding,
            qwen2.Qwen2RotaryEmbedding,
            qwen3.Qwen3RotaryEmbedding,
        },
    )


def is_silu(module: nn.Module) -> bool:
    """Whether ``module`` computes SiLU and nothing else."""
    from transformers.activations import SiLUActivation

    return type(module) in (nn.SiLU, SiLUActivation, ExactSiLU)
