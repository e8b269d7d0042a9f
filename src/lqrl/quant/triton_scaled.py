"""Products of 8-bit codes, int8 or e4m3, with a scale for each token and each output, by tiles that a table chooses.

Sums of integers are exact, so every tile gives the bits of the eager code. Sums of e4m3 products are as wide as the
tensor cores': all tiles whose instruction is 64 high, which is every ``tall`` one and those of 64 rows or more, give
the bits of one chain along K; splits do not.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Launches take options of the compiler besides the parameters; a call inside a kernel looks as if it never returned.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lqrl.quant.triton_epilogue import addend, finish, store_tile
from lqrl.quant.triton_tiles import GROUP, Tile, fitted, operand_tile, split_steps, tile_place
from lqrl.quant.triton_use import shared_memory, tiles


@triton.jit(do_not_specialize=["m"])
def _gemm(
    x, w, x_stride, w_stride, out_ptr, token_ptr, weight_ptr, bias_ptr, m, n, K: tl.constexpr,
    FP8: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr, TMA: tl.constexpr,
    TALL: tl.constexpr, STEPS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One split of K; without ``SCALED`` the sum itself is written, to the split's part of ``out``.

    Outputs from ``FIRST`` and from ``SECOND`` on, where a tile begins, are matrices of their own behind each other.
    """
    tile_m, tile_n = tile_place(m, n, BM, BN, GROUP)
    rows = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    columns = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    kind: tl.constexpr = tl.float32 if FP8 else tl.int32
    acc = tl.zeros((BN, BM) if TALL else (BM, BN), dtype=kind)
    for step in range(0, STEPS):
        start = (split * STEPS + step) * BK
        a = operand_tile(x, tile_m, start, rows, m, x_stride, K, TMA, BM, BK)
        b = operand_tile(w, tile_n, start, columns, n, w_stride, K, TMA, BN, BK)
        acc = tl.dot(b, a.T, acc, out_dtype=kind) if TALL else tl.dot(a, b.T, acc, out_dtype=kind)
    if TALL:
        acc = acc.T
    if FIRST > 0:
        column = tile_n * BN
        start = tl.where(column < FIRST, 0, tl.where(column < SECOND, FIRST, SECOND))
        width = tl.where(column < FIRST, FIRST, tl.where(column < SECOND, SECOND - FIRST, n - SECOND))
        out_ptr += m.to(tl.int64) * start
        weight_ptr += start
        bias_ptr += start
        store_tile(acc, out_ptr, token_ptr, weight_ptr, bias_ptr, rows, columns - start, m, width, True, BIAS, BF16)
    elif SCALED:
        store_tile(acc, out_ptr, token_ptr, weight_ptr, bias_ptr, rows, columns, m, n, True, BIAS, BF16)
    else:
        pointers = out_ptr + (split * m + rows)[:, None] * n + columns[None, :]
        tl.store(pointers, acc, mask=(rows < m)[:, None] & (columns < n)[None, :])


def gemm(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    token_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """``dtype((x @ weight.T * weight_scale) * token_scale)``, then ``+ bias`` in ``dtype``.

    Args:
        x: int8 or e4m3 codes ``[M, K]``, contiguous.
        weight: codes ``[>= N, >= K]``, contiguous; padding is not read.
        weight_scale: fp32, of N elements.
        token_scale: fp32, of M elements.
        bias: ``[N]`` or none.
        dtype: of the result, fp32 or bf16.
        tile: how the product is cut; ``tma`` is ignored where the shape does not allow it.
    """
    return _gemm_into((), x, weight, weight_scale, token_scale, bias, dtype, tile)


# By what the compiler makes another kernel of, see `_launch`.
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    fixed: tuple[Any, ...],
    options: tuple[torch.device, int, int],
    aligned: bool,
) -> None:
    """Run `_gemm`; a kernel that ran before is launched without the search for it, a third of the host's work.

    Args:
        grid: programs.
        arguments: of the kernel, up to its constants.
        fixed: its constants, in its order.
        options: the device, and warps and stages of a program.
        aligned: every pointer is a multiple of 16; others are left to Triton.
    """
    # The height alone is not compiled in; the types of tensors follow from the constants, but for the result's and the
    # scales', fp32.
    key = (options, fixed, arguments[2], arguments[3], arguments[4].dtype, arguments[-1])
    kernel = _compiled.get(key) if aligned else None
    if kernel is not None:
        kernel[grid](*arguments, *fixed)
        return
    _, warps, stages = options
    ran = _gemm[grid](*arguments, *fixed, num_warps=warps, num_stages=stages, enable_fp_fusion=False)
    if aligned and ran is not None:  # the interpreter has no kernels
        _compiled[key] = ran


def parts_fit(widths: Sequence[int], tile: Tile) -> bool:
    """Whether `gemm_apart` can write two or three matrices of these ``widths`` with ``tile``."""
    return len(widths) in (2, 3) and tile.splits == 1 and not any(width % tile.n for width in widths)


def gemm_apart(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    token_scale: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    dtype: torch.dtype,
    tile: Tile,
) -> list[Tensor]:
    """`gemm` whose columns are written to matrices of their own: ``[M, widths[i]]``, each contiguous.

    Args:
        x, weight, weight_scale, token_scale, bias, dtype: as for `gemm`.
        widths: of the matrices, N in all.
        tile: `parts_fit` it.

    Raises:
        ValueError: when the widths do not fit the tile or the weight.
    """
    if not parts_fit(widths, tile) or sum(widths) != weight_scale.numel():
        raise ValueError(f"widths {list(widths)} of {weight_scale.numel()} outputs are not two or three of {tile}")
    m, first = len(x), widths[0]
    out = _gemm_into((first, first + widths[1]), x, weight, weight_scale, token_scale, bias, dtype, tile)
    parts = out.view(-1).split([m * width for width in widths])
    return [part.view(m, width) for part, width in zip(parts, widths, strict=True)]


def _gemm_into(
    ends: tuple[()] | tuple[int, int],
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    token_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """`gemm`; ``ends``: the outputs that end the first two of several matrices, which lie one behind the other."""
    (m, k), n = x.shape, weight_scale.numel()
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m:
        return out
    scales, added = (token_scale.contiguous(), weight_scale.contiguous()), addend(bias, dtype)
    tile = fitted(tile, (tile.m + tile.n) * tile.k, shared_memory(x.device))
    fp8, (steps, splits) = x.dtype == torch.float8_e4m3fn, split_steps(k, tile)
    whole = splits == 1
    parts = out[None]
    if not whole:
        parts = torch.empty(splits, m, n, dtype=torch.float32 if fp8 else torch.int32, device=x.device)
    tma = tile.tma and k % 16 == 0 and weight.shape[1] == k and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    bias_or_any = scales[1] if added is None else added
    arguments = (
        TensorDescriptor.from_tensor(x, [tile.m, tile.k]) if tma else x,
        TensorDescriptor.from_tensor(weight, [tile.n, tile.k]) if tma else weight,
        x.stride(0), weight.stride(0), parts, *scales, bias_or_any, m, n,
    )  # fmt: skip
    first, second = ends or (0, 0)
    fixed = (
        k, fp8, whole, added is not None, dtype == torch.bfloat16, tma, tile.tall, steps, first, second, tile.m, tile.n,
        tile.k, GROUP,
    )  # fmt: skip
    places = parts.data_ptr() | scales[0].data_ptr() | scales[1].data_ptr() | bias_or_any.data_ptr()
    if not tma:
        places |= x.data_ptr() | weight.data_ptr()
    with torch.cuda.device_of(x):
        _launch(
            (tiles(m, tile.m) * tiles(n, tile.n), splits, 1),
            arguments,
            fixed,
            (x.device, tile.warps, tile.stages),
            places % 16 == 0,
        )
    return out if whole else finish(parts, scales, added, dtype, out)
