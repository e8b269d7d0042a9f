"""`ReleasableMemory`: tensors whose memory is given away for a while and comes back to the same tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lqrl.engines.cuda_memory import MappedRange, OutOfDeviceMemory, driver

_ALIGNMENT = 512  # bytes, as PyTorch's allocator


def padded(size: int) -> int:
    """Bytes that a tensor of ``size`` bytes takes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class ReleasableMemory(ABC):
    """One piece of memory that is cut into tensors.

    `release` and `restore` do not touch the tensors' contents, they lose them: what a tensor holds after `restore` is
    undefined. While the memory is released its tensors must not be read or written.

    Attributes:
        size: bytes.
        held: whether the memory is there.
    """

    def __init__(self, whole: Tensor) -> None:
        self._whole: Tensor | None = whole
        self._used = 0
        self.size, self.held = whole.nbytes, True

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in the part that is not used yet; it begins at a multiple of 512 bytes.

        Raises:
            RuntimeError: while the memory is released, after `close`, or when no part is large enough.
        """
        if self._whole is None or not self.held:
            raise RuntimeError(f"the memory is {'closed' if self._whole is None else 'released: restore it first'}")
        start, size = self._used, math.prod(shape) * dtype.itemsize
        if start + size > self.size:
            raise RuntimeError(f"a tensor of {size} bytes does not fit into the {self.size - start} that are left")
        self._used = start + padded(size)
        return self._whole[start : start + size].view(dtype).view(tuple(shape))

    def release(self) -> int:
        """Give the memory away; again is no error. Returns how many bytes that were."""
        given = self.size if self.held else 0
        self.held = False  # first: after an interrupt nobody may use what is half given away
        self._release()
        return given

    def restore(self) -> int:
        """Take the memory back. Returns how many bytes that were, 0 when it is held.

        Raises:
            RuntimeError: after `close`, and when there is not enough; it stays released then.
        """
        if self._whole is None:
            raise RuntimeError("the memory is closed; make another")
        if self.held:
            return 0
        self._restore()
        self.held = True
        return self.size

    def close(self) -> None:
        """Give everything away for good."""
        self.release()
        self._whole = None

    @abstractmethod
    def _release(self) -> None:
        """Give away what is there, all or what an interrupt has left."""

    @abstractmethod
    def _restore(self) -> None:
        """Take what is not there."""


class HostMemory(ReleasableMemory):
    """Main memory. It comes back at another address, which tensors follow."""

    def __init__(self, size: int) -> None:
        whole = torch.empty(size, dtype=torch.uint8)
        self._storage = whole.untyped_storage()
        super().__init__(whole)

    def _release(self) -> None:
        self._storage.resize_(0)

    def _restore(self) -> None:
        self._storage.resize_(self.size)


class DeviceMemory(ReleasableMemory):
    """Memory of a GPU, always at the same addresses: CUDA graphs that use it stay valid.

    It is not PyTorch's: ``torch.cuda.memory_allocated`` and its peak do not count it.

    Raises:
        OutOfDeviceMemory: with what is asked, what is free and what to lower.
        DriverError: for what else the driver refuses.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._range = MappedRange(driver(), index, size, partial(torch.cuda.synchronize, index))
        self._restore()
        whole = torch.as_tensor(_Bytes(self._range), device=torch.device("cuda", index))
        if whole.data_ptr() != self._range.address:
            raise RuntimeError("torch copied the mapped memory; set the engine's sleep_level to 0")
        super().__init__(whole)

    def _release(self) -> None:
        self._range.unmap()

    def _restore(self) -> None:
        try:
            self._range.map()
        except OutOfDeviceMemory:
            torch.cuda.empty_cache()  # what PyTorch holds and nobody uses
            try:
                self._range.map()
            except OutOfDeviceMemory as error:
                raise OutOfDeviceMemory(
                    f"the engine's key/value cache does not fit: {error}; lower the engine's kv_cache_tokens, "
                    "gpu_memory_utilization or max_num_seqs, or what the learner keeps "
                    "(lqrl.callbacks.OptimizerOffload)"
                ) from error


class _Bytes:
    """Bytes of a range for ``torch.as_tensor``, whose tensors then hold the range."""

    def __init__(self, held: MappedRange) -> None:
        self._held = held

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._held.size,), "typestr": "|u1", "data": (self._held.address, False), "version": 3}


def releasable_memory(size: int, device: torch.device) -> ReleasableMemory:
    """``size`` bytes, or a little more, of ``device``; the contents are undefined.

    Raises:
        DriverError, RuntimeError: when there is not enough.
        NotImplementedError: for a device that is neither the CPU nor CUDA.
    """
    if device.type == "cpu":
        return HostMemory(size)
    if device.type == "cuda":
        return DeviceMemory(size, device)
    raise NotImplementedError(f"memory of {device} cannot be released; set the engine's sleep_level to 0")
