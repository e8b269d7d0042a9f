"""GPU memory behind fixed addresses: a reserved range that physical memory is mapped into and taken out of.

By the virtual memory calls of the CUDA driver, through ctypes: PyTorch has no such memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from lqrl.quant.cuda_driver import CudaDriver, DriverError, OutOfDeviceMemory

LARGEST_PART = 2**30  # bytes of one physical allocation: mapping costs by their number, whatever their size

_ADVICE = {"CUDA_ERROR_NOT_SUPPORTED": "this GPU or driver maps no virtual memory; set the engine's sleep_level to 0"}

_Size, _Address, _Handle, _Flags = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemGetInfo_v2": (ctypes.POINTER(_Size), ctypes.POINTER(_Size)),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_Size), ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_Address), _Size, _Size, _Address, _Flags),
    "cuMemAddressFree": (_Address, _Size),
    "cuMemCreate": (ctypes.POINTER(_Handle), _Size, ctypes.c_void_p, _Flags),
    "cuMemRelease": (_Handle,),
    "cuMemMap": (_Address, _Size, _Size, _Handle, _Flags),
    "cuMemUnmap": (_Address, _Size),
    "cuMemSetAccess": (_Address, _Size, ctypes.c_void_p, _Size),
}


class _Location(ctypes.Structure):
    """``CUmemLocation``: type 1 is a device."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``: type 1 is memory that stays where it is."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``: flags 3 is to read and write."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Physical:
    """Memory of a GPU; its owner is the mapping, when this is gone: also by an interrupt between two lines."""

    def __init__(self, calls: Driver) -> None:
        self._calls, self.handle = calls, _Handle()

    def __del__(self) -> None:
        if self.handle.value:
            self._calls.release(self.handle)


class Driver(CudaDriver):
    """The driver's calls for virtual memory."""

    signatures = _SIGNATURES
    advice = _ADVICE
    otherwise = "set the engine's sleep_level to 0 to go without"

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of the current device that are free, and all of them."""
        free, total = _Size(), _Size()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def granularity(self, device: int) -> int:
        """Bytes that sizes and addresses must be multiples of."""
        found, recommended = _Size(), 1
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), _pointer(_properties(device)), recommended)
        return found.value

    def reserve(self, size: int) -> int:
        """The address of ``size`` bytes that nothing lies behind yet."""
        address = _Address()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value

    def free(self, address: int, size: int) -> None:
        """Undo `reserve`."""
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int, device: int) -> None:
        """Put new memory of ``device`` behind an address; it lives until `unmap`."""
        memory = _Physical(self)
        self._call("cuMemCreate", ctypes.byref(memory.handle), size, _pointer(_properties(device)), 0)
        self._call("cuMemMap", address, size, 0, memory.handle, 0)  # and keeps the memory

    def release(self, handle: ctypes.c_uint64) -> None:
        """Give physical memory up; mappings keep it."""
        self._call("cuMemRelease", handle)

    def allow(self, address: int, size: int, device: int) -> None:
        """Let ``device`` read and write what is mapped."""
        access = _Access(_Location(1, device), 3)
        self._call("cuMemSetAccess", address, size, _pointer(access), 1)

    def unmap(self, address: int, size: int) -> None:
        """Undo one `map`: the memory is the device's again."""
        self._call("cuMemUnmap", address, size)


@cache
def driver() -> Driver:
    """The driver of this machine."""
    return Driver()


class MappedRange:
    """Addresses that are kept, and memory behind them that comes and goes.

    The addresses are given back when the object is collected; whoever uses them must hold it.

    Args:
        calls: the driver.
        device: which GPU, as torch numbers them.
        size: bytes; rounded up to what the driver maps.
        ready: waits for all work on the device and makes its context current; before anything is mapped or unmapped.
        part: most bytes of one physical allocation.

    Attributes:
        address: of the first byte.
        size: bytes.
    """

    def __init__(
        self, calls: Driver, device: int, size: int, ready: Callable[[], object], part: int = LARGEST_PART
    ) -> None:
        ready()
        unit = calls.granularity(device)
        self.size = -(-size // unit) * unit
        self._calls, self._device, self._ready = calls, device, ready
        part = max(unit, part // unit * unit)
        self._mapped: list[tuple[int, int]] = []  # or about to be, or no more: an interrupt may come at any line
        self._usable = False
        self.address = calls.reserve(self.size)
        starts = range(0, self.size, part)
        self._parts = [(self.address + start, min(part, self.size - start)) for start in starts]
        finalizer = weakref.finalize(self, _give_back, calls, ready, self._mapped, self.address, self.size)
        finalizer.atexit = False  # a process that ends gives everything back

    @property
    def mapped(self) -> bool:
        """Whether there is memory behind all addresses."""
        return self._usable

    def map(self) -> None:
        """Put memory behind all addresses; its contents are undefined.

        Raises:
            OutOfDeviceMemory: with what is asked and what is free; nothing is mapped then.
            DriverError: for anything else; nothing is mapped then.
        """
        if self._usable:
            return
        self._ready()
        _clear(self._calls, self._mapped)
        try:
            for part in self._parts:
                self._mapped.append(part)
                self._calls.map(*part, self._device)
            self._calls.allow(self.address, self.size, self._device)
        except DriverError as error:
            _clear(self._calls, self._mapped)
            if not isinstance(error, OutOfDeviceMemory):
                raise
            free, total = self._calls.free_and_total()
            raise OutOfDeviceMemory(
                f"{self.size / 2**30:.2f} GiB are asked for, {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free on "
                f"cuda:{self._device} ({error})"
            ) from error
        self._usable = True

    def unmap(self) -> None:
        """Give the memory to the device; the addresses stay."""
        if self._usable:
            self._ready()
            self._usable = False
            while self._mapped:
                self._calls.unmap(*self._mapped[-1])
                self._mapped.pop()
        elif self._mapped:
            self._ready()
            _clear(self._calls, self._mapped)


def _clear(calls: Driver, mapped: list[tuple[int, int]]) -> None:
    """Unmap what a call that did not end has left; of its last part nobody knows whether it was mapped."""
    while mapped:
        with suppress(DriverError):
            calls.unmap(*mapped[-1])
        mapped.pop()


def _give_back(
    calls: Driver, ready: Callable[[], object], mapped: list[tuple[int, int]], address: int, size: int
) -> None:
    ready()
    _clear(calls, mapped)
    calls.free(address, size)


def _properties(device: int) -> _Properties:
    return _Properties(type=1, handle_types=0, location=_Location(1, device))


def _pointer(structure: ctypes.Structure) -> Any:
    return ctypes.cast(ctypes.pointer(structure), ctypes.c_void_p)
