"""The int8 W8A8 linear layer: per-token quantization, exact integer GEMM, one fixed epilogue.

Every backend returns the same bits for the same input, so learner and engine may differ in backend, batch and tiling:

* `native` (CPU): our C kernel, quantization, GEMM, epilogue and bias in one call;
* `torch` (CUDA, CPUs with VNNI): `torch._int_mm`;
* `float` (anywhere): fp32 GEMMs over integer codes, exact because every partial sum stays below 2**24.

One backend is chosen per device type at first use; the environment variable `LQRL_INT8_BACKEND` overrides the choice.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

BACKEND_VARIABLE = "LQRL_INT8_BACKEND"
BACKEND_NAMES = ("native", "torch", "float")
# |code| <= 128, so 1024 products stay at or below 2**24 and fp32 adds them without rounding, in any order.
FLOAT_CHUNK = 1024
# Beyond this the int32 accumulator could overflow: 127 * 128 * K < 2**31.
MAX_IN_FEATURES = 132_000
_FP32_MAX = torch.finfo(torch.float32).max


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic symmetric int8 quantization of the rows of `x` [M, K].

    `scale = amax / 127`, `codes = round_half_even(x * (127 / amax))`, both divisions true fp32 divisions: the divisor
    is a tensor because PyTorch turns `127 / x` and, on CUDA, `x / 127` into products with a reciprocal. The inverse is
    capped at the largest fp32 number, so a zero row has codes 0 and scale 0. A row with NaN or inf has codes 0 and
    scale NaN.

    Returns:
        codes int8 [M, K] and scale fp32 [M, 1].
    """
    x = x.detach().float()
    amax = x.abs().amax(-1, keepdim=True)
    top = torch.full_like(amax, 127.0)
    finite = torch.isfinite(amax)
    codes = (x * torch.div(top, amax).clamp_(max=_FP32_MAX)).round_().clamp_(-127, 127)
    codes = torch.where(finite, codes, 0.0).to(torch.int8)
    return codes, torch.where(finite, torch.div(amax, top), torch.nan)


class Int8Backend(ABC):
    """One way to run the integer GEMM; `packed` is whatever layout the backend reads fastest."""

    name: str

    @abstractmethod
    def pack(self, codes: Tensor) -> Tensor:
        """Lay out weight codes [N, K] for `mm`."""

    @abstractmethod
    def repack_(self, packed: Tensor, codes: Tensor) -> None:
        """Write codes [N, K] into the storage of `packed`."""

    @abstractmethod
    def mm(self, x_codes: Tensor, packed: Tensor, n: int) -> Tensor:
        """Exact int32 [M, n] product of activation codes [M, K] with the packed weight, transposed."""

    def linear(self, x: Tensor, packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        """`int8_linear` of 2-D `x` [M, K]; here with tensor operations around `mm`."""
        codes, token_scale = quantize_tokens(x)
        acc = self.mm(codes, packed, weight_scale.shape[0])
        out = acc.float().mul_(weight_scale.detach().view(1, -1)).mul_(token_scale).to(x.dtype)
        return out if bias is None else out + bias.detach().to(x.dtype)


class FloatBackend(Int8Backend):
    """fp32 GEMMs over integer codes in chunks of `FLOAT_CHUNK` inputs; packed is the codes as fp32 [N, K]."""

    name = "float"

    def pack(self, codes: Tensor) -> Tensor:
        return codes.float()

    def repack_(self, packed: Tensor, codes: Tensor) -> None:
        packed.copy_(codes)

    def mm(self, x_codes: Tensor, packed: Tensor, n: int) -> Tensor:
        _check_packed(packed, (n, x_codes.shape[1]))
        x = x_codes.float()
        acc = (x[:, :FLOAT_CHUNK] @ packed[:, :FLOAT_CHUNK].t()).to(torch.int32)
        for start in range(FLOAT_CHUNK, x.shape[1], FLOAT_CHUNK):
            stop = start + FLOAT_CHUNK
            acc += (x[:, start:stop] @ packed[:, start:stop].t()).to(torch.int32)
        return acc


class TorchBackend(Int8Backend):
    """`torch._int_mm`; packed is the codes, zero-padded to multiples of 8 as cuBLAS wants them."""

    name = "torch"

    def pack(self, codes: Tensor) -> Tensor:
        n, k = codes.shape
        return F.pad(codes, (0, -k % 8, 0, -n % 8)).contiguous()

    def repack_(self, packed: Tensor, codes: Tensor) -> None:
        packed[: codes.shape[0], : codes.shape[1]].copy_(codes)

    def mm(self, x_codes: Tensor, packed: Tensor, n: int) -> Tensor:
        m, k = x_codes.shape
        _check_packed(packed, (n + -n % 8, k + -k % 8))
        rows = max(32, m + -m % 8) if x_codes.is_cuda else m  # cuBLAS: more than 16 rows
        if k % 8 or rows != m:
            x_codes = F.pad(x_codes, (0, -k % 8, 0, rows - m))
        return torch._int_mm(x_codes.contiguous(), packed.t())[:m, :n]


def _check_packed(packed: Tensor, shape: tuple[int, int]) -> None:
    if packed.shape != shape:
        raise ValueError(
            f"packed weight has shape {tuple(packed.shape)}, expected {shape}: pack it with int8_pack on this device, "
            "from codes [out_features, in_features] that fit the input"
        )


def _requested_backend() -> str | None:
    name = os.environ.get(BACKEND_VARIABLE)
    if name is not None and name not in BACKEND_NAMES:
        raise ValueError(f"{BACKEND_VARIABLE}={name!r}: choose one of {', '.join(BACKEND_NAMES)}, or unset it")
    return name


def _choose(device_type: str) -> tuple[Int8Backend, str]:
    requested = _requested_backend()
    if requested == "float":
        return FloatBackend(), f"{BACKEND_VARIABLE} is set"
    if requested == "torch":
        return TorchBackend(), f"{BACKEND_VARIABLE} is set"
    if device_type == "cuda":
        return TorchBackend(), "torch._int_mm runs on the tensor cores"
    return FloatBackend(), f"no integer GEMM is known to be fast on {device_type}"


_chosen: dict[str, Int8Backend] = {}
_choice_lock = threading.Lock()


def _backend(device: torch.device) -> Int8Backend:
    chosen = _chosen.get(device.type)
    if chosen is None:
        with _choice_lock:
            chosen = _chosen.get(device.type)
            if chosen is None:
                chosen, why = _choose(device.type)
                log.info("int8 backend on %s: %s (%s)", device.type, chosen.name, why)
                _chosen[device.type] = chosen
    return chosen


def int8_backend(device: torch.device | str) -> str:
    """Name of the backend that serves `device`, chosen at first use.

    Raises:
        ValueError: `LQRL_INT8_BACKEND` holds an unknown name.
    """
    return _backend(torch.device(device)).name


def int8_pack(codes: Tensor) -> Tensor:
    """Lay out int8 weight codes [N, K] as the backend of their device reads them fastest."""
    _check_codes(codes)
    return _backend(codes.device).pack(codes.detach())


def int8_repack_(packed: Tensor, codes: Tensor) -> None:
    """Write new codes [N, K] into the storage of `packed`, which keeps its address."""
    _check_codes(codes)
    _backend(codes.device).repack_(packed, codes.detach())


def int8_mm(x_codes: Tensor, packed: Tensor, n: int) -> Tensor:
    """Exact int32 [M, n] product of int8 activation codes [M, K] and a packed weight of `n` output channels."""
    _check_codes(x_codes)
    return _backend(x_codes.device).mm(x_codes.detach(), packed, n)


def int8_linear(x: Tensor, packed: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., K] fp32 or bf16, quantized per token, times a packed int8 weight; [..., N] in the dtype of `x`.

    out = dtype((float(acc) * weight_scale) * token_scale), then `+ bias` in that dtype; see `quantize_tokens`. A token
    with NaN or inf gives a row of NaN. No autograd graph is made.

    Args:
        weight_scale: fp32 [N, 1].
        bias: [N], taken in the dtype of `x`.
    """
    n = weight_scale.shape[0]
    k = x.shape[-1]
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"int8_linear takes float32 or bfloat16 activations, not {x.dtype}: convert them")
    out = _backend(x.device).linear(x.detach().reshape(-1, k), packed, weight_scale, bias)
    return out.view(*x.shape[:-1], n)


def _check_codes(codes: Tensor) -> None:
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise TypeError(f"codes must be int8 of two dimensions, not {codes.dtype} {tuple(codes.shape)}")
    if not 0 < codes.shape[1] <= MAX_IN_FEATURES:
        raise ValueError(f"in_features must be 1 to {MAX_IN_FEATURES} (int32 accumulator), not {codes.shape[1]}")
