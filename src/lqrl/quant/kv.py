"""Low-bit key/value caches: what the engine stores, and the same rounding for the learner's forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lqrl.quant.numerics import (
    dequantize,
    kv_scale_from_amax,
    quantize_kv_fp8_static,
    quantize_kv_fp8_token_head,
    quantize_kv_int8_token_head,
)
from lqrl.quant.scheme import QuantScheme, TensorFormat
from lqrl.quant.triton_use import TENSOR_CORES_FP8, TENSOR_CORES_INT8, use_triton

SCALE_NAMES = ("k_scale", "v_scale")
"""Buffers of an attention module that hold its calibrated scales, under the names vLLM reads."""


class Cached(NamedTuple):
    """Keys or values as a low-bit cache holds them.

    Attributes:
        codes: int8 or e4m3 ``[..., D]``, head width last.
        scale: fp32 ``[..., 1]`` of each token and head, or of one element: the layer's.
    """

    codes: Tensor
    scale: Tensor

    def values(self, dtype: torch.dtype) -> Tensor:
        """``codes * scale`` in fp32, rounded once to ``dtype``."""
        return dequantize(self.codes, self.scale, dtype)


class KVCacheMethod(ABC):
    """The operations of a cache format on keys or values ``[..., D]``, head width last.

    Attributes:
        code_dtype: dtype of the codes.
        per_token: a scale for each token and head is stored beside the codes; else one a layer is calibrated.
    """

    code_dtype: ClassVar[torch.dtype]
    per_token: ClassVar[bool]

    @abstractmethod
    def quantize(self, x: Tensor, scale: Tensor) -> Cached:
        """Codes and scales of ``x``; ``scale`` is the layer's, where there is one."""

    def round_trip(self, x: Tensor, scale: Tensor) -> Tensor:
        """``x`` as it is read back from the cache, in its dtype."""
        capability = TENSOR_CORES_INT8 if self.code_dtype == torch.int8 else TENSOR_CORES_FP8
        fits = x.dtype in (torch.float32, torch.bfloat16) and (self.per_token or scale.numel() == 1)
        if fits and use_triton(x, capability):
            from lqrl.quant import triton_kv

            return triton_kv.round_trip(x, self, scale)
        return self.quantize(x, scale).values(x.dtype)


@dataclass(frozen=True)
class Int8TokenHead(KVCacheMethod):
    """int8 codes with a scale per token and head."""

    code_dtype: ClassVar[torch.dtype] = torch.int8
    per_token: ClassVar[bool] = True

    def quantize(self, x: Tensor, scale: Tensor) -> Cached:
        """Codes int8, scales fp32."""
        return Cached(*quantize_kv_int8_token_head(x))


@dataclass(frozen=True)
class Fp8TokenHead(KVCacheMethod):
    """e4m3 codes with a scale per token and head."""

    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    per_token: ClassVar[bool] = True

    def quantize(self, x: Tensor, scale: Tensor) -> Cached:
        """Codes e4m3, scales fp32."""
        return Cached(*quantize_kv_fp8_token_head(x))


@dataclass(frozen=True)
class Fp8Static(KVCacheMethod):
    """e4m3 codes with a calibrated scale a layer, one for keys and one for values (FP8-RL, arXiv 2601.18150)."""

    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    per_token: ClassVar[bool] = False

    def quantize(self, x: Tensor, scale: Tensor) -> Cached:
        """Codes e4m3, saturating, and the scale."""
        return Cached(quantize_kv_fp8_static(x, scale), scale)


METHODS: dict[TensorFormat, KVCacheMethod] = {
    TensorFormat("int8", "token_head", dynamic=True): Int8TokenHead(),
    TensorFormat("fp8_e4m3", "token_head", dynamic=True): Fp8TokenHead(),
    TensorFormat("fp8_e4m3", "tensor"): Fp8Static(),
}


def kv_method(scheme: QuantScheme) -> KVCacheMethod | None:
    """The operations of ``scheme``'s cache; ``None`` for a cache in the compute dtype.

    Raises:
        ValueError: when nothing computes the format.
    """
    if scheme.kv_cache is None:
        return None
    method = METHODS.get(scheme.kv_cache)
    if method is None:
        known = ", ".join(map(str, METHODS))
        raise ValueError(f"no cache holds keys and values as {scheme.kv_cache}; supported: {known}")
    return method


def calibrates_kv(scheme: QuantScheme) -> bool:
    """Whether the scheme's cache has scales that are calibrated."""
    method = kv_method(scheme)
    return method is not None and not method.per_token


class _RoundTrip(torch.autograd.Function):
    """Forward: what the cache gives back. Backward: straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, method: KVCacheMethod) -> Tensor:  # type: ignore[override]
        return method.round_trip(x, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad, None, None


class KVRounding:
    """Keys and values as an engine's cache gives them back, differentiable; handed to a packed forward.

    Args:
        method: of the cache.
        scales: keys' and values' scale of a layer, by its index, as they are when it is called: a module's buffers are
            other tensors after it has moved. Methods that compute their own scales ignore them.
    """

    def __init__(self, method: KVCacheMethod, scales: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        self.method = method
        self.scales = scales

    def __call__(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Both rounded; shapes ``[..., D]``."""
        k_scale, v_scale = self.scales(layer_idx)
        return _RoundTrip.apply(keys, k_scale, self.method), _RoundTrip.apply(values, v_scale, self.method)


class KVObserver:
    """Notes the largest keys and values of a forward pass; handed to it in the place of a `KVRounding`.

    Attributes:
        amax: for each layer a list of ``[2, N]``: the magnitude of each token's keys and values.
    """

    def __init__(self) -> None:
        self.amax: dict[int, list[Tensor]] = {}

    def __call__(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[1, H, N, D]`` as they are."""
        amax = torch.stack([x.detach()[0].abs().amax(dim=(0, 2)).float() for x in (keys, values)])
        self.amax.setdefault(layer_idx, []).append(amax)
        return keys, values

    def scales(self) -> dict[int, Tensor]:
        """``[2]`` for each layer: 1.05 * P99.9 of the tokens' magnitudes / 448, for keys and for values."""
        joined = {layer: torch.cat(parts, 1) for layer, parts in self.amax.items()}
        return {i: torch.cat([kv_scale_from_amax(row) for row in both]) for i, both in joined.items()}


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules named ``self_attn``, in layer order.

    Raises:
        NotImplementedError: when there is none.
    """
    modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "self_attn"]
    if not modules:
        raise NotImplementedError(
            f"{type(model).__name__} has no modules named self_attn to hold cache scales; use a cache format with "
            "scales per token and head: +kv_fp8 or +kv_int8"
        )
    return modules


def prepare_kv_(model: nn.Module, scheme: QuantScheme) -> None:
    """Give ``model`` the buffers of calibrated scales, 1 until they are; nothing for other caches.

    Learner and engine call this: the scales are then exported, shipped and saved like weights.
    """
    if not calibrates_kv(scheme):
        return
    for module in attention_modules(model):
        device = next(chain(module.parameters(), module.buffers())).device  # a quantized layer has buffers alone
        for name in SCALE_NAMES:
            module.register_buffer(name, torch.ones(1, dtype=torch.float32, device=device))


def kv_scales(model: nn.Module, scheme: QuantScheme) -> list[tuple[Tensor, Tensor]]:
    """Scales of each layer as they are in the model now; empty when no cache format is set."""
    method = kv_method(scheme)
    if method is None:
        return []
    if method.per_token:
        one = torch.ones(())
        return [(one, one) for _ in attention_modules(model)]
    return [(m.get_buffer("k_scale"), m.get_buffer("v_scale")) for m in attention_modules(model)]


@dataclass(frozen=True)
class _Scales:
    """The scales that the modules of a model hold when it is called; a deep copy reads the copied modules."""

    modules: list[nn.Module]
    per_token: bool
    one: Tensor = field(default_factory=lambda: torch.ones(()))

    def __call__(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        if self.per_token:
            return self.one, self.one
        module = self.modules[layer_idx]
        return module.get_buffer("k_scale"), module.get_buffer("v_scale")


def kv_rounding(model: nn.Module, scheme: QuantScheme) -> KVRounding | None:
    """The rounding of ``scheme``'s cache with the scales of ``model``; ``None`` for a cache in the compute dtype."""
    method = kv_method(scheme)
    return None if method is None else KVRounding(method, _Scales(attention_modules(model), method.per_token))
