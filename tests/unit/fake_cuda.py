"""What tests say to the driver of `fake_cuda.c`, and read off it."""

from __future__ import annotations

import ctypes
from pathlib import Path


class FakeCuda:
    """The replaced driver, beside the calls that are tested."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.fake_live.restype = ctypes.c_size_t
        self._library.fake_total.argtypes = (ctypes.c_size_t,)

    def ready(self) -> None:
        """Make the thread's context current."""
        self._library.fake_make_current()

    def total(self, size: int) -> None:
        """Bytes of the card."""
        self._library.fake_total(size)

    def fail(self, name: str, code: int, after: int = 0) -> None:
        """Have a call return ``code`` once, ``after`` so many that succeed."""
        self._failing = name.encode()  # the library keeps the pointer
        self._library.fake_fail(self._failing, code, after)
