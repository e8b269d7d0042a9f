"""Products of a few rows on Hopper, see `csrc/hopper_gemm.cu`: bf16, or codes with a scale a row, to bf16.

Rows are those of a decode step. The libraries' products leave a third of the time there: their tiles fill the card
badly, or read so much from the L2 cache that it binds.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lqrl.quant.cuda_driver import CudaDriver, DriverError, OutOfDeviceMemory
from lqrl.quant.hopper_cuts import MOST_ROWS, cut_for
from lqrl.quant.hopper_source import STEP_BYTES, CompilerMissing, Cut, Kind, machine_code
from lqrl.quant.triton_use import switched_off, tiles

log = logging.getLogger(__name__)

VARIABLE = "LQRL_HOPPER"
CAPABILITY = (9, 0)

_KINDS: dict[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}
_UINT8, _BFLOAT16 = 0, 9  # element types of a tensor map
_SWIZZLE_128, _PROMOTE_256 = 3, 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_OVERLAP, _SHARED_BYTES = 6, 8  # a launch's attribute, a function's
_UNGATED_ROWS = 64
_U64, _U32 = ctypes.c_uint64, ctypes.c_uint32


class _Attribute(ctypes.Structure):
    _fields_: ClassVar = [("id", ctypes.c_int), ("value", ctypes.c_int * 17)]  # 72 bytes; the value starts at the 8th


class _Launch(ctypes.Structure):
    _fields_: ClassVar = [
        ("grid", _U32 * 3),
        ("block", _U32 * 3),
        ("shared_bytes", _U32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", _U32),
    ]


class _Driver(CudaDriver):
    """Modules, tensor maps and launches."""

    signatures: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cuCtxGetCurrent": (ctypes.POINTER(ctypes.c_void_p),),
        "cuCtxGetDevice": (ctypes.POINTER(ctypes.c_int),),
        "cuCtxSetCurrent": (ctypes.c_void_p,),
        "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
        "cuModuleLoadData": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p),
        "cuModuleGetFunction": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p),
        "cuFuncSetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
        "cuTensorMapEncodeTiled": (
            *(ctypes.c_void_p, ctypes.c_int, _U32, ctypes.c_void_p, ctypes.POINTER(_U64), ctypes.POINTER(_U64)),
            *(ctypes.POINTER(_U32), ctypes.POINTER(_U32), ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ),
        "cuLaunchKernelEx": (
            ctypes.POINTER(_Launch),
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_void_p,
        ),
    }
    otherwise: ClassVar[str] = f"set {VARIABLE}=0 for the libraries' products"

    def enter(self, device: int) -> None:
        """Give a thread that has no context yet, or another device's, the primary one of ``device``, torch's."""
        context, current = ctypes.c_void_p(), ctypes.c_int(-1)
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value is not None:
            self._call("cuCtxGetDevice", ctypes.byref(current))
        if current.value != device:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)

    def function(self, code: bytes, shared_bytes: int) -> int:
        """The kernel of machine code, loaded into the current context."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), code)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"hopper_gemm")
        self._call("cuFuncSetAttribute", function, _SHARED_BYTES, shared_bytes)
        assert function.value is not None
        return function.value

    def tensor_map(self, address: int, rows: int, row_bytes: int, box_rows: int, element: int) -> bytes:
        """Of a matrix in boxes of ``box_rows`` rows and a step's width."""
        size = 2 if element == _BFLOAT16 else 1
        raw = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        start = -ctypes.addressof(raw) % _MAP_ALIGNMENT
        self._call(
            "cuTensorMapEncodeTiled",
            *(ctypes.addressof(raw) + start, element, 2, address),
            *((_U64 * 2)(row_bytes // size, rows), (_U64 * 1)(row_bytes)),
            *((_U32 * 2)(STEP_BYTES // size, box_rows), (_U32 * 2)(1, 1)),
            *(0, _SWIZZLE_128, _PROMOTE_256, 0),
        )
        return raw.raw[start : start + _MAP_BYTES]

    def launch(
        self, function: int, grid: tuple[int, int], threads: int, shared_bytes: int, arguments: list[Any]
    ) -> None:
        """Start a kernel on torch's stream.

        In a graph captured in `early_products` it may begin while the kernel ahead of it ends, whose results it waits
        for, and reads weights before that.
        """
        attribute = _Attribute(_OVERLAP)
        attribute.value[1] = int(_early.get() and torch.cuda.is_current_stream_capturing())
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch((*grid, 1), (threads, 1, 1), shared_bytes, stream, ctypes.pointer(attribute), 1)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self._call("cuLaunchKernelEx", ctypes.byref(launch), function, pointers, None)


_early: ContextVar[bool] = ContextVar("early", default=False)


@contextmanager
def early_products() -> Iterator[None]:
    """Products captured in here read their weights while the kernel ahead of them in the graph still runs.

    For graphs in which no kernel writes a weight right before the product that reads it.
    """
    token = _early.set(True)
    try:
        yield
    finally:
        _early.reset(token)


@functools.cache
def _driver() -> _Driver:
    return _Driver()


_lock = threading.Lock()
_functions: dict[tuple[Kind, Cut, bool, int], int] = {}
_refused: set[tuple[Kind, Cut, bool, int]] = set()


def _function(kind: Kind, cut: Cut, gated: bool, device: int) -> int:
    key = (kind, cut, gated, device)
    if key not in _functions:
        with _lock:
            if key not in _functions:
                _functions[key] = _driver().function(_code(kind, cut, gated), cut.shared_bytes)
    return _functions[key]


@functools.cache
def _say_once(warning: str) -> None:
    log.warning("%s", warning)


def _loads(kind: Kind, cut: Cut, gated: bool, device: int) -> bool:
    """Whether the kernel of this cut compiles and loads; a product whose does not is left to the libraries."""
    key = (kind, cut, gated, device)
    if key in _functions or key in _refused or torch.cuda.is_current_stream_capturing():
        return key in _functions  # nothing is loaded in a capture: a step runs once before
    try:
        with torch.cuda.device(device):
            _driver().enter(device)
            _function(*key)
    except (CompilerMissing, DriverError) as error:
        _say_once(f"products of {kind} by {cut} run on the libraries' kernels, slower: {error}")
        if not isinstance(error, OutOfDeviceMemory):  # which may pass
            _refused.add(key)
        return False
    return True


@functools.cache
def _code(kind: Kind, cut: Cut, gated: bool) -> bytes:
    return machine_code(kind, cut, gated)[0]


@functools.lru_cache(maxsize=8192)
def _weight_map(address: int, rows: int, row_bytes: int, box_rows: int, element: int) -> bytes:
    """The same values give the same map, whatever lies there: maps of weights are made once."""
    return _driver().tensor_map(address, rows, row_bytes, box_rows, element)


def obstacle(index: int | None) -> str | None:
    """Why the kernel is not used on the CUDA device of this index, in words; ``None`` if it is.

    The answer is found once, but for a lack of memory, which may pass.
    """
    try:
        return _obstacle(index)
    except OutOfDeviceMemory as error:
        _say_once(f"products of a few rows run on the libraries' kernels, slower, until there is memory: {error}")
        return str(error)


@functools.cache
def _obstacle(index: int | None) -> str | None:
    if switched_off(VARIABLE):
        log.info("%s=0: products of a few rows run on the libraries' kernels", VARIABLE)
        return f"{VARIABLE}=0"
    if torch.version.cuda is None or torch.cuda.get_device_capability(index) != CAPABILITY:
        return "it is made for capability 9.0"
    try:
        with torch.cuda.device(index):
            device = torch.cuda.current_device()
            _driver().enter(device)
            _function("bf16", Cut(1, 32, 1, 2), False, device)
    except OutOfDeviceMemory:
        raise  # an exception is not cached
    except (CompilerMissing, DriverError) as error:
        log.warning("products of a few rows run on the libraries' kernels, slower: %s", error)
        return str(error)
    return None


def serves(device: torch.device) -> bool:
    """Whether ``device`` is a Hopper GPU, the kernel compiles and loads, and ``LQRL_HOPPER`` is not 0."""
    return device.type == "cuda" and obstacle(device.index) is None


def _misfit(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel does not multiply these operands."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return f"operands must be [M, K] and [N, K], not {list(x.shape)} and {list(weight.shape)}"
    if x.dtype != weight.dtype or x.dtype not in _KINDS:
        return f"operands must both be bf16, e4m3 or int8, not {x.dtype} and {weight.dtype}"
    if x.device != weight.device:
        return f"operands must be on one device, not {x.device} and {weight.device}"
    if not (x.is_contiguous() and weight.is_contiguous()):
        return "operands must be contiguous"
    if len(weight) % 8 or x.shape[1] * x.itemsize % 16 or (x.data_ptr() | weight.data_ptr()) % 16:
        return f"rows of {x.shape[1]} inputs and {len(weight)} outputs, and both operands, must be pieces of 16 bytes"
    return None


def cut_of(x: Tensor, weight: Tensor, *, gated: bool = False) -> Cut | None:
    """The cut for ``[M, K]`` times ``[N, K]``; ``None`` where a library is faster, or the kernel does not fit.

    It takes few rows, both operands contiguous and of a dtype of its own, and whole pieces of 16 bytes.
    """
    if len(x) > MOST_ROWS or not serves(x.device) or _misfit(x, weight) is not None:
        return None
    kind = _KINDS[x.dtype]
    cut = cut_for(kind, len(x), len(weight), x.shape[1])
    return cut if cut is not None and _loads(kind, cut, gated, x.get_device()) else None


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`torch.nn.functional.linear` without bias and gradient, by this kernel where that is faster."""
    cut = cut_of(x, weight) if x.is_cuda else None
    return F.linear(x, weight) if cut is None else linear(x, weight, cut)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor | None:
    """bf16 `linear` with ``gated``; ``None`` where the steps apart are faster, or the kernel does not fit: `cut_of`.

    Up to `_UNGATED_ROWS` rows the two parts of the weight, read side by side, cost more than a launch.
    """
    if not x.is_cuda or len(x) <= _UNGATED_ROWS or x.dtype != torch.bfloat16 or len(weight) % 16:
        return None
    cut = cut_of(x, weight, gated=True)
    return None if cut is None else linear(x, weight, cut, gated=True)


def linear(
    x: Tensor,
    weight: Tensor,
    cut: Cut,
    token_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """bf16 ``[M, N]``: ``x @ weight.T``, or ``(x @ weight.T * weight_scale) * token_scale`` of codes, rounded once.

    ``gated``: of that, silu of the first N / 2 columns times the others, ``[M, N / 2]``, with the roundings and the
    bits of `lqrl.quant.exact.silu_mul`.

    Sums are fp32, or exact in int8, in one chain along K for each split, and the splits' are added in order: with one
    split a result has the bits of any kernel with such a chain, cuBLAS's among them.

    Args:
        x: ``[M, K]`` bf16, e4m3 or int8, contiguous.
        weight: ``[N, K]``, the same dtype, contiguous; see `cut_of`.
        cut: how the product is cut.
        token_scale: fp32, of M elements, for codes.
        weight_scale: fp32, of N elements, for codes.
        gated: see above.

    Raises:
        ValueError: when the operands are not these, a split of the cut would have no inputs, scales are missing or too
            many, or N does not fit.
    """
    scales = (token_scale, weight_scale)
    _check(x, weight, cut, scales, gated)
    (m, k), n, kind = x.shape, len(weight), _KINDS[x.dtype]
    out = torch.empty(m, n // 2 if gated else n, dtype=torch.bfloat16, device=x.device)
    if not m:
        return out
    row_bytes, element = k * x.itemsize, _BFLOAT16 if kind == "bf16" else _UINT8
    with torch.cuda.device_of(x):
        _driver().enter(x.get_device())
        function = _function(kind, cut, gated, x.get_device())
        side_by_side = cut.outputs // 2 if gated else cut.outputs
        weights = _weight_map(weight.data_ptr(), n, row_bytes, side_by_side, element)
        inputs = _driver().tensor_map(x.data_ptr(), m, row_bytes, cut.rows, element)
        kept = [None if scale is None else scale.float().contiguous() for scale in scales]
        places = [None if scale is None else scale.data_ptr() for scale in kept]
        arguments = [
            *(ctypes.create_string_buffer(words, _MAP_BYTES) for words in (weights, inputs)),
            *(ctypes.c_void_p(address) for address in (out.data_ptr(), *places)),
            *(ctypes.c_int(value) for value in (m, n, tiles(row_bytes, STEP_BYTES))),
        ]
        grid = (tiles(out.shape[1], side_by_side) * cut.splits, tiles(m, cut.rows))
        _driver().launch(function, grid, 128 * (cut.groups + 1), cut.shared_bytes, arguments)
    return out


def _check(x: Tensor, weight: Tensor, cut: Cut, scales: tuple[Tensor | None, Tensor | None], gated: bool) -> None:
    reason = _misfit(x, weight)
    if reason is not None:
        raise ValueError(reason)
    (m, k), n = x.shape, len(weight)
    if tiles(k * x.itemsize, STEP_BYTES) < cut.splits:
        raise ValueError(f"{k} inputs of {x.dtype} are too few for {cut.splits} splits of {STEP_BYTES} bytes")
    for scale, count in zip(scales, (m, n), strict=True):
        if scale is None and x.dtype == torch.bfloat16:
            continue
        if scale is None or x.dtype == torch.bfloat16 or scale.numel() != count or scale.device != x.device:
            got = [None if each is None else (list(each.shape), str(each.device)) for each in scales]
            raise ValueError(f"codes need {m} and {n} scales on {x.device}, bf16 none: got {got}")
    if gated and n % 16:
        raise ValueError(f"{n} outputs of a gate and what it multiplies are not whole pieces of 16 bytes")
