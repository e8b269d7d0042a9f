"""Operations whose bits depend on nothing but the row they belong to: the C kernels of exact mode, called on tensors.

Products, attention, norms, SiLU and log-softmax sum each output in one fixed order, whatever the batch, its company,
the number of threads or the CPU's instruction set; `csrc/exact_lanes.h` states the orders. No autograd graph is made
here, see `lqrl.modeling.exact`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lqrl.quant.native_build import SelfTestError, build

SOURCE = Path(__file__).parent / "csrc" / "exact.c"
HEADERS = (SOURCE.with_name("exact_lanes.h"),)
# What the C code can use; the position is what it returns.
LEVELS = ("portable", "avx2")
_FLOATS = (torch.float32, torch.bfloat16)
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
        packed, out = torch.empty(n, k), torch.empty(m, n)
        library.pack(weight.data_ptr(), packed.data_ptr(), n, k, 4)
        library.linear(x.data_ptr(), packed.data_ptr(), None, out.data_ptr(), m, n, k, 0, 1)
        if not torch.equal(out.double(), x.double() @ weight.double().t()):
            raise SelfTestError(f"the kernels {library.path} give wrong results on this CPU; set exact to false")


def _library() -> Library:
    if not _loaded:
        with _lock:
            if not _loaded:
                _loaded.append(load())
    return _loaded[0]


def check_device(device: torch.device | str) -> None:
    """Raise where exact mode has no kernels.

    Raises:
        NotImplementedError: off the CPU.
        BuildError: when the kernels cannot be compiled here.
    """
    if torch.device(device).type != "cpu":
        raise NotImplementedError(f"exact mode is implemented on the CPU, not on {device}; set exact to false")
    _library()


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        if x.dtype not in _FLOATS:
            raise TypeError(f"exact operations take float32 or bfloat16, not {x.dtype}; set the compute dtype")
        if not x.is_cpu:
            check_device(x.device)


def _allocated(failed: int) -> None:
    if failed:
        raise MemoryError("an exact operation found no memory for its scratch buffer")


def pack(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """A weight ``[N, K]`` in the order that `linear` reads: same shape and dtype; written into ``out`` if given."""
    _check(weight)
    weight = weight.detach().contiguous()
    if out is None:
        out = torch.empty_like(weight)
    if out.shape != weight.shape or out.dtype != weight.dtype or not out.is_contiguous():
        raise ValueError(
            f"a weight {tuple(weight.shape)} of {weight.dtype} does not fit {tuple(out.shape)} {out.dtype}"
        )
    _library().pack(weight.data_ptr(), out.data_ptr(), *weight.shape, weight.element_size())
    return out


@torch.no_grad()
def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``x @ weight.T + bias``: fused multiply-adds over the inputs in order, in fp32; then the bias; rounded once.

    Args:
        x: ``[..., K]`` fp32 or bf16.
        packed: from `pack`, fp32 or bf16 ``[N, K]``.
        bias: ``[N]`` or ``None``.
        dtype: of the result; ``None`` for that of ``x``.

    Returns:
        ``[..., N]``.
    """
    (n, k), dtype = packed.shape, dtype or x.dtype
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(len(rows), n, dtype=dtype)
    bias = None if bias is None else bias.contiguous()
    tensors = (rows, packed, out) if bias is None else (rows, packed, out, bias)
    _check(*tensors)
    if x.shape[-1] != k or not packed.is_contiguous() or (bias is not None and bias.numel() != n):
        raise ValueError(f"a packed weight {(n, k)} does not fit an input {tuple(x.shape)} or its bias")
    types = sum(
        1 << place for place, t in enumerate((rows, packed, bias, out)) if t is not None and t.dtype == torch.bfloat16
    )
    where = None if bias is None else bias.data_ptr()
    _allocated(
        _library().linear(
            rows.data_ptr(), packed.data_ptr(), where, out.data_ptr(), len(rows), n, k, types, torch.get_num_threads()
        )
    )
    return out.view(*x.shape[:-1], n)


@torch.no_grad()
def attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Tensor, scaling: float, sliding_window: int | None = None
) -> Tensor:
    """Causal attention, one arithmetic for every query row.

    A score is a sum over 8 lanes along the width; the weights' sum runs over 8 lanes counted from the row's first key;
    values are added key by key with fused multiply-adds; one division ends it.

    Args:
        q: ``[N, H, D]``, fp32 or bf16, any strides with contiguous ``D``.
        k, v: keys and values of the same dtype, heads in dimension 1, keys of a sequence one after the other in
            dimension 0 of ``[tokens, Hkv, D]``, or in dimension 2 of a cache ``[slots, Hkv, L, D]``.
        sequences: ``[4, S]`` int64, contiguous: row of the first query, number of queries, which token of dimension 0
            (or which slot) holds the first key, and which key the first query is. Query ``i`` sees keys up to
            ``first + i``.
        scaling: factor of the scores.
        sliding_window: a query sees this many keys, itself included; ``None`` for all.

    Returns:
        ``[N, H, Dv]``.
    """
    _check(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"queries, keys and values must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    token = 0 if k.dim() == 3 else 2
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    row, queries, base, first = sequences
    table = torch.stack([row, queries, base * k.stride(0), base * v.stride(0), first])
    strides = [s for x, step in ((q, 0), (k, token), (v, token), (out, 0)) for s in (x.stride(step), x.stride(1))]
    _allocated(
        _library().attention(
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


def packed_sequences(lengths: Sequence[int]) -> Tensor:
    """``sequences`` of `attention` for whole sequences that lie one after the other."""
    counts = torch.tensor(lengths)
    starts = counts.cumsum(0) - counts
    return torch.stack([starts, counts, starts, torch.zeros_like(counts)])


@torch.no_grad()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + eps)`` in fp32, rounded to the dtype of ``x``, times ``weight``.

    Args:
        x: ``[..., D]``.
        weight: ``[D]`` in the dtype of ``x``.
        eps: see above.

    Returns:
        The normed rows, and fp32 ``[..., 1]`` the factors ``1 / sqrt(mean(x^2) + eps)``.
    """
    _check(x, weight)
    if x.dtype != weight.dtype:
        raise TypeError(f"a norm of {x.dtype} got a weight of {weight.dtype}; cast the parameters to the compute dtype")
    x, weight = x.contiguous(), weight.contiguous()
    out, inverse = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    _library().rms_norm(
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


@torch.no_grad()
def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))`` in fp32, rounded once."""
    _check(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    _library().silu(x.data_ptr(), out.data_ptr(), x.numel(), x.dtype == torch.bfloat16, torch.get_num_threads())
    return out


class Normalizer(NamedTuple):
    """What turns a row's logits into log-probs: ``logit / temperature - largest - log_total``.

    Attributes:
        largest: ``[N]`` fp32, of the tempered logits.
        log_total: ``[N]`` float64, log of the sum of ``exp(logit / temperature - largest)``.
    """

    largest: Tensor
    log_total: Tensor


@torch.no_grad()
def normalizer(logits: Tensor, temperature: float) -> Normalizer:
    """The normalizer of each row of fp32 logits ``[N, V]``: blocks of 512 in fp32 lanes, added in order in float64."""
    return _logits(logits, temperature, None, None)


@torch.no_grad()
def sample(logits: Tensor, uniform: Tensor | None, temperature: float) -> tuple[Tensor, Normalizer]:
    """Draw a token for each row of fp32 logits ``[N, V]`` by its uniform ``[N]`` float64, or take the first largest."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    return tokens, _logits(logits, temperature, uniform, tokens)


def _logits(logits: Tensor, temperature: float, uniform: Tensor | None, tokens: Tensor | None) -> Normalizer:
    if logits.dtype != torch.float32:
        raise TypeError(f"exact log-probs take float32 logits, not {logits.dtype}")
    _check(logits)
    logits = logits.contiguous()
    largest = logits.new_empty(len(logits))
    log_total = torch.empty(len(logits), dtype=torch.float64)
    uniform = None if uniform is None else uniform.contiguous()
    addresses = (None if t is None else t.data_ptr() for t in (logits, uniform, tokens, largest, log_total))
    _allocated(_library().logits(*addresses, *logits.shape, temperature, torch.get_num_threads()))
    return Normalizer(largest, log_total)


@torch.no_grad()
def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float, rows: Normalizer) -> Tensor:
    """Log-prob of one token a row: fp32 ``[N]`` from fp32 logits ``[N, V]``; computed in float64, rounded once."""
    chosen = logits.gather(1, tokens[:, None]).squeeze(1) / temperature
    return (chosen.double() - rows.largest.double() - rows.log_total).float()


def rotary_table(frequencies: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``position * frequency``, fp32 ``[length, F]``, each from its own position alone."""
    frequencies = frequencies.float().contiguous()
    cos, sin = torch.empty(2, length, len(frequencies))
    _library().rotary(frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), length, len(frequencies))
    return cos, sin
