"""Tokens quantized where they are made, on CUDA: after the sum and norm, or after SiLU times up.

Codes and scales have the bits of one function after the other: `lqrl.quant.exact.add_rms_norm` or `silu_mul`, then the
token quantizers of `lqrl.quant.rows`. A learner keeps what was quantized too, for its backward pass.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.numerics import INT8_MAX
from lqrl.quant.numerics.fp8 import FP8_SCALE_FLOOR
from lqrl.quant.triton_casts import rounded_to_bf16, to_bf16
from lqrl.quant.triton_exact_rows import WARPS, aligned, gated, normed_rows, rows_together
from lqrl.quant.triton_overlap import next_may_begin
from lqrl.quant.triton_quantize import NAN_CODE, magnitude, row_codes, row_scale
from lqrl.quant.triton_use import power_of_two, tiles

Codes = Literal["int8", "fp8_e4m3"]

_PART = 256  # elements of a warp in one part of a row: eight neighbors for each thread
_HELD = 4  # parts of a row in registers: two programs of 16 warps fit into a multiprocessor's
_MOST_WARPS = 16


@triton.jit
def _rounded(x, BF16: tl.constexpr):
    return rounded_to_bf16(x) if BF16 else x


@triton.jit
def _store_codes(
    x, scale, factor, bad, codes_ptr, row, rows, column, width, FP8: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """Codes of rows ``[ROWS, BLOCK]``, in pieces of ``VECTOR``; ``bad`` rows hold NaN or inf."""
    codes = row_codes(x, scale[:, None], factor[:, None], FP8)
    if FP8:
        codes = tl.where(bad[:, None], NAN_CODE, codes).to(tl.uint8)
    else:
        codes = tl.where(bad[:, None], 0, codes).to(tl.int8)
    pointers = tl.multiple_of(codes_ptr + row[:, None] * width + column[None, :], (1, VECTOR))
    tl.store(pointers, codes, mask=(row < rows)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["codes_ptr"])
def _norm_quantize(
    x_ptr, delta_ptr, sum_ptr, weight_ptr, out_ptr, codes_ptr, scale_ptr, inverse_ptr, rows, eps, largest, floor,
    WIDTH: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, FP8: tl.constexpr, BF16: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``KEEP``: the normed rows are written too. Codes are stored in pieces as long as those of ``x``.

    The compiler gives neighbors to a thread by the widest access: otherwise the squares would be added in another order
    than by the norm alone.
    """
    next_may_begin()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = normed_rows(x_ptr, delta_ptr, sum_ptr, weight_ptr, inverse_ptr, row, rows, eps, WIDTH, ADD, BF16, BLOCK)
    out = _rounded(out, BF16)
    if KEEP:
        column = tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
        tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], to_bf16(out) if BF16 else out, mask=mask)
    amax, bad = magnitude(out, 1)
    scale, factor = row_scale(amax, bad, largest, floor, FP8)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    neighbors: tl.constexpr = 8 if BF16 else 4
    vector: tl.constexpr = neighbors if WIDTH % neighbors == 0 else 1
    _store_codes(out, scale, factor, bad, codes_ptr, row, rows, tl.arange(0, BLOCK), WIDTH, FP8, vector)


@triton.jit
def _silu_mul(gate_ptr, up_ptr, column, width, BF16: tl.constexpr):
    return _rounded(gated(gate_ptr, up_ptr, column, width, True, BF16), BF16)


@triton.jit
def _keep(out_ptr, x, column, width, KEEP: tl.constexpr, BF16: tl.constexpr):
    if KEEP:
        tl.store(out_ptr + column, to_bf16(x) if BF16 else x, mask=column < width)


@triton.jit
def _silu_quantize(
    gate_ptr, gate_stride, up_ptr, up_stride, out_ptr, codes_ptr, scale_ptr, width, largest, floor,
    KEEP: tl.constexpr, FP8: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One row, in parts: ``HELD`` stay in registers between the scale and the codes, ``REST`` are made twice.

    ``KEEP``: the product is written too.
    """
    next_may_begin()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    out_ptr += row * width
    codes_ptr += row * width
    held = (_silu_mul(gate_ptr, up_ptr, column, width, BF16),)
    _keep(out_ptr, held[0], column, width, KEEP, BF16)
    amax, bad = magnitude(held[0], 0)
    for index in tl.static_range(1, HELD + REST):
        part = _silu_mul(gate_ptr, up_ptr, index * BLOCK + column, width, BF16)
        _keep(out_ptr, part, index * BLOCK + column, width, KEEP, BF16)
        part_amax, part_bad = magnitude(part, 0)
        amax, bad = tl.maximum(amax, part_amax), bad | part_bad
        if index < HELD:
            held += (part,)
    scale, factor = row_scale(amax, bad, largest, floor, FP8)
    tl.store(scale_ptr + row, scale)
    nan = tl.full((BLOCK,), NAN_CODE if FP8 else 0, tl.uint8 if FP8 else tl.int8)
    for index in tl.static_range(HELD + REST):
        inside = index * BLOCK + column
        if bad:
            tl.store(codes_ptr + inside, nan, mask=inside < width)
        else:
            x = held[index] if index < HELD else _silu_mul(gate_ptr, up_ptr, inside, width, BF16)
            tl.store(codes_ptr + inside, row_codes(x, scale, factor, FP8), mask=inside < width)


def _codes(kind: Codes, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor, float, float]:
    """Room for codes, as bytes, and scales; largest code and smallest amax (int8) or scale (e4m3)."""
    fp8 = kind == "fp8_e4m3"
    codes = torch.empty(shape, dtype=torch.uint8 if fp8 else torch.int8, device=device)
    scale = torch.empty(shape[0], 1, dtype=torch.float32, device=device)
    return codes, scale, float(INT8_MAX), FP8_SCALE_FLOOR if fp8 else 0.0


def _typed(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, kind: Codes
) -> tuple[Tensor, Tensor, Tensor]:
    """``x + delta``, and its norm quantized per token.

    Args:
        x: ``[M, D]``, fp32 or bf16.
        delta: like ``x``, or none.
        weight: ``[D]`` in the dtype of ``x``.
        eps: of the norm.
        kind: of the codes.

    Returns:
        The sum, ``x`` itself without ``delta``; codes ``[M, D]`` int8 or e4m3; scales fp32 ``[M, 1]``.
    """
    total, codes, scale, _ = _normed(x, delta, weight, eps, kind, None)
    return total, codes, scale


def rms_norm_kept(x: Tensor, weight: Tensor, eps: float, kind: Codes) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The norm of ``x`` ``[..., D]``, fp32 or bf16, and the same quantized per token; see `add_rms_norm`.

    Returns:
        The normed rows ``[..., D]``, their fp32 factors ``[..., 1]``, and codes ``[M, D]`` with scales fp32 ``[M, 1]``.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _, codes, scale, inverse = _normed(x.reshape(-1, x.shape[-1]), None, weight, eps, kind, out)
    return out, inverse.view(*x.shape[:-1], 1), (codes, scale)


def _normed(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, kind: Codes, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum, codes and scales, and the norm's factors; normed rows go to ``out``."""
    rows, width = x.shape
    codes, scale, largest, floor = _codes(kind, (rows, width), x.device)
    x, delta = x.contiguous(), None if delta is None else delta.contiguous()
    total = x if delta is None else torch.empty_like(x)
    inverse, block = torch.empty_like(scale), power_of_two(width)
    together = rows_together(block)
    if rows and width:
        with torch.cuda.device_of(x):
            _norm_quantize[(tiles(rows, together),)](
                aligned(x), aligned(x if delta is None else delta), total, aligned(weight.contiguous()),
                total if out is None else out, codes, scale, inverse, rows, eps, largest, floor,
                WIDTH=width, ADD=delta is not None, KEEP=out is not None, FP8=kind == "fp8_e4m3",
                BF16=x.dtype == torch.bfloat16, ROWS=together, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return total, _typed(codes), scale, inverse


def silu_mul(gate: Tensor, up: Tensor, kind: Codes, held: int = _HELD) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` quantized per token.

    Args:
        gate, up: ``[M, N]``, fp32 or bf16, elements of a row side by side.
        kind: of the codes.
        held: parts of a row that are computed once; a longer row's others are computed twice.

    Returns:
        Codes ``[M, N]`` int8 or e4m3, and scales fp32 ``[M, 1]``.
    """
    return _gated_codes(gate, up, kind, held, None)


def silu_mul_kept(gate: Tensor, up: Tensor, kind: Codes, held: int = _HELD) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """``silu(gate) * up`` ``[M, N]``, and what `silu_mul` gives."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return out, _gated_codes(gate, up, kind, held, out)


def _gated_codes(gate: Tensor, up: Tensor, kind: Codes, held: int, out: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, width = gate.shape
    codes, scale, largest, floor = _codes(kind, (rows, width), gate.device)
    warps = min(power_of_two(tiles(width, _PART * held)), _MOST_WARPS)
    block = min(power_of_two(width), _PART * warps)
    parts = tiles(width, block)
    if rows and width:
        with torch.cuda.device_of(gate):
            _silu_quantize[(rows,)](
                gate, gate.stride(0), up, up.stride(0), gate if out is None else out, codes, scale, width, largest,
                floor, KEEP=out is not None, FP8=kind == "fp8_e4m3", BF16=gate.dtype == torch.bfloat16, BLOCK=block,
                HELD=min(parts, held), REST=max(0, parts - held), num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    return _typed(codes), scale
