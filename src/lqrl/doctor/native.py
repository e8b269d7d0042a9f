"""The C kernels: compiled, at which instruction level, and right."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import torch

from lqrl.doctor.report import Row, Section, attempt, one_line
from lqrl.doctor.row_kernels import check_row_kernels
from lqrl.quant import exact_native, kernels, native
from lqrl.quant.native_build import COMPILERS, BuildError, cache_folder, find_compiler

COMPILER = "a C compiler on PATH (apt-get install gcc)"


def native_section() -> Section:
    """The compiler and what it makes."""
    remedy = "a C compiler that works; LQRL_TRACEBACK=1 lqrl doctor shows its output"
    chosen = f"unset {kernels.BACKEND_VARIABLE}" if kernels.BACKEND_VARIABLE in os.environ else ""
    rows = (
        attempt("compiler", _compiler),
        attempt("int8 linear", _int8, remedy=chosen or remedy),
        attempt("exact mode", _exact, remedy=remedy),
    )
    return Section("C kernels", rows)


def _compiler(name: str) -> Row:
    try:
        path = find_compiler()
    except BuildError as error:
        return Row(name, "missing", one_line(error), COMPILER)
    subprocess.run([path, "--version"], check=True, capture_output=True, timeout=60)  # a broken one is no compiler
    folder = cache_folder()
    cached = f"libraries are kept in {folder}" if folder else "no cache folder of ours: compiled by every process"
    remedy = "" if folder else "XDG_CACHE_HOME=a folder that only you can write"
    return Row(name, "ok", f"{path}, {cached}", remedy, {"path": path, "cache": folder and str(folder)})


def _int8(name: str) -> Row:
    return _compiled(name, native.load, f"int8 layers run on the backend {kernels.int8_backend('cpu')!r}")


def _exact(name: str) -> Row:
    row = _compiled(name, exact_native.library, "exact: true is refused on the CPU")
    if row.status == "ok":
        check_row_kernels(torch.device("cpu"))
    return row


def _compiled(name: str, load: Callable[[], native.Kernel | exact_native.Library], without: str) -> Row:
    """The row of a library, which tests itself when it is loaded; ``missing`` where there is no compiler."""
    try:
        library = load()
    except BuildError as error:
        if any(map(shutil.which, COMPILERS)):
            raise
        return Row(name, "missing", f"{one_line(error)}; {without}", COMPILER)
    threads = "on PyTorch's threads" if library.threaded else "on one thread (the compiler has no OpenMP)"
    facts = {"instructions": library.instructions, "threaded": library.threaded, "path": str(library.path)}
    return Row(name, "ok", f"{library.instructions} code, {threads}", "", facts)
