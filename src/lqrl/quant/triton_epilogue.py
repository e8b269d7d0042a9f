"""What follows a product on CUDA: parts of the sum added in order, scales, bias, one rounding.

The arithmetic is that of eager torch: ``dtype((acc * weight_scale) * token_scale)``, or ``dtype(acc)`` without scales,
then ``+ bias`` in that dtype.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Launches take options of the compiler besides the kernel's parameters; an unrolled loop looks as if it never returned.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lqrl.quant.triton_casts import rounded_to_bf16, to_bf16
from lqrl.quant.triton_use import tiles

_ROWS, _COLUMNS = 4, 512  # of one program


@triton.jit
def store_tile(
    acc: tl.tensor, out_ptr: tl.tensor, token_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, m: int, n: int,
    SCALED: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr,
) -> None:  # fmt: skip
    """Scale and write a tile ``[rows, columns]``; two roundings where there is a bias, as eager torch."""
    out = acc.to(tl.float32)
    if SCALED:
        token = tl.load(token_ptr + rows, mask=rows < m, other=0.0)
        weight = tl.load(weight_ptr + columns, mask=columns < n, other=0.0)
        out = (out * weight[None, :]) * token[:, None]
    if BIAS:
        if BF16:
            out = rounded_to_bf16(out)
        out += tl.load(bias_ptr + columns, mask=columns < n, other=0.0)[None, :]
    pointers = out_ptr + rows[:, None] * n + columns[None, :]
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(pointers, to_bf16(out) if BF16 else out, mask=mask)


@triton.jit(do_not_specialize=["m"])
def _finish(
    parts_ptr, part_stride, row_stride, out_ptr, token_ptr, weight_ptr, bias_ptr, m, n,
    PARTS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    pointers = parts_ptr + rows[:, None] * row_stride + columns[None, :]
    acc = tl.load(pointers, mask=mask, other=0)
    for part in tl.static_range(1, PARTS):
        acc += tl.load(pointers + part * part_stride, mask=mask, other=0)
    store_tile(acc, out_ptr, token_ptr, weight_ptr, bias_ptr, rows, columns, m, n, SCALED, BIAS, BF16)


def finish(
    parts: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None, dtype: torch.dtype, out: Tensor
) -> Tensor:
    """The sum of ``parts``, scaled, plus ``bias``, written to ``out``.

    Args:
        parts: int32 or fp32 ``[P, M, N]``, elements of a row side by side; the first part is the first summand.
        scales: fp32 of the M tokens and of the N outputs; none for a plain sum.
        bias: from `addend`, or none.
        dtype: of the result, fp32 or bf16.
        out: ``[M, N]`` in ``dtype``, contiguous.
    """
    count, m, n = parts.shape
    token, weight = (out, out) if scales is None else scales
    if m and n:
        with torch.cuda.device_of(parts):
            _finish[(tiles(m, _ROWS), tiles(n, _COLUMNS))](
                parts, parts.stride(0), parts.stride(1), out, token, weight, out if bias is None else bias, m, n,
                PARTS=count, SCALED=scales is not None, BIAS=bias is not None, BF16=dtype == torch.bfloat16,
                BM=_ROWS, BN=_COLUMNS, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def addend(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A bias as the kernels read it: fp32 values, rounded to the dtype of the result."""
    return None if bias is None else bias.to(dtype).float().contiguous()
