"""What a learner computes between its products, on CUDA: gradients of norms and of gated SiLU, rotary embeddings.

Forward norms and SiLU are `lqrl.quant.exact`'s. A gradient is computed in fp32 and rounded once; sums over tokens are
added in an order that shapes alone decide.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# Launches take options of the compiler besides the kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.triton_casts import rounded_to_bf16, to_bf16
from lqrl.quant.triton_use import multiprocessors, power_of_two, tiles

_TILE = 2048  # elements of a program's step
_BLOCK = 1024
_PER_SM = 4  # programs of a norm's gradient that a multiprocessor runs at a time


@triton.jit
def _store(pointers, x, mask):
    tl.store(pointers, to_bf16(x) if pointers.dtype.element_ty == tl.bfloat16 else x, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_gradient(
    grad_ptr, x_ptr, weight_ptr, inverse_ptr, d_x_ptr, d_weight_ptr, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The program's rows, every so many; its part of the weight's gradient, if that is wanted."""
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=within, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & within[None, :]
        offsets = row[:, None] * WIDTH + column[None, :]
        inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * inverse
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        inner = grad * weight[None, :]
        mean = tl.sum(inner * normed, 1) / WIDTH
        _store(d_x_ptr + offsets, inverse * (inner - normed * mean[:, None]), mask)
        total += tl.sum(grad * normed, 0)
    if d_weight_ptr is not None:
        tl.store(d_weight_ptr + tl.program_id(0) * WIDTH + column, total, mask=within)


def rms_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of an RMSNorm's input and weight, in their dtypes.

    Args:
        grad: ``[..., D]``, of the normed rows.
        x: ``[..., D]`` fp32 or bf16.
        weight: ``[D]``.
        inverse: fp32 ``[..., 1]``, as `lqrl.quant.exact.rms_norm` gives it.
        wants_weight: otherwise there is none of the weight.
    """
    width, rows = x.shape[-1], inverse.numel()
    x, grad, inverse = x.contiguous(), grad.contiguous(), inverse.contiguous()
    d_x, block = torch.empty_like(x), power_of_two(width)
    together = max(1, _TILE // block)
    programs = max(1, min(tiles(rows, together), _PER_SM * multiprocessors(x.device)))
    parts = torch.empty(programs, width, device=x.device) if wants_weight else None
    with torch.cuda.device_of(x):
        _rms_norm_gradient[(programs,)](
            grad, x, weight.contiguous(), inverse, d_x, parts, rows,
            WIDTH=width, ROWS=together, BLOCK=block, num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return d_x, None if parts is None else parts.sum(0).to(weight.dtype)


@triton.jit
def _silu_mul_gradient(grad_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, width, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    offsets = tl.program_id(0).to(tl.int64) * width + column
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * share
    _store(d_gate_ptr + offsets, grad * up * (share + silu * (1.0 - share)), mask)
    _store(d_up_ptr + offsets, grad * silu, mask)


def silu_mul_gradient(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up`` of ``silu(gate) * up``, all ``[M, N]`` of one dtype."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    d_gate, d_up, (rows, width) = torch.empty_like(gate), torch.empty_like(up), gate.shape
    if gate.numel():
        with torch.cuda.device_of(gate):
            _silu_mul_gradient[(rows, tiles(width, _BLOCK))](grad, gate, up, d_gate, d_up, width, BLOCK=_BLOCK)
    return d_gate, d_up


@triton.jit
def _rotate(
    x_ptr, token_stride, head_stride, cos_ptr, sin_ptr, out_ptr,
    HEADS: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr, BF16: tl.constexpr, BH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; ``BACK``: by the negative angle, with the products in fp32."""
    half: tl.constexpr = D // 2
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    column = tl.arange(0, BLOCK)
    within = column < half
    mask = (head < HEADS)[:, None] & within[None, :]
    cos = tl.load(cos_ptr + token * D + column, mask=within, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * D + column, mask=within, other=0.0).to(tl.float32)[None, :]
    more_cos = tl.load(cos_ptr + token * D + half + column, mask=within, other=0.0).to(tl.float32)[None, :]
    more_sin = tl.load(sin_ptr + token * D + half + column, mask=within, other=0.0).to(tl.float32)[None, :]
    x_ptr += token * token_stride + head[:, None] * head_stride + column[None, :]
    a = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + half, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        first, second = a * cos + b * more_sin, b * more_cos - a * sin
    elif BF16:
        first = rounded_to_bf16(a * cos) + rounded_to_bf16(-b * sin)
        second = rounded_to_bf16(b * more_cos) + rounded_to_bf16(a * more_sin)
    else:
        first, second = a * cos - b * sin, b * more_cos + a * more_sin
    out_ptr += (token * HEADS + head)[:, None] * D + column[None, :]
    _store(out_ptr, first, mask)
    _store(out_ptr + half, second, mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Heads turned as transformers turns them: ``x * cos + rotate_half(x) * sin``, each product rounded, then the sum.

    Args:
        x: ``[N, H, D]`` fp32 or bf16, elements of a head side by side.
        cos, sin: ``[N, D]`` in the dtype of ``x``.
        back: the gradient of ``x`` from that of the result; only the result is rounded.

    Returns:
        ``[N, H, D]``, contiguous.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    (tokens, heads, width), bf16 = x.shape, x.dtype == torch.bfloat16
    out, block = torch.empty(x.shape, dtype=x.dtype, device=x.device), power_of_two(width // 2)
    together = max(1, min(power_of_two(heads), _TILE // block))
    if out.numel():
        with torch.cuda.device_of(x):
            _rotate[(tokens, tiles(heads, together))](
                x, x.stride(0), x.stride(1), cos.contiguous(), sin.contiguous(), out,
                HEADS=heads, D=width, BACK=back, BF16=bf16, BH=together, BLOCK=block, enable_fp_fusion=False,
            )  # fmt: skip
    return out
