"""LoRA on low-bit linear layers: the value `Lora`, and the learner's two kinds of layers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lqrl.quant import exact
from lqrl.quant.linear import AlignedLinear, BackwardMode, Quantized
from lqrl.quant.low_rank import low_rank
from lqrl.quant.scheme import QuantScheme, TensorFormat
from lqrl.quant.targets import target_modules

ADAPTER_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<layer>.+)\.(?P<factor>lora_[AB])(?:\.[^.]+)?\.weight$")
"""An adapter's tensor as peft names it, in a model (``lora_A.default.weight``) or in a file (``base_model.model.``)."""

_EVERY_LINEAR = QuantScheme("every linear layer", TensorFormat("int8", "channel"))


@dataclass(frozen=True)
class Lora:
    """LoRA (arXiv 2106.09685) on a frozen, quantized base, as in QeRL (arXiv 2510.11696).

    ``adapter``: the engine holds the base's codes and the adapters beside them, in the compute dtype; after the first
    refresh only adapters, norms and biases are sent. Learner and engine compute ``Q(W) x + s B (A x)``.
    ``merge``: the engine gets ``Q(W + s B A)``, merged in fp32 and rounded to the export dtype before it is quantized;
    names and shapes are those of the plain model, so any engine can load it. The learner computes with the very same
    codes, straight-through to ``A`` and ``B``. **int4 and fp4 steps can swallow a small adapter**: in int4 with groups
    of 128 an adapter of 5.6e-4 rms keeps a cosine of 0.02 with what arrives, one of 5.7e-3 keeps 0.92. A run that
    starts at ``B = 0`` begins there; prefer ``adapter`` for 4-bit bases.

    What is trained is kept in fp32, whatever the dtype of the frozen masters. QeRL's scripts take ``r = alpha = 16``
    or 32 on all linear layers and train the norms too (``train_norms``).

    Attributes:
        r: rank.
        alpha: the adapter is scaled by ``alpha / r``.
        dropout: only 0: rollouts are drawn without dropout, so the learner must score without it.
        target_modules: last names of linear layers (``q_proj``) or whole ones, or ``all-linear``: all but the output
            head, routers, and experts kept as stacked parameters.
        train_norms: train the norms' weights as well.
        refresh: see above.

    Raises:
        ValueError: when a value is out of range.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    train_norms: bool = False
    refresh: Literal["merge", "adapter"] = "adapter"

    def __post_init__(self) -> None:
        if not isinstance(self.target_modules, str):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        if self.r < 1 or self.alpha <= 0:
            raise ValueError(f"Lora: r and alpha must be positive, got {self.r} and {self.alpha}")
        if self.dropout != 0:
            raise ValueError(
                f"Lora.dropout={self.dropout}: rollouts are drawn without dropout, so the learner's log-probs would be "
                "another policy's; leave it at 0"
            )
        if not self.target_modules:
            raise ValueError("Lora.target_modules is empty, so nothing would be trained; name layers or 'all-linear'")
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            raise ValueError(f"Lora.target_modules={self.target_modules!r}: give a list of names, or 'all-linear'")

    @property
    def scaling(self) -> float:
        """``alpha / r``."""
        return self.alpha / self.r

    def targets(self, model: nn.Module) -> list[str]:
        """Names of the linear layers that get an adapter, in module order; equal for learner and engine.

        Raises:
            ValueError: when a name matches no layer; the message lists the names there are.
        """
        linear = [name for name in target_modules(model, _EVERY_LINEAR) if _is_linear(model, name)]
        if self.target_modules == "all-linear":
            return linear
        for wanted in self.target_modules:
            if not any(f".{name}".endswith(f".{wanted}") for name in linear):
                last = sorted({name.rpartition(".")[2] for name in linear})
                raise ValueError(
                    f"Lora.target_modules: no linear layer of {type(model).__name__} is named {wanted!r}; there are "
                    f"{', '.join(last)} (the output head and routers take no adapter)"
                )
        suffixes = tuple(f".{wanted}" for wanted in self.target_modules)
        return [name for name in linear if f".{name}".endswith(suffixes)]


def _is_linear(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), nn.Linear)


class LoraLinear(AlignedLinear):
    """A learner's linear layer with a frozen weight and an adapter ``B A``; base of the two kinds.

    Parameters: ``weight`` and ``bias`` of the layer, ``lora_A.weight`` ``[r, K]`` and ``lora_B.weight`` ``[N, r]``,
    fp32.

    Args:
        linear: as for `AlignedLinear`.
        a, b: the adapter's linear layers, made by peft; their weights are taken over as fp32.
        scaling: ``alpha / r``.

    Attributes:
        exact: the adapter's products have one order of summation, see `lqrl.modeling.exact`.
    """

    def __init__(self, linear: AlignedLinear, a: nn.Linear, b: nn.Linear, scaling: float) -> None:
        super().__init__(linear, linear.method, linear.export_dtype, linear.backward_mode)
        self.lora_A, self.lora_B, self.scaling = a.float(), b.float(), scaling
        self.exact = False
        self.requires_grad_(False)
        for factor in (self.lora_A, self.lora_B):
            factor.requires_grad_(True)

    def merged_weight(self) -> Tensor:
        """``W + scaling * B A`` in fp32, without gradient."""
        with torch.no_grad():
            a, b = self.lora_A.weight.float(), self.lora_B.weight.float()
            product = exact.linear(b, exact.pack(a.t())) if self.exact else b @ a
            return self.weight.float() + self.scaling * product

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{super().extra_repr()}, r={self.lora_A.out_features}, scaling={self.scaling}"


class AdaptedLinear(LoraLinear):
    """``Q(W) x + scaling * B (A x)``: the base in the engine's codes, the adapter beside it in the compute dtype."""

    def _aligned(self, x: Tensor) -> Tensor:
        y = super()._aligned(x)
        a, b = (factor.weight.to(self.export_dtype).to(x.dtype) for factor in (self.lora_A, self.lora_B))
        return low_rank(y, x, a, b, self.scaling, self.exact)


class MergedLinear(LoraLinear):
    """``Q(W + scaling * B A) x``: the forward uses the codes of the merged weight, which are those that are shipped.

    Backward is straight-through: with ``dW = dy^T x`` of a plain layer, ``dA = scaling * B^T dW`` and
    ``dB = scaling * dW A^T``, computed without ``dW``.
    """

    def sources(self) -> tuple[Tensor, ...]:
        """The parameters that decide the codes."""
        return self.weight, self.lora_A.weight, self.lora_B.weight

    def exported_weight(self) -> Tensor:
        """The merged weight as it is exported, before it is quantized."""
        return self.merged_weight().to(self.export_dtype)

    def _aligned(self, x: Tensor) -> Tensor:
        return _MergedStraightThrough.apply(
            x, self.lora_A.weight, self.lora_B.weight, self, self._quantized(), self.backward_mode
        )


class _MergedStraightThrough(torch.autograd.Function):
    """Forward: the engine's kernel on the merged codes. Backward: see `MergedLinear`; weight and bias are frozen."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, layer: MergedLinear, quantized: Quantized, backward: BackwardMode
    ) -> Tensor:
        ctx.save_for_backward(x, a, b, layer.weight)
        ctx.scaling = layer.scaling
        ctx.dequantized = quantized if backward == "dequantized" else None
        bias = None if layer.bias is None else layer.bias.to(layer.export_dtype)
        return quantized.method.linear(x, quantized.operands, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, a, b, weight = ctx.saved_tensors
        rows, used = grad_y.reshape(-1, grad_y.shape[-1]), ctx.dequantized
        low_a, low_b = a.to(rows.dtype), b.to(rows.dtype)
        narrow = (rows @ low_b) * ctx.scaling  # [tokens, r]
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            if used is None:
                grad_x = rows @ weight.to(rows.dtype) + narrow @ low_a
            else:
                grad_x = rows @ used.method.dequantize(used.tensors, rows.dtype)
            grad_x = grad_x.view(x.shape)
        inputs = (x if used is None else used.method.round_input(x)).reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_a = (narrow.t() @ inputs).to(a.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = ((rows.t() @ (inputs @ low_a.t())) * ctx.scaling).to(b.dtype)
        return grad_x, grad_a, grad_b, None, None, None
