"""Whether a tensor's work goes to this library's Triton kernels. The eager torch code is their oracle, bit for bit."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil

import torch
from torch import Tensor

log = logging.getLogger(__name__)

VARIABLE = "LQRL_TRITON"
TENSOR_CORES_INT8 = (8, 0)
TENSOR_CORES_FP8 = (8, 9)


def switched_off(variable: str) -> bool:
    """Whether an environment variable turns its kernels off.

    Raises:
        ValueError: when it is set to anything but 0 and 1.
    """
    value = os.environ.get(variable) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{variable}={value}: 0 turns these kernels off, 1 or nothing leaves them on")
    return value == "0"


@functools.cache
def available() -> bool:
    """Whether Triton can work here and ``LQRL_TRITON`` is not 0; the answer is logged once.

    Triton compiles its launchers with the host's C compiler.
    """
    if switched_off(VARIABLE):
        log.info("%s=0: low-bit kernels run as eager torch operations", VARIABLE)
        return False
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:
        log.info("triton is not installed: low-bit kernels run as eager torch operations, with the same results")
        return False
    if not any(os.environ.get("CC") or shutil.which(name) for name in ("gcc", "clang")):
        log.info("triton finds no C compiler: low-bit kernels run as eager torch operations, with the same results")
        return False
    log.info("low-bit kernels run through triton %s", version)
    return True


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else (0, 0)


def serves(device: torch.device, capability: tuple[int, int] = TENSOR_CORES_INT8) -> bool:
    """Whether ``device`` is an NVIDIA GPU of at least this compute capability and Triton is there."""
    if device.type != "cuda" or torch.version.cuda is None or not available():
        return False
    return _capability(device.index) >= capability


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program on a GPU may have; no limit elsewhere."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 2**31


def use_triton(tensor: Tensor, capability: tuple[int, int] = TENSOR_CORES_INT8) -> bool:
    """Whether ``tensor`` is where Triton `serves`."""
    return tensor.is_cuda and serves(tensor.device, capability)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """``values`` of the host on ``device``, without waiting for it: a copy from ordinary memory waits for the GPU."""
    if device.type != "cuda":
        return values.to(device)
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values).to(device, non_blocking=True)


def tiles(length: int, size: int) -> int:
    """How many tiles of ``size`` cover ``length``."""
    return -(-length // size)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n``, 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
