"""GPU memory that processes of one machine share: one exports it, others open it and copy out of it.

By the calls of the CUDA driver, through ctypes. PyTorch shares memory of its own allocator instead: what was sent to a
process that died is never given back, and nothing can be shared under ``expandable_segments``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from lqrl.quant.cuda_driver import CudaDriver, OutOfDeviceMemory

ALIGNMENT = 2**21  # the driver may put smaller allocations into one block, which can be shared as a whole only

_LAZY_PEER_ACCESS = 1  # the only flag there is: another GPU's memory may be opened, too
_HANDLE_BYTES = 64
_FILES = "set transport: files"

Place = Callable[[], AbstractContextManager[int]]
"""Makes a GPU's context the thread's, and gives its stream."""


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which calls take by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


_Size, _Address, _Stream = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemAlloc_v2": (ctypes.POINTER(_Address), _Size),
    "cuMemFree_v2": (_Address,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _Address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Address), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Address,),
    "cuMemcpyDtoDAsync_v2": (_Address, _Address, _Size, _Stream),
    "cuStreamSynchronize": (_Stream,),
}


class IpcDriver(CudaDriver):
    """The driver's calls for memory that is shared."""

    signatures = _SIGNATURES
    otherwise = _FILES

    def allocate(self, size: int) -> int:
        """The address of ``size`` new bytes."""
        address = _Address()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Undo `allocate`."""
        self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """What another process opens the memory of `allocate` by."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """The address that another process's memory has in this one."""
        address = _Address()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Undo `open`."""
        self._call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Queue a copy between two places of GPU memory."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, stream)

    def wait(self, stream: int) -> None:
        """Wait for all that is queued."""
        self._call("cuStreamSynchronize", stream)


@cache
def ipc_driver() -> IpcDriver:
    """The driver of this machine."""
    return IpcDriver()


def on(device: torch.device) -> Place:
    """The current stream of a GPU, for the thread that asks.

    Args:
        device: without an index, the current one.
    """
    torch.cuda.synchronize(device)  # there is a context from here on

    @contextmanager
    def place() -> Iterator[int]:
        with torch.cuda.device(device):
            yield torch.cuda.current_stream().cuda_stream

    return place


class SharedBuffers:
    """Buffers of one size that several processes see; see `exported` and `opened`.

    Attributes:
        addresses: in this process.
        size: bytes of each.
        handles: what other processes open them by.
    """

    def __init__(
        self, calls: IpcDriver, place: Place, addresses: Sequence[int], size: int, handles: Sequence[bytes]
    ) -> None:
        self._calls, self._place = calls, place
        self.addresses, self.size, self.handles = addresses, size, handles

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy of ``size`` bytes between two addresses of GPU memory, of which one lies in a buffer."""
        with self._place() as stream:
            self._calls.copy(target, source, size, stream)

    def wait(self) -> None:
        """Wait for all that is queued."""
        with self._place() as stream:
            self._calls.wait(stream)


@contextmanager
def exported(calls: IpcDriver, place: Place, count: int, size: int) -> Iterator[SharedBuffers]:
    """New buffers that others may open, until the end of the block; their contents are undefined.

    Whoever has them open should have closed them by then: what they read later is undefined.

    Args:
        calls: the driver.
        place: see `on`.
        count: buffers.
        size: bytes of each; rounded up to `ALIGNMENT`.

    Raises:
        OutOfDeviceMemory: when the GPU has too little free memory, that which PyTorch keeps unused included.
        DriverError: when it cannot be shared.
    """
    size = -(-size // ALIGNMENT) * ALIGNMENT
    with ExitStack() as held:
        addresses = []
        for _ in range(count):
            addresses.append(_allocated(calls, place, size))
            held.callback(_undone, calls.free, addresses[-1], calls, place)
        with place():
            handles = [calls.export(address) for address in addresses]
        yield SharedBuffers(calls, place, addresses, size, handles)


@contextmanager
def opened(calls: IpcDriver, place: Place, handles: Sequence[bytes], size: int) -> Iterator[SharedBuffers]:
    """The buffers of another process, until the end of the block.

    Args:
        calls: the driver.
        place: see `on`; of the GPU that copies are made to, which may be another one than the buffers'.
        handles, size: of the process that exports them.

    Raises:
        DriverError: when they are another machine's, or this GPU has no access to them.
    """
    with ExitStack() as held:
        addresses = []
        for handle in handles:
            with place():
                addresses.append(calls.open(handle))
            held.callback(_undone, calls.close, addresses[-1], calls, place)
        yield SharedBuffers(calls, place, addresses, size, handles)


def _allocated(calls: IpcDriver, place: Place, size: int) -> int:
    with place():
        try:
            return calls.allocate(size)
        except OutOfDeviceMemory:
            torch.cuda.empty_cache()
        try:
            return calls.allocate(size)
        except OutOfDeviceMemory as error:
            raise OutOfDeviceMemory(
                f"the GPU has no {size / 2**20:.0f} MiB for weights on their way ({error}); leave more memory free, or "
                f"{_FILES}"
            ) from error


def _undone(undo: Callable[[int], None], address: int, calls: IpcDriver, place: Place) -> None:
    with place() as stream:
        calls.wait(stream)
        undo(address)
