"""Build and load the C int8 kernel: compiled at first use into a cache folder, called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).parent / "csrc" / "int8_linear.c"
HEADERS = (SOURCE.with_name("int8_avx2.h"), SOURCE.with_name("int8_wide.h"))
# What the C code can use, each with all before it; the position is the C enum's value.
LEVELS = ("portable", "avx2", "avx512_vnni", "amx")
COMPILERS = ("cc", "gcc", "clang")
# -ffp-contract=off: the epilogue's products and sums are rounded one by one, as in PyTorch.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing")
BUILD_TIMEOUT_S = 120.0


class BuildError(RuntimeError):
    """The kernel could not be compiled or loaded on this machine."""


class SelfTestError(RuntimeError):
    """The compiled kernel gives wrong results on this machine."""


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
    if os.name != "posix":
        raise BuildError("the native kernel is built on POSIX systems only")
    compiler = _find_compiler()
    flags = (*FLAGS, f"-DLQRL_MAX_LEVEL={LEVELS.index(at_most)}")
    source = b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))
    version = _run([compiler, "--version"])
    key = "\0".join((*flags, version, platform.system(), platform.machine(), _cpu_model())).encode()
    name = f"int8_linear-{hashlib.sha256(source + key).hexdigest()[:24]}.so"
    folder = cache_folder()
    if folder is None:  # the mapping outlives the file
        with tempfile.TemporaryDirectory(prefix="lqrl-") as scratch:
            kernel = _open(_build(compiler, flags, Path(scratch) / name))
    else:
        kernel = _open_cached(compiler, flags, folder / name)
    _self_test(kernel)
    return kernel


def _find_compiler() -> str:
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(f"no C compiler on PATH (looked for {', '.join(COMPILERS)})")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/lqrl`, or None when it cannot be written or others could put a library there."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(root) if root else Path.home() / ".cache") / "lqrl"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    foreign = status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return None if foreign or not os.access(folder, os.W_OK) else folder


def _build(compiler: str, flags: tuple[str, ...], path: Path) -> Path:
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        _run([compiler, *flags, "-I", str(HEADERS[0].parent), "-o", scratch, str(SOURCE)])
        os.replace(scratch, path)  # atomic: several processes may build at once
    finally:
        Path(scratch).unlink(missing_ok=True)
    return path


def _open_cached(compiler: str, flags: tuple[str, ...], path: Path) -> Kernel:
    if path.exists():
        try:
            return _open(path)
        except BuildError:  # made by a machine with another libc, or damaged: build it again
            pass
    return _open(_build(compiler, flags, path))


def _open(path: Path) -> Kernel:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from error
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
