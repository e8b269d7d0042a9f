"""The linear layers of both sides: `AlignedLinear` (learner) and `QuantizedLinear` (engine), one arithmetic.

The engine's output of a quantized layer is ``dtype((acc * weight_scale) * token_scale) + bias`` with an exact int32
``acc``. The learner's forward calls the same function on the same codes, so the two are equal bit for bit; its
backward is straight-through on the high-precision weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lqrl.quant import kernels
from lqrl.quant.numerics import quantize_int8_channel
from lqrl.quant.scheme import LowBitLinear, QuantScheme, TensorFormat


@dataclass(frozen=True)
class LinearMethod:
    """The four operations that make a format: a new format is a new value of this class.

    Attributes:
        code_dtype: dtype of the codes.
        quantize: weight ``[N, K]`` to codes and scales.
        pack: codes to the kernel's layout; may return the codes themselves.
        repack_: packed, codes: the same into existing storage.
        linear: x ``[..., K]``, packed, weight scales, bias: the layer's output ``[..., N]`` in x's dtype.
    """

    code_dtype: torch.dtype
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    pack: Callable[[Tensor], Tensor]
    repack_: Callable[[Tensor, Tensor], None]
    linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


INT8_W8A8 = LinearMethod(
    code_dtype=torch.int8,
    quantize=quantize_int8_channel,
    pack=kernels.int8_pack,
    repack_=kernels.int8_repack_,
    linear=kernels.int8_linear,
)

_METHODS: dict[tuple[TensorFormat | None, TensorFormat | None], LinearMethod] = {
    (TensorFormat("int8", "channel"), TensorFormat("int8", "token", dynamic=True)): INT8_W8A8,
}


def linear_method(scheme: QuantScheme) -> LinearMethod:
    """The operations that compute ``scheme``'s linear layers.

    Raises:
        ValueError: when no kernel computes this pair of formats.
    """
    method = _METHODS.get((scheme.weight, scheme.activation))
    if method is None:
        known = "; ".join(f"weight={w}, activation={a}" for w, a in _METHODS)
        raise ValueError(
            f"no kernel computes scheme {scheme.name!r} (weight={scheme.weight}, activation={scheme.activation}); "
            f"supported: {known}"
        )
    return method


# Optimizers that write through `.data` or raw pointers do not raise a weight's version; every step counts here.
_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


@dataclass(frozen=True)
class _Quantized:
    key: tuple[int, int, int]
    method: LinearMethod
    codes: Tensor
    scale: Tensor
    packed: Tensor


class _StraightThrough(torch.autograd.Function):
    """Forward: the engine's kernel. Backward: as if the forward had been ``x @ weight.T + bias``, in x's dtype."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, quantized: _Quantized, export_dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        shipped = None if bias is None else bias.to(export_dtype)
        return quantized.method.linear(x, quantized.packed, quantized.scale, shipped)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ weight.to(rows.dtype)).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_w = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = rows.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_b, None, None


class AlignedLinear(nn.Linear):
    """A learner's linear layer whose forward uses the engine's numbers (QaRL, arXiv 2604.07853).

    It keeps the very ``weight`` and ``bias`` parameters of the layer it replaces, so names, optimizer and checkpoints
    do not change. Forward: the weight is rounded to ``export_dtype``, quantized, and multiplied by the engine's
    kernel. Backward is straight-through, against the unquantized weight and input, in the dtype of the input.

    The codes are computed once per optimizer step and shared by micro-batches and by the export. In-place changes
    outside an optimizer step are noticed by the weight's version; only a write through ``weight.data`` that happens
    outside an optimizer is not, call `invalidate` after one.

    Args:
        linear: the layer to replace; its parameters are taken over, not copied.
        method: the format's operations.
        export_dtype: dtype in which the weight is exported before it is quantized.
    """

    def __init__(self, linear: nn.Linear, method: LinearMethod, export_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a second weight
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.method = method
        self.export_dtype = export_dtype
        self._cache: _Quantized | None = None
        self.train(linear.training)

    def _quantized(self) -> _Quantized:
        weight = self.weight
        key = (weight._version, weight.data_ptr(), _optimizer_steps)
        if self._cache is None or self._cache.key != key:
            with torch.no_grad():
                codes, scale = self.method.quantize(weight.detach().to(self.export_dtype))
                # Fresh tensors each time: a consumer of the last export may still hold the old ones.
                self._cache = _Quantized(key, self.method, codes, scale, self.method.pack(codes))
        return self._cache

    def quantized_weight(self) -> tuple[Tensor, Tensor]:
        """Codes and scales that the forward uses now; these tensors are what is exported."""
        quantized = self._quantized()
        return quantized.codes, quantized.scale

    def product(self) -> Callable[[Tensor], Tensor]:
        """The forward with the codes of now, ``[..., K]`` to fp32 ``[..., N]``, without bias and gradient."""
        quantized = self._quantized()
        return lambda x: quantized.method.linear(x.float(), quantized.packed, quantized.scale, None)

    def invalidate(self) -> None:
        """Forget the codes; the next forward quantizes anew."""
        self._cache = None

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]`` in the input's dtype (autocast's where it is on)."""
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return self._aligned(input)
        # Like nn.Linear take autocast's dtype, but keep its hands off the kernel: a bf16 GEMM of codes is not exact.
        with torch.autocast(device, enabled=False):
            return self._aligned(input.to(torch.get_autocast_dtype(device)))

    def _aligned(self, x: Tensor) -> Tensor:
        return _StraightThrough.apply(x, self.weight, self.bias, self._quantized(), self.export_dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AlignedLinear:
        self.invalidate()
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{super().extra_repr()}, codes={self.method.code_dtype}, export_dtype={self.export_dtype}"


class QuantizedLinear(LowBitLinear):
    """An engine's linear layer: codes and scales as buffers, no gradient.

    Buffers: ``weight`` codes ``[N, K]``, ``weight_scale`` fp32 ``[N, 1]``, ``bias`` ``[N]`` in the layer's dtype or
    none, and ``packed`` (not persistent), the codes in the kernel's layout, which may be ``weight`` itself. It starts
    with the replaced layer's own weight quantized. After writing ``weight`` call `pack`; ``load_state_dict`` does it.

    Args:
        linear: the layer to replace; on the meta device the buffers are meta too.
        method: the format's operations.

    Raises:
        RuntimeError: under ``torch.inference_mode()``, whose tensors cannot be refreshed later.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    packed: Tensor | None

    def __init__(self, linear: nn.Linear, method: LinearMethod) -> None:
        super().__init__()
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "build the engine under torch.no_grad(): tensors made in inference_mode cannot be updated"
            )
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.method = method
        with torch.no_grad():
            codes, scale = method.quantize(linear.weight.detach())
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.register_buffer("packed", None, persistent=False)
        self.register_load_state_dict_post_hook(_pack_after_load)
        self.pack()

    @torch.no_grad()
    def pack(self) -> None:
        """Bring the kernel's layout up to date with ``weight``, in place; nothing to do when it is ``weight``."""
        if not self.weight.is_meta:
            if self.packed is None:
                self.packed = self.method.pack(self.weight)
            elif self.packed.data_ptr() != self.weight.data_ptr():
                self.method.repack_(self.packed, self.weight)
        self._packed_version = self.weight._version

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]`` in the input's dtype.

        Raises:
            RuntimeError: when the codes were written and `pack` was not called, or hold nothing yet.
        """
        packed = self.packed
        if packed is None:
            raise RuntimeError("this layer is on the meta device: call to_empty(device=...) and load its weights first")
        if self.weight._version != self._packed_version and packed.data_ptr() != self.weight.data_ptr():
            raise RuntimeError("the codes of a QuantizedLinear changed: call pack() after writing them")
        return self.method.linear(input, packed, self.weight_scale, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        scale = self.weight_scale
        self.packed = None  # the layout belongs to the old device
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != torch.float32:  # model.to(dtype) means the compute dtype, never the scales
            self.weight_scale = scale.to(self.weight_scale.device)
        self.pack()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._packed_version = self.weight._version  # a copied or unpickled tensor counts its writes anew

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, codes={self.method.code_dtype}"


def _pack_after_load(module: nn.Module, _: Any) -> None:
    assert isinstance(module, QuantizedLinear)
    module.pack()
