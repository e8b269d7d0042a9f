"""The int8 W8A8 linear layer: per-token quantization, exact integer GEMM, one fixed epilogue.

Every backend returns the same bits for the same input, so learner and engine may differ in backend, batch and tiling:

* `native` (CPU): our C kernel, quantization, GEMM (AMX, AVX512-VNNI, AVX2 or plain C), epilogue and bias in one call;
* `torch` (CUDA; CPUs with VNNI and no C compiler): `torch._int_mm` between tensor operations; on NVIDIA GPUs Triton
  kernels quantize and scale, and multiply where that is faster (`triton_int8.TILES`);
* `float` (anywhere): fp32 GEMMs over integer codes, exact because every partial sum stays within 2**24.

One backend is chosen per device type at first use, whatever the shape; the environment variable `LQRL_INT8_BACKEND`
overrides the choice.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from lqrl.quant import hopper_gemm, native
from lqrl.quant.rows import quantize_int8_token
from lqrl.quant.triton_use import use_triton

log = logging.getLogger(__name__)

BACKEND_VARIABLE = "LQRL_INT8_BACKEND"
BACKEND_NAMES = ("native", "torch", "float")
# |code| <= 128, so 1024 products stay within 2**24 and fp32 adds them without rounding, in any order.
FLOAT_CHUNK = 1024
# The int32 accumulator holds 128 * 128 * K < 2**31.
MAX_IN_FEATURES = 131_071


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

    @torch.no_grad()
    def linear(self, x: Tensor, packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        """`int8_linear` of 2-D `x` [M, K]; here a quantizer, then `coded_linear`."""
        codes, token_scale = quantize_int8_token(x)
        return self.coded_linear(codes, token_scale, packed, weight_scale, bias, x.dtype)

    @torch.no_grad()
    def coded_linear(
        self,
        codes: Tensor,
        token_scale: Tensor,
        packed: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """`int8_coded_linear`; here with tensor operations around `mm`."""
        acc = self.mm(codes, packed, weight_scale.shape[0])
        out = acc.float().mul_(weight_scale.view(1, -1)).mul_(token_scale).to(dtype)
        return out if bias is None else out + bias.to(dtype)


class FloatBackend(Int8Backend):
    """fp32 GEMMs over integer codes in chunks of `FLOAT_CHUNK` inputs; packed is the codes as fp32 [N, K]."""

    name = "float"

    def pack(self, codes: Tensor) -> Tensor:
        """The codes as fp32: decoding reads them every step, converting them each time would cost more."""
        return codes.float()

    def repack_(self, packed: Tensor, codes: Tensor) -> None:
        """Write the codes as fp32."""
        _check_packed(packed, tuple(codes.shape))
        packed.copy_(codes)

    def mm(self, x_codes: Tensor, packed: Tensor, n: int) -> Tensor:
        """Add the exact products of the chunks as int32."""
        m, k = x_codes.shape
        _check_packed(packed, (n, k))
        acc = torch.zeros(m, n, dtype=torch.int32, device=x_codes.device)
        with torch.autocast(x_codes.device.type, enabled=False):  # a bf16 result would be rounded
            for x, w in zip(x_codes.float().split(FLOAT_CHUNK, 1), packed.split(FLOAT_CHUNK, 1), strict=True):
                acc += (x @ w.t()).to(torch.int32)
        return acc


class TorchBackend(Int8Backend):
    """`torch._int_mm`; packed is the codes, zero-padded to multiples of 8 as cuBLAS wants them."""

    name = "torch"

    def pack(self, codes: Tensor) -> Tensor:
        """The codes themselves where no padding is needed."""
        n, k = codes.shape
        if n % 8 == 0 and k % 8 == 0 and codes.is_contiguous():
            return codes
        return F.pad(codes, (0, -k % 8, 0, -n % 8)).contiguous()

    def repack_(self, packed: Tensor, codes: Tensor) -> None:
        """Write the codes, unless `packed` is their storage."""
        n, k = codes.shape
        _check_packed(packed, (n + -n % 8, k + -k % 8))
        if packed.data_ptr() != codes.data_ptr():
            packed[:n, :k].copy_(codes)

    def mm(self, x_codes: Tensor, packed: Tensor, n: int) -> Tensor:
        """Pad to what cuBLAS takes, multiply, cut the padding off."""
        m, k = x_codes.shape
        _check_packed(packed, (n + -n % 8, k + -k % 8))
        rows = max(32, m + -m % 8) if x_codes.is_cuda else m  # cuBLAS wants more than 16
        if k % 8 or rows != m:
            x_codes = F.pad(x_codes, (0, -k % 8, 0, rows - m))
        product = torch._int_mm(x_codes.contiguous(), packed.t())  # pyright: ignore[reportPrivateImportUsage]
        return product[:m, :n]

    @torch.no_grad()
    def coded_linear(
        self,
        codes: Tensor,
        token_scale: Tensor,
        packed: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """As the base class, through Triton kernels where the GPU has them."""
        if not use_triton(codes):
            return super().coded_linear(codes, token_scale, packed, weight_scale, bias, dtype)
        from lqrl.quant import triton_int8

        (m, k), n = codes.shape, weight_scale.shape[0]
        _check_packed(packed, (n + -n % 8, k + -k % 8))
        cut = hopper_gemm.cut_of(codes, packed) if dtype == torch.bfloat16 and packed.shape == (n, k) else None
        if cut is not None:
            out = hopper_gemm.linear(codes, packed, cut, token_scale, weight_scale)
            return out if bias is None else out.add_(bias.to(dtype))
        tile = triton_int8.tile_for(m, n, k)
        if tile is None:
            return triton_int8.epilogue(self.mm(codes, packed, n), weight_scale, token_scale, bias, dtype)
        return triton_int8.gemm(codes, packed, weight_scale, token_scale, bias, dtype, tile)


class NativeBackend(Int8Backend):
    """The C kernel; packed is int8 [panels, bytes of one], 16 or 32 channels a panel, see `csrc/int8_linear.c`."""

    name = "native"

    def __init__(self, kernel: native.Kernel) -> None:
        self.kernel = kernel

    def pack(self, codes: Tensor) -> Tensor:
        """Interleave the codes into panels."""
        n, k = codes.shape
        packed = torch.empty(self._shape(n, k), dtype=torch.int8)
        self.repack_(packed, codes)
        return packed

    def repack_(self, packed: Tensor, codes: Tensor) -> None:
        """Interleave the codes into the panels of `packed`."""
        n, k = codes.shape
        self._check(packed, n, k)
        codes = codes.contiguous()
        self.kernel.pack(codes.data_ptr(), packed.data_ptr(), n, k)

    def mm(self, x_codes: Tensor, packed: Tensor, n: int) -> Tensor:
        """One call; the rows may be shared among PyTorch's threads."""
        m, k = x_codes.shape
        self._check(packed, n, k)
        x_codes = x_codes.contiguous()
        acc = torch.empty(m, n, dtype=torch.int32)
        failed = self.kernel.mm(x_codes.data_ptr(), packed.data_ptr(), acc.data_ptr(), m, n, k, torch.get_num_threads())
        if failed:
            raise MemoryError("int8_mm: no memory for its scratch buffer")
        return acc

    def linear(self, x: Tensor, packed: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        """Quantization, GEMM, scales and bias in one call."""
        m, k = x.shape
        n = weight_scale.shape[0]
        self._check(packed, n, k)
        x, weight_scale = x.contiguous(), weight_scale.contiguous()
        if bias is not None:
            bias = bias.to(x.dtype).contiguous()
        if not (x.is_cpu and weight_scale.is_cpu and (bias is None or bias.is_cpu)):
            raise ValueError("int8_linear got tensors on several devices: move them to the CPU")
        out = x.new_empty((m, n))
        failed = self.kernel.linear(
            x.data_ptr(),
            packed.data_ptr(),
            weight_scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            m,
            n,
            k,
            x.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("int8_linear: no memory for its scratch buffer")
        return out

    def _shape(self, n: int, k: int) -> tuple[int, int]:
        channels = self.kernel.panel_channels
        return (n + channels - 1) // channels, channels * (k + -k % 4) + self.kernel.panel_extra

    def _check(self, packed: Tensor, n: int, k: int) -> None:
        _check_packed(packed, self._shape(n, k))
        if not packed.is_cpu or packed.dtype is not torch.int8:
            raise ValueError(f"packed weight is {packed.dtype} on {packed.device}: pack the codes again, on the CPU")


def _check_packed(packed: Tensor, shape: tuple[int, ...]) -> None:
    if packed.shape != shape or not packed.is_contiguous():
        raise ValueError(
            f"packed weight has shape {tuple(packed.shape)}, expected contiguous {shape}: make it with int8_pack on "
            "this device, from codes [out_features, in_features] that fit the input"
        )


def _choose(device_type: str) -> tuple[Int8Backend, str]:
    name = os.environ.get(BACKEND_VARIABLE)
    if name is not None:
        return _named(name, device_type), f"{BACKEND_VARIABLE} is set"
    if device_type == "cuda":
        return TorchBackend(), "torch._int_mm runs on tensor cores"
    if device_type != "cpu":
        return FloatBackend(), f"no integer GEMM for {device_type} is known to be fast"
    try:
        kernel = native.load()
    except native.BuildError as error:
        vnni = torch.cpu._is_vnni_supported()
        how = "through torch._int_mm" if vnni else "as fp32 GEMMs"
        warnings.warn(
            f"lqrl's int8 kernel is not available, so int8 layers run {how}, slower, with the same results; a C "
            f"compiler on PATH would change that. {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return TorchBackend() if vnni else FloatBackend(), "the native kernel could not be built"
    return NativeBackend(kernel), f"{kernel.instructions} code, {kernel.path.name}, threads: {kernel.threaded}"


def _named(name: str, device_type: str) -> Int8Backend:
    if name == "float":
        return FloatBackend()
    if name == "torch":
        return TorchBackend()
    if name != "native":
        raise ValueError(f"{BACKEND_VARIABLE}={name!r}: choose one of {', '.join(BACKEND_NAMES)}, or unset it")
    if device_type != "cpu":
        raise ValueError(f"{BACKEND_VARIABLE}=native runs on the CPU only, not on {device_type}: unset it")
    return NativeBackend(native.load())


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
        ValueError: `LQRL_INT8_BACKEND` holds an unknown name, or `native` for a device that is no CPU.
        native.BuildError: `LQRL_INT8_BACKEND=native` and the kernel cannot be built.
        native.SelfTestError: the native kernel is wrong on this machine.
    """
    return _backend(torch.device(device)).name


def int8_pack(codes: Tensor) -> Tensor:
    """Lay out int8 weight codes [N, K] as the backend of their device reads them fastest; may be `codes` itself."""
    _check_codes(codes)
    return _backend(codes.device).pack(codes)


def int8_repack_(packed: Tensor, codes: Tensor) -> None:
    """Write new codes [N, K] into the storage of `packed`, which keeps its address."""
    _check_codes(codes)
    _backend(codes.device).repack_(packed, codes)


def int8_mm(x_codes: Tensor, packed: Tensor, n: int) -> Tensor:
    """Exact int32 [M, n] product of int8 activation codes [M, K] and a packed weight of `n` output channels."""
    _check_codes(x_codes)
    return _backend(x_codes.device).mm(x_codes, packed, n)


def int8_linear(x: Tensor, packed: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., K] fp32 or bf16, quantized per token, times a packed int8 weight; [..., N] in the dtype of `x`.

    out = dtype((float(acc) * weight_scale) * token_scale), then `+ bias` in that dtype; the quantizer is
    `numerics.quantize_int8_token`. A token with NaN or inf gives a row of NaN. No autograd graph is made.

    Args:
        weight_scale: fp32 [N, 1].
        bias: [N], taken in the dtype of `x`.

    Raises:
        TypeError: `x` is neither fp32 nor bf16, or `weight_scale` is not fp32.
        ValueError: shapes or devices do not fit.
    """
    if x.dtype is not torch.float32 and x.dtype is not torch.bfloat16:
        raise TypeError(f"int8_linear takes float32 or bfloat16 activations, not {x.dtype}: convert them")
    if weight_scale.dtype is not torch.float32:
        raise TypeError(f"weight_scale must be float32, not {weight_scale.dtype}: scales keep full precision")
    n, k = weight_scale.shape[0], x.shape[-1]
    if weight_scale.numel() != n or not 0 < k <= MAX_IN_FEATURES:
        raise ValueError(f"need weight_scale [N, 1] and 0 < K <= {MAX_IN_FEATURES}, got {weight_scale.shape}, K {k}")
    if bias is not None and bias.numel() != n:
        raise ValueError(f"bias has {bias.numel()} elements for {n} output channels")
    if x.dim() == 2:
        return _backend(x.device).linear(x, packed, weight_scale, bias)
    return _backend(x.device).linear(x.reshape(-1, k), packed, weight_scale, bias).view(*x.shape[:-1], n)


def int8_coded_linear(
    codes: Tensor, token_scale: Tensor, packed: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`int8_linear` of tokens that are quantized already: [M, N] in `dtype`, the same bits.

    Args:
        codes: int8 [M, K], from `numerics.quantize_int8_token` of tokens in `dtype`.
        token_scale: fp32 [M, 1].
        packed, weight_scale, bias: as for `int8_linear`.
        dtype: fp32 or bf16.

    Raises:
        TypeError: for another ``dtype``, or codes that are not int8.
    """
    _check_codes(codes)
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"int8_coded_linear gives float32 or bfloat16, not {dtype}: cast the input")
    return _backend(codes.device).coded_linear(codes, token_scale, packed, weight_scale, bias, dtype)


def _check_codes(codes: Tensor) -> None:
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise TypeError(f"codes must be int8 of two dimensions, not {codes.dtype} {tuple(codes.shape)}")
    if not 0 < codes.shape[1] <= MAX_IN_FEATURES:
        raise ValueError(f"in_features must be 1 to {MAX_IN_FEATURES} (int32 accumulator), not {codes.shape[1]}")
