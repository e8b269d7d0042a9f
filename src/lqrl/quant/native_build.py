"""Compile a C source of this package at first use into a cache folder, and load it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

COMPILERS = ("cc", "gcc", "clang")
# -ffp-contract=off: products and sums are rounded one by one where the source does not ask for a fused one.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing")
BUILD_TIMEOUT_S = 120.0
# A digest stands behind the library, where Linux's loader reads nothing.
_SEALED = platform.system() == "Linux"
_SEAL = hashlib.sha256().digest_size

Loaded = TypeVar("Loaded")
Opener = Callable[[ctypes.CDLL, Path], Loaded]
"""Declares the functions of a loaded library; the path is the library's."""


class BuildError(RuntimeError):
    """The kernel could not be compiled or loaded on this machine."""


class SelfTestError(RuntimeError):
    """The compiled kernel gives wrong results on this machine."""


def build(source: Path, headers: Sequence[Path], flags: Sequence[str], opener: Opener[Loaded]) -> Loaded:
    """Compile ``source`` unless the cache holds what these files, flags, compiler and CPU give, and load it.

    Args:
        source: the C file.
        headers: what it includes from its folder.
        flags: for the compiler, after `FLAGS`.
        opener: see `Opener`.

    Raises:
        BuildError: no C compiler on PATH, or the build or the load failed.
    """
    if os.name != "posix":
        raise BuildError("native kernels are built on POSIX systems only")
    compiler = find_compiler()
    flags = (*FLAGS, *flags)
    text = b"".join(path.read_bytes() for path in (source, *headers))
    version = _run([compiler, "--version"])
    key = "\0".join((*flags, version, platform.system(), platform.machine(), cpu_model())).encode()
    name = f"{source.stem}-{hashlib.sha256(text + key).hexdigest()[:24]}.so"
    include = headers[0].parent if headers else source.parent
    command = [compiler, *flags, "-I", str(include)]
    folder = cache_folder()
    if folder is None:  # the mapping outlives the file
        with tempfile.TemporaryDirectory(prefix="lqrl-") as scratch:
            return _open(_compile(command, source, Path(scratch) / name), opener)
    path = folder / name
    if path.exists() and _is_whole(path):
        try:
            return _open(path, opener)
        except BuildError:  # made by a machine with another libc: build it again
            pass
    return _open(_compile(command, source, path), opener)


def find_compiler() -> str:
    """Path of the C compiler that `build` runs.

    Raises:
        BuildError: when none of `COMPILERS` is on PATH.
    """
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(
        f"no C compiler on PATH (looked for {', '.join(COMPILERS)}): install one, for example with apt-get install gcc"
    )


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def cpu_model() -> str:
    """The line that names the processor in Linux's ``/proc/cpuinfo``, elsewhere what Python knows; may be empty."""
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


def _compile(command: list[str], source: Path, path: Path) -> Path:
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        _run([*command, "-o", scratch, str(source), "-lm"])
        if _SEALED:
            made = Path(scratch).read_bytes()
            Path(scratch).write_bytes(made + hashlib.sha256(made).digest())
        os.replace(scratch, path)  # atomic: several processes may build at once
    finally:
        Path(scratch).unlink(missing_ok=True)
    return path


def _is_whole(path: Path) -> bool:
    """Whether a library is as it was built; loading one that was cut short would kill the process."""
    held = path.read_bytes()
    return not _SEALED or hashlib.sha256(held[:-_SEAL]).digest() == held[-_SEAL:]


def _open(path: Path, opener: Opener[Loaded]) -> Loaded:
    try:
        library = ctypes.CDLL(str(path))
        return opener(library, path)
    except (OSError, AttributeError) as error:  # no library, or another one
        raise BuildError(f"cannot load {path}: {error}") from error
