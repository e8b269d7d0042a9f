"""The linear layers of both sides: `AlignedLinear` (learner) and `QuantizedLinear` (engine), one arithmetic.

Both call the same `LinearMethod` on the same codes, so their outputs are equal bit for bit; the learner's backward is
straight-through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lqrl.quant.carried import take
from lqrl.quant.codes import CodeModule
from lqrl.quant.low_rank import Factor, low_rank
from lqrl.quant.methods.base import Coded, LinearMethod, Operands, TokenCodes
from lqrl.quant.numerics import shared_amax
from lqrl.quant.weight_key import check_counts_changes, count_invalidation, weight_key

BackwardMode = Literal["high_precision", "dequantized"]


@dataclass(frozen=True)
class Quantized:
    """A weight's codes as they are shipped, and the `weight_key` they were made at."""

    key: tuple[object, ...]
    method: LinearMethod
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    joined: dict[tuple[int, ...], Operands | None] = field(default_factory=dict)
    """With the operands of other layers behind these, by the addresses of all; `lqrl.quant.shared_input`'s."""

    @cached_property
    def operands(self) -> Operands:
        """The codes as their kernel reads them, laid out at first use: an export alone needs none."""
        with torch.no_grad():
            return self.method.operands(self.tensors, self.dtype)


class _StraightThrough(torch.autograd.Function):
    """Forward: the engine's kernel. Backward: as if it had been ``x @ weight.T + bias``, see `AlignedLinear`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        quantized: Quantized,
        export_dtype: torch.dtype,
        backward: BackwardMode,
        coded: Coded | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dequantized = quantized if backward == "dequantized" else None
        shipped = None if bias is None else bias.to(export_dtype)
        if coded is None:
            return quantized.method.linear(x, quantized.operands, shipped)
        y = quantized.method.coded_linear(coded, quantized.operands, shipped, x.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, used = grad_y.reshape(-1, grad_y.shape[-1]), ctx.dequantized
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            values = weight.to(rows.dtype) if used is None else used.method.dequantize(used.tensors, rows.dtype)
            grad_x = (rows @ values).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = x if used is None else used.method.round_input(x)
            grad_w = (rows.t() @ inputs.reshape(-1, x.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = rows.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_b, None, None, None, None


def straight_through(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    quantized: Quantized,
    export_dtype: torch.dtype,
    backward: BackwardMode,
    coded: Coded | None = None,
) -> Tensor:
    """The engine's product of ``x`` ``[..., K]`` with the codes; backward see `AlignedLinear`.

    ``coded``: ``x`` quantized already, where the format quantizes tokens.
    """
    return _StraightThrough.apply(x, weight, bias, quantized, export_dtype, backward, coded)


@dataclass
class _Held:
    """What a layer made of its weight; apart from the module, which takes its time to set an attribute."""

    codes: Quantized | None = None
    amax: tuple[tuple[object, ...], Tensor] | None = None  # of all siblings, and the key it was made at


class AlignedLinear(nn.Linear):
    """A learner's linear layer whose forward uses the engine's numbers (QaRL, arXiv 2604.07853).

    It keeps the very ``weight`` and ``bias`` parameters of the layer it replaces, so names, optimizer and checkpoints
    do not change. Forward: the weight is rounded to ``export_dtype``, quantized, and multiplied by the engine's
    kernel. Backward is straight-through in the dtype of the input: the quantizers' own gradient is the identity, and
    the two products take the unquantized weight and input (``high_precision``), or those that the forward multiplied
    (``dequantized``).

    The codes are computed once per optimizer step and shared by micro-batches and by the export. In-place changes
    outside an optimizer step are noticed by the weight's version, and so is another tensor in its place. A write
    through ``weight.data`` or a NumPy array outside an optimizer is not, nor every assignment to ``weight.data``: call
    `invalidate` after one.

    Args:
        linear: the layer to replace; its parameters are taken over, not copied.
        method: the format's operations.
        export_dtype: dtype in which the weight is exported before it is quantized.
        backward: operands of the backward products.

    Raises:
        RuntimeError: for a weight made in inference mode, which counts no changes.
    """

    def __init__(
        self,
        linear: nn.Linear,
        method: LinearMethod,
        export_dtype: torch.dtype,
        backward: BackwardMode = "high_precision",
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a second weight
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        check_counts_changes(linear.weight)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.method = method
        self.export_dtype = export_dtype
        self.backward_mode: BackwardMode = backward
        self._siblings: tuple[AlignedLinear, ...] = ()
        self._held = _Held()
        self.train(linear.training)

    def share_scale(self, siblings: Sequence[AlignedLinear]) -> None:
        """Quantize with the common magnitude of ``siblings``, this layer among them, as an engine that fuses them."""
        self._siblings = tuple(siblings)
        self.invalidate()

    def _key(self) -> tuple[object, ...]:
        if not self._siblings:
            return weight_key(self.sources())
        return weight_key([source for layer in self._siblings for source in layer.sources()])

    def _quantized(self) -> Quantized:
        key, held = self._key(), self._held
        if held.codes is None or held.codes.key != key:
            with torch.no_grad():
                tensors = self.method.quantize(self.exported_weight(), self._shared_amax(key))
                # Fresh tensors each time: a consumer of the last export may still hold the old ones.
                held.codes = Quantized(key, self.method, tensors, self.export_dtype)
        return held.codes

    def _shared_amax(self, key: tuple[object, ...]) -> Tensor | None:
        held = self._held
        if self._siblings and (held.amax is None or held.amax[0] != key):
            amax = shared_amax([sibling.exported_weight() for sibling in self._siblings])
            for sibling in self._siblings:
                sibling._held.amax = (key, amax)
        return None if held.amax is None else held.amax[1]

    def sources(self) -> tuple[Tensor, ...]:
        """The parameters that decide the codes."""
        return (self.weight,)

    def exported_weight(self) -> Tensor:
        """The weight as it is exported, before it is quantized."""
        return self.weight.detach().to(self.export_dtype)

    def quantized_weight(self) -> dict[str, Tensor]:
        """What the forward uses now, by the names it is shipped under; these very tensors are exported."""
        return self._quantized().tensors

    def product(self) -> Callable[[Tensor], Tensor]:
        """The forward with the codes of now, ``[..., K]`` to fp32 ``[..., N]``, without bias and gradient."""
        quantized = self._quantized()
        return lambda x: quantized.method.logits(x, quantized.operands)

    def invalidate(self) -> None:
        """Forget the codes, and those of layers with the same scale; the next forward or refresh quantizes anew."""
        count_invalidation()
        self._forget()

    def _forget(self) -> None:
        for layer in self._siblings or (self,):
            layer._held.codes = layer._held.amax = None

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]`` in the input's dtype (autocast's where it is on)."""
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return self._aligned(input)
        # Like nn.Linear take autocast's dtype, but keep its hands off the kernel: a bf16 GEMM of codes is not exact.
        with torch.autocast(device, enabled=False):
            return self._aligned(input.to(torch.get_autocast_dtype(device)))

    def _aligned(self, x: Tensor) -> Tensor:
        return self.coded(x, take(x, self.method.token_codes))

    def coded(self, x: Tensor, coded: Coded | None) -> Tensor:
        """`forward` outside autocast of tokens ``x``, with their codes if they are there already."""
        codes, mode = self._quantized(), self.backward_mode
        return straight_through(x, self.weight, self.bias, codes, self.export_dtype, mode, coded)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AlignedLinear:
        self.invalidate()
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{super().extra_repr()}, method={self.method}, export_dtype={self.export_dtype}"


@torch.no_grad()
def quantize_layers(layers: Sequence[AlignedLinear]) -> dict[AlignedLinear, dict[str, Tensor]]:
    """Bring the codes of ``layers`` up to date together where their format can: in few launches, not in some a layer.

    Others are left to their next use: layers whose format cannot, that share a scale, or whose codes depend on more
    than the weight.

    Returns:
        What `AlignedLinear.quantized_weight` gives, of those that are up to date.
    """
    found: dict[AlignedLinear, dict[str, Tensor]] = {}
    stale: dict[tuple[LinearMethod, torch.dtype], list[tuple[AlignedLinear, tuple[object, ...]]]] = {}
    for layer in layers:
        if layer._siblings or len(layer.sources()) != 1:
            continue
        key, held = layer._key(), layer._held
        if held.codes is not None and held.codes.key == key:
            found[layer] = held.codes.tensors
            continue
        layer._forget()  # the old codes' memory serves the new ones
        stale.setdefault((layer.method, layer.export_dtype), []).append((layer, key))
    for (method, dtype), group in stale.items():
        made = method.quantize_many([layer.weight.detach() for layer, _ in group], dtype)
        for (layer, key), tensors in zip(group, made or (), strict=made is not None):
            layer._held.codes = Quantized(key, method, tensors, dtype)
            found[layer] = tensors
    return found


def codes_of(layers: Sequence[AlignedLinear]) -> list[Quantized]:
    """The codes of ``layers`` as they are now; those that are stale are made together where their format can."""
    held = [layer._held.codes for layer in layers]
    fresh = [made for made, layer in zip(held, layers, strict=True) if made is not None and made.key == layer._key()]
    if len(fresh) < len(layers):
        quantize_layers(layers)
        return [layer._quantized() for layer in layers]
    return fresh


def quantize_stale(model: nn.Module) -> None:
    """`quantize_layers` of all aligned layers of ``model`` if the first one's codes are stale, as after a step.

    Their forward would do it a few layers at a time, which takes the host longer than the GPU. Sharded weights are left
    to it: each is whole in its own layer's forward alone.
    """
    layers = (module for module in model.modules() if isinstance(module, AlignedLinear))
    first = next(layers, None)
    if first is None or (first._held.codes is not None and first._held.codes.key == first._key()):
        return
    stale = [first, *layers]
    if not any(isinstance(layer.weight, DTensor) for layer in stale):
        quantize_layers(stale)


class QuantizedLinear(CodeModule):
    """An engine's linear layer: codes and scales as buffers, no gradient.

    Buffers: the tensors that the method ships, under their names (``weight`` and ``weight_scale`` for int8), ``bias``
    ``[N]`` in the layer's dtype or none, and, not persistent, ``operand_<i>``: what the kernel reads and the shipped
    tensors are not. It starts with the replaced layer's own weight quantized. After writing a shipped tensor call
    `pack`; ``load_state_dict`` does it. `add_low_rank` adds ``lora_A.weight`` and ``lora_B.weight``.

    Args:
        linear: the layer to replace; on the meta device the buffers are meta too.
        method: the format's operations.
        amax: common magnitude of the siblings where the method shares it.

    Raises:
        RuntimeError: under ``torch.inference_mode()``, whose tensors cannot be refreshed later.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, method: LinearMethod, amax: Tensor | None = None) -> None:
        super().__init__(method, linear.weight.dtype)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        with torch.no_grad():
            self._hold(method.quantize(linear.weight.detach(), amax))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.lora_A: Factor | None = None
        self.lora_B: Factor | None = None
        self.scaling = 1.0
        self.exact = False  # the adapter's products, see `low_rank`

    def add_low_rank(self, rank: int, scaling: float) -> None:
        """Add an adapter beside the codes, in the compute dtype; it is zero until it is loaded."""
        like = torch.empty(0, dtype=self.compute_dtype, device=self.get_buffer(self.shipped_names[0]).device)
        self.lora_A = Factor(rank, self.in_features, like)
        self.lora_B = Factor(self.out_features, rank, like)
        self.scaling = scaling

    def _matrices(self) -> dict[str, list[dict[str, Tensor]]]:
        return {"operand": [self.shipped()]}

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]`` in the input's dtype.

        Raises:
            RuntimeError: when the codes were written and `pack` was not called, or hold nothing yet.
        """
        y = self.method.linear(input, self._ready()["operand"][0], self.bias)
        if self.lora_A is None or self.lora_B is None:
            return y
        return low_rank(
            y, input, self.lora_A.weight.to(y.dtype), self.lora_B.weight.to(y.dtype), self.scaling, self.exact
        )

    @property
    def token_codes(self) -> TokenCodes | None:
        """What `coded` takes: see `LinearMethod.token_codes`; none beside an adapter, which reads the input itself."""
        return self.method.token_codes if self.lora_A is None else None

    @torch.no_grad()
    def coded(self, x: Coded, dtype: torch.dtype) -> Tensor:
        """`forward` of tokens that are quantized already: ``[M, out_features]`` in ``dtype``, which theirs was."""
        return self.method.coded_linear(x, self._ready()["operand"][0], self.bias, dtype)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """`forward` without bias and with an fp32 result, for an output head."""
        return self.method.logits(hidden, self._ready()["operand"][0])

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, method={self.method}"
