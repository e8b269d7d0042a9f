"""The C kernels of exact mode: compiled at first use, called on CPU tensors that `lqrl.quant.exact` has checked.

`csrc/exact_lanes.h` states the order of every sum.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lqrl.quant.native_build import SelfTestError, build

SOURCE = Path(__file__).parent / "csrc" / "exact.c"
HEADERS = (SOURCE.with_name("exact_lanes.h"),)
# What the C code can use; the position is what it returns.
LEVELS = ("portable", "avx2")
_lock = threading.Lock()
_loaded: list[Library] = []


@dataclass(frozen=True)
class Library:
    """The loaded kernels; they take addresses and sizes, see the C source.

    Attributes:
        path: the library file.
        instructions: one of `LEVELS`.
        threaded: it shares PyTorch's OpenMP pool; otherwise one thread.
    """

    path: Path
    instructions: str
    threaded: bool
    linear: ctypes._NamedFuncPointer
    pack: ctypes._NamedFuncPointer
    attention: ctypes._NamedFuncPointer
    rms_norm: ctypes._NamedFuncPointer
    silu: ctypes._NamedFuncPointer
    logits: ctypes._NamedFuncPointer
    rotary: ctypes._NamedFuncPointer


def load(*, at_most: str = LEVELS[-1]) -> Library:
    """Compile the kernels unless the cache holds them, load them, and test a product.

    Args:
        at_most: one of `LEVELS`; a lower one loads another copy, to test the code that other CPUs run.

    Raises:
        BuildError: no C compiler on PATH, or the build or the load failed.
        SelfTestError: a product is wrong.
    """
    library = build(SOURCE, HEADERS, ("-Wno-psabi", f"-DLQRL_MAX_LEVEL={LEVELS.index(at_most)}"), _open)
    _self_test(library)
    return library


def _open(library: ctypes.CDLL, path: Path) -> Library:
    address, size, flag, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    kernels = Library(
        path=path,
        instructions=LEVELS[library.lqrl_exact_setup()],
        threaded=bool(library.lqrl_exact_has_threads()),
        linear=library.lqrl_exact_linear,
        pack=library.lqrl_exact_pack,
        attention=library.lqrl_exact_attention,
        rms_norm=library.lqrl_exact_rms_norm,
        silu=library.lqrl_exact_silu,
        logits=library.lqrl_exact_logits,
        rotary=library.lqrl_exact_rotary,
    )
    kernels.linear.argtypes = [address] * 4 + [size] * 3 + [flag] * 2
    kernels.pack.argtypes = [address] * 2 + [size] * 3
    kernels.attention.argtypes = [address] * 6 + [size] * 6 + [real] + [flag] * 2
    kernels.rms_norm.argtypes = [address] * 4 + [size] * 2 + [real] + [flag] * 2
    kernels.silu.argtypes = [address] * 2 + [size] + [flag] * 2
    kernels.logits.argtypes = [address] * 5 + [size] * 2 + [real, flag]
    kernels.rotary.argtypes = [address] * 3 + [size] * 2
    for function in (kernels.pack, kernels.rms_norm, kernels.silu, kernels.rotary):
        function.restype = None
    return kernels


def _self_test(library: Library) -> None:
    """Small integers have one sum in any order: a product of them is known."""
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 5, 3), (7, 37, 300)):
        x, weight = (torch.randint(-9, 10, shape, generator=generator).float() for shape in ((m, k), (n, k)))
        packed, out = (torch.empty(*shape, dtype=torch.float32) for shape in ((n, k), (m, n)))
        library.pack(weight.data_ptr(), packed.data_ptr(), n, k, 4)
        library.linear(x.data_ptr(), packed.data_ptr(), None, out.data_ptr(), m, n, k, 0, 1)
        if not torch.equal(out.double(), x.double() @ weight.double().t()):
            raise SelfTestError(f"the kernels {library.path} give wrong results on this CPU; set exact to false")


def library() -> Library:
    """The kernels, loaded at first use; raises what `load` raises."""
    if not _loaded:
        with _lock:
            if not _loaded:
                _loaded.append(load())
    return _loaded[0]


def pack(weight: Tensor, out: Tensor) -> None:
    """Write a contiguous weight ``[N, K]`` into ``out`` in the order that `linear` reads."""
    library().pack(weight.data_ptr(), out.data_ptr(), *weight.shape, weight.element_size())


def linear(rows: Tensor, packed: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``rows @ weight.T + bias``: fused multiply-adds over the inputs in order, in fp32; then the bias; rounded once.

    Args:
        rows: contiguous fp32 or bf16 ``[M, K]``.
        packed: from `pack`, fp32 or bf16 ``[N, K]``.
        bias: contiguous ``[N]`` or ``None``.
        dtype: of the result.
    """
    (m, k), n = rows.shape, packed.shape[0]
    out = torch.empty(m, n, dtype=dtype)
    types = sum(
        1 << place for place, t in enumerate((rows, packed, bias, out)) if t is not None and t.dtype == torch.bfloat16
    )
    where = None if bias is None else bias.data_ptr()
    _allocated(
        library().linear(
            rows.data_ptr(), packed.data_ptr(), where, out.data_ptr(), m, n, k, types, torch.get_num_threads()
        )
    )
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, scaling: float, sliding_window: int | None) -> Tensor:
    """`lqrl.quant.exact.attention` of checked tensors, ``D`` contiguous.

    A score is a sum over 8 lanes along the width; the weights' sum runs over 8 lanes counted from the row's first key;
    values are added key by key with fused multiply-adds; one division ends it.
    """
    token = 0 if k.dim() == 3 else 2
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    row, queries, base, first = table
    table = torch.stack([row, queries, base * k.stride(0), base * v.stride(0), first])
    strides = [s for x, step in ((q, 0), (k, token), (v, token), (out, 0)) for s in (x.stride(step), x.stride(1))]
    _allocated(
        library().attention(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            (ctypes.c_int64 * 8)(*strides),
            table.data_ptr(),
            table.shape[1],
            q.shape[1],
            k.shape[1],
            q.shape[2],
            v.shape[-1],
            sliding_window or 0,
            scaling,
            q.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`lqrl.quant.exact.rms_norm` of contiguous tensors: squares are added in 8 lanes."""
    out, inverse = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    library().rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        inverse.data_ptr(),
        inverse.numel(),
        x.shape[-1],
        eps,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out, inverse


def silu(x: Tensor) -> Tensor:
    """`lqrl.quant.exact.silu` of a contiguous tensor."""
    out = torch.empty_like(x)
    library().silu(x.data_ptr(), out.data_ptr(), x.numel(), x.dtype == torch.bfloat16, torch.get_num_threads())
    return out


def logits(
    logits: Tensor, temperature: float, uniform: Tensor | None = None, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Largest tempered logit fp32 ``[N]`` and log of the sum of exponentials float64 ``[N]`` of each row.

    Blocks of 512 are added in fp32 lanes, the blocks in order in float64.

    Args:
        logits: contiguous fp32 ``[N, V]``.
        temperature: divides them.
        uniform: float64 ``[N]`` for a draw, ``None`` for the first largest token.
        tokens: int64 ``[N]``, filled with the tokens; ``None`` when none are wanted.
    """
    largest = logits.new_empty(len(logits))
    log_total = torch.empty(len(logits), dtype=torch.float64)
    addresses = (None if t is None else t.data_ptr() for t in (logits, uniform, tokens, largest, log_total))
    _allocated(library().logits(*addresses, *logits.shape, temperature, torch.get_num_threads()))
    return largest, log_total


def rotary_table(frequencies: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """`lqrl.quant.exact.rotary_table` of contiguous fp32 frequencies."""
    cos, sin = torch.empty(2, length, len(frequencies), dtype=torch.float32)  # whatever the default dtype is
    library().rotary(frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), length, len(frequencies))
    return cos, sin


def _allocated(failed: int) -> None:
    if failed:
        raise MemoryError("an exact operation found no memory for its scratch buffer")
