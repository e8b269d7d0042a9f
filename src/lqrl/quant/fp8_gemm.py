"""Products of e4m3 codes with scales: `torch._scaled_mm` and a Triton kernel on CUDA, fp32 products elsewhere.

A product of two e4m3 values is exact in fp32, so the emulation differs from a tensor core in the order and the width
of the sums only. Learner and engine run the same function on the same machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lqrl.quant import hopper_gemm
from lqrl.quant.triton_use import TENSOR_CORES_FP8, use_triton

BLOCK = 128
_MULTIPLE = 16  # what cuBLAS asks of K and N
_RESULTS = (torch.float32, torch.bfloat16)  # that the Triton kernel writes


def operand(codes: Tensor) -> Tensor:
    """Weight codes ``[N, K]`` as the products below read them: fp32 off CUDA, where every step would convert them."""
    return codes if codes.is_cuda else codes.float()


def row_scaled(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``dtype((x @ weight.T) * weight_scale * x_scale)``.

    On CUDA with a bf16 result this is one call with fast accumulation, whose bits are those of vLLM's CUTLASS kernel;
    or, where that is faster, a kernel with the same chain of sums: `lqrl.quant.hopper_gemm`, or Triton's
    (`triton_fp8.ROW_TILES`).

    Args:
        x: e4m3 codes ``[M, K]``.
        x_scale: fp32 ``[M, 1]``.
        weight: `operand` of the codes ``[N, K]``.
        weight_scale: fp32 ``[N, 1]``.
        dtype: of the result.
    """
    if _on_tensor_cores(weight):
        x, columns = x.contiguous(), weight.t()
        cut = hopper_gemm.cut_of(x, weight) if dtype == torch.bfloat16 else None
        if cut is not None:
            return hopper_gemm.linear(x, weight, cut, x_scale, weight_scale)
        if dtype == torch.bfloat16 and use_triton(weight, TENSOR_CORES_FP8):
            from lqrl.quant import triton_fp8, triton_scaled

            tile = triton_fp8.row_tile_for(len(x), len(weight))
            if tile is not None:
                return triton_scaled.gemm(x, weight.contiguous(), weight_scale, x_scale, None, dtype, tile)
        if dtype == torch.bfloat16:
            return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                x, columns, x_scale.contiguous(), weight_scale.view(1, -1), out_dtype=dtype, use_fast_accum=True
            )
        one = torch.ones((), device=x.device)
        acc = torch._scaled_mm(x, columns, one, one, out_dtype=torch.float32, use_fast_accum=True)  # pyright: ignore
    else:
        acc = _product(x, weight)
    return acc.mul_(weight_scale.view(1, -1)).mul_(x_scale).to(dtype)


def block_scaled(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over blocks of 128 inputs of ``(x @ weight.T) * (x_scale * weight_scale)``, added in fp32, in order.

    Args:
        x: e4m3 codes ``[M, K]``.
        x_scale: fp32 ``[M, ceil(K / 128)]``.
        weight: `operand` of the codes ``[N, K]``.
        weight_scale: fp32 ``[ceil(N / 128), ceil(K / 128)]``.
        dtype: of the result.
    """
    if weight.shape[1] % _MULTIPLE == 0 and dtype in _RESULTS and use_triton(weight, TENSOR_CORES_FP8):
        from lqrl.quant import triton_fp8

        return triton_fp8.block_scaled(x, x_scale, weight, weight_scale, dtype)
    n = weight.shape[0]
    columns = weight_scale.repeat_interleave(BLOCK, 0)[:n]  # [N, ceil(K / 128)]
    acc = torch.zeros(x.shape[0], n, device=x.device)
    for block, start in enumerate(range(0, x.shape[1], BLOCK)):
        part = _product(x[:, start : start + BLOCK], weight[:, start : start + BLOCK])
        acc += part.mul_(x_scale[:, block : block + 1] * columns[:, block])
    return acc.to(dtype)


def _on_tensor_cores(weight: Tensor) -> bool:
    if not weight.is_cuda or weight.shape[0] % _MULTIPLE or weight.shape[1] % _MULTIPLE:
        return False
    return torch.cuda.get_device_capability(weight.device) >= TENSOR_CORES_FP8


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` with fp32 sums; on CUDA through bf16, which holds e4m3 exactly."""
    if weight.is_cuda:
        return torch.mm(x.bfloat16(), weight.bfloat16().t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight)
