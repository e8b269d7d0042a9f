"""Calls of the CUDA driver that PyTorch has no function for, through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

LIBRARY = "libcuda.so.1"

_OUT_OF_MEMORY = 2
_ADVICE = {
    "CUDA_ERROR_NOT_INITIALIZED": "use the GPU through torch first",
    "CUDA_ERROR_INVALID_CONTEXT": "use the GPU through torch in this thread first",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel before this call failed; find it with CUDA_LAUNCH_BLOCKING=1",
}
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class OutOfDeviceMemory(DriverError):
    """The GPU has less free memory than was asked for."""


class CudaDriver:
    """Calls of one kind; an error of one is an exception.

    Calls belong to the context that is current in the calling thread; torch's runtime makes a device's primary one so.

    Attributes:
        signatures: the types of each call's arguments.
        advice: what to do about an error, by its name.
        otherwise: what to do about any other, and about a missing driver.

    Args:
        library: the driver's file.

    Raises:
        DriverError: when there is no such library, it lacks a call, or it does not start.
    """

    signatures: ClassVar[Mapping[str, tuple[Any, ...]]]
    advice: ClassVar[Mapping[str, str]] = {}
    otherwise: ClassVar[str]

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, types in (_SIGNATURES | dict(self.signatures)).items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise DriverError(
                f"{library} cannot be used ({error}): install NVIDIA's driver, or {self.otherwise}"
            ) from error
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        error = text.value.decode() if text.value else f"error {code}"
        if code == _OUT_OF_MEMORY:
            raise OutOfDeviceMemory(f"{name}: {error}")
        raise DriverError(f"{name}: {error}; {(_ADVICE | dict(self.advice)).get(error, self.otherwise)}")
