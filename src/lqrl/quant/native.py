"""The C int8 kernel: built by `lqrl.quant.native_build`, called through ctypes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lqrl.quant.native_build import BuildError, SelfTestError, build, cache_folder

__all__ = ["HEADERS", "LEVELS", "SOURCE", "BuildError", "Kernel", "SelfTestError", "cache_folder", "load"]

SOURCE = Path(__file__).parent / "csrc" / "int8_linear.c"
HEADERS = (SOURCE.with_name("int8_avx2.h"), SOURCE.with_name("int8_wide.h"))
# What the C code can use, each with all before it; the position is the C enum's value.
LEVELS = ("portable", "avx2", "avx512_vnni", "amx")


@dataclass(frozen=True)
class Kernel:
    """The loaded library. The functions take addresses and sizes; see the C source for their arguments.

    Attributes:
        path: the library file.
        instructions: one of `LEVELS`.
        threaded: it shares PyTorch's OpenMP pool; otherwise one thread.
        panel_channels: output channels of a panel of the packed weight.
        panel_extra: bytes of a panel beside its weights.
    """

    path: Path
    instructions: str
    threaded: bool
    panel_channels: int
    panel_extra: int
    linear: ctypes._NamedFuncPointer
    mm: ctypes._NamedFuncPointer
    pack: ctypes._NamedFuncPointer
    packed_size: ctypes._NamedFuncPointer


def load(*, at_most: str = LEVELS[-1]) -> Kernel:
    """Compile the kernel unless the cache holds it, load it, and test it against exact integer products.

    Args:
        at_most: one of `LEVELS`; a lower one loads another copy, to test the code other CPUs run.

    Raises:
        BuildError: no C compiler on PATH, or the build or the load failed.
        SelfTestError: the library's results are wrong.
    """
    kernel = build(SOURCE, HEADERS, (f"-DLQRL_MAX_LEVEL={LEVELS.index(at_most)}",), _open)
    _self_test(kernel)
    return kernel


def _open(library: ctypes.CDLL, path: Path) -> Kernel:
    address, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    kernel = Kernel(
        path=path,
        instructions=LEVELS[library.lqrl_int8_setup()],
        threaded=bool(library.lqrl_int8_has_threads()),
        panel_channels=library.lqrl_int8_panel_channels(),
        panel_extra=library.lqrl_int8_panel_extra(),
        linear=library.lqrl_int8_linear,
        mm=library.lqrl_int8_mm,
        pack=library.lqrl_int8_pack,
        packed_size=library.lqrl_int8_packed_size,
    )
    kernel.linear.argtypes = [address] * 5 + [size] * 3 + [flag] * 2
    kernel.mm.argtypes = [address] * 3 + [size] * 3 + [flag]
    kernel.pack.argtypes = [address] * 2 + [size] * 2
    kernel.pack.restype = None
    kernel.packed_size.argtypes = [size] * 2
    kernel.packed_size.restype = size
    return kernel


def _self_test(kernel: Kernel) -> None:
    """Products of many tile heights, an odd K and a partial panel, against int64; and the fp32 epilogue's bits."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)

    n, k = 37, 131
    codes, scale, bias = integers(n, k), torch.rand(n, 1, generator=generator), torch.randn(n, generator=generator)
    packed = torch.empty(kernel.packed_size(n, k), dtype=torch.int8)
    kernel.pack(codes.data_ptr(), packed.data_ptr(), n, k)
    for m in (1, 2, 3, 4, 5, 6, 13, 31, 50):
        x = integers(m, k)
        x[:, 0] = 127  # so that the codes of x as float are x itself, with scale 1
        exact = x.long() @ codes.long().t()
        acc = torch.empty(m, n, dtype=torch.int32)
        kernel.mm(x.data_ptr(), packed.data_ptr(), acc.data_ptr(), m, n, k, 1)
        floats, out = x.float(), torch.empty(m, n)
        addresses = (t.data_ptr() for t in (floats, packed, scale, bias, out))
        kernel.linear(*addresses, m, n, k, 0, 1)
        if not torch.equal(acc.long(), exact) or not torch.equal(out, exact.float() * scale.t() + bias):
            raise SelfTestError(
                f"the int8 kernel {kernel.path} gives wrong results on this CPU; set LQRL_INT8_BACKEND=float to go on "
                "without it"
            )
