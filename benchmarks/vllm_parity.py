"""This library's quantizers and linear layers against vLLM's CUDA kernels: which bits are equal?

Needs a CUDA device and vLLM. For each comparison: elements, and the share that is equal bit for bit.

    python benchmarks/vllm_parity.py
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor

from lqrl.quant import numerics
from lqrl.quant.methods import linear_method
from lqrl.quant.scheme import QuantScheme

SHAPES = ((64, 4096, 6144), (512, 4096, 24576), (37, 12288, 4096), (2048, 1024, 4096))


class Tally:
    """Elements compared and equal, by what was compared."""

    def __init__(self) -> None:
        self.counts: dict[str, list[float]] = {}

    def add(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        if ours.shape != theirs.shape:
            ours = ours.reshape(theirs.shape)
        equal = int((ours.float() == theirs.float()).sum())
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)
        count = self.counts.setdefault(name, [0, 0, 0.0])
        count[0] += theirs.numel()
        count[1] += equal
        count[2] = max(count[2], float(difference))

    def report(self) -> None:
        for name, (total, equal, difference) in self.counts.items():
            print(f"{name:58} {int(total):12,} {equal / total:10.4%}  rel {difference:.1e}")


def inputs(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Activations of uneven rows and a weight, in bf16."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * torch.rand(m, 1, device="cuda").bfloat16() * 4
    return x, (torch.randn(n, k, device="cuda") * 0.02).bfloat16()


def compare_quantizers(tally: Tally, x: Tensor, ops) -> None:
    codes, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    ours = numerics.quantize_fp8_token(x)
    tally.add("fp8 per token: codes", ours[0], codes)
    tally.add("fp8 per token: scales", ours[1], scale)
    codes, scale = ops.scaled_fp8_quant(x)
    ours = numerics.quantize_fp8_per_tensor_dynamic(x)
    tally.add("fp8 per tensor: codes", ours[0], codes)
    tally.add("fp8 per tensor: scale", ours[1], scale)
    codes, scale, _ = ops.scaled_int8_quant(x)
    ours = numerics.quantize_int8_token(x)
    tally.add("int8 per token: codes", ours[0], codes)
    tally.add("int8 per token: scales", ours[1], scale)


def compare_group_quantizer(tally: Tally, x: Tensor) -> None:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    codes, scale = per_token_group_quant_fp8(x, 128)
    ours = numerics.quantize_fp8_group(x, 128)
    tally.add("fp8 per group of 128: codes", ours[0], codes)
    tally.add("fp8 per group of 128: scales", ours[1], scale)


def compare_row_scaled(tally: Tally, x: Tensor, weight: Tensor, preset: str, ops) -> None:
    method = linear_method(QuantScheme.preset(preset))
    tensors = method.quantize(weight)
    y = method.linear(x, method.operands(tensors, x.dtype), None)
    if preset == "int8_w8a8":
        codes, scale, _ = ops.scaled_int8_quant(x)
    else:
        codes, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    columns = tensors["weight_scale"].reshape(1, -1).expand(1, len(weight)).contiguous()
    theirs = ops.cutlass_scaled_mm(codes, tensors["weight"].t(), scale, columns, x.dtype)
    tally.add(f"{preset}: linear layer against cutlass_scaled_mm", y, theirs)


def compare_block(tally: Tally, x: Tensor, weight: Tensor, ops) -> None:
    method = linear_method(QuantScheme.preset("fp8_per_block"))
    tensors = method.quantize(weight)
    y = method.linear(x, method.operands(tensors, x.dtype), None)
    codes, scale = numerics.quantize_fp8_group(x, 128)
    column_major = scale.t().contiguous().t()
    theirs = ops.cutlass_scaled_mm(codes, tensors["weight"].t(), column_major, tensors["weight_scale"].t(), x.dtype)
    tally.add("fp8_per_block: linear layer against cutlass_scaled_mm", y, theirs)


def compare_int4(tally: Tally, x: Tensor, weight: Tensor, group: int, ops) -> None:
    """Marlin's W4A16 on our codes and scales."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        apply_gptq_marlin_linear,
        marlin_make_empty_g_idx,
        marlin_make_workspace_new,
        marlin_permute_scales,
    )
    from vllm.scalar_type import scalar_types

    scheme = QuantScheme.preset("int4_w4a16" if group == 128 else "int4_w4a16_g32")
    method = linear_method(scheme)
    tensors, (n, k) = method.quantize(weight), weight.shape
    y = method.linear(x, method.operands(tensors, x.dtype), None)
    empty = marlin_make_empty_g_idx(weight.device)
    # checkpoint layout [N, K / 8] along the input to GPTQ's [K / 8, N]
    packed = ops.gptq_marlin_repack(tensors["weight_packed"].t().contiguous(), empty, k, n, 4)
    scales = marlin_permute_scales(tensors["weight_scale"].t().contiguous(), k, n, group)
    theirs = apply_gptq_marlin_linear(
        input=x, weight=packed, weight_scale=scales, weight_zp=empty, g_idx=empty, g_idx_sort_indices=empty,
        workspace=marlin_make_workspace_new(weight.device), wtype=scalar_types.uint4b8, output_size_per_partition=n,
        input_size_per_partition=k, is_k_full=True,
    )  # fmt: skip
    tally.add(f"{scheme.name}: linear layer against Marlin", y, theirs)
    exact = (x.double() @ method.dequantize(tensors, torch.float32).double().T).to(x.dtype)
    tally.add(f"{scheme.name}: ours against fp64 rounded", y, exact)
    tally.add(f"{scheme.name}: Marlin against fp64 rounded", theirs, exact)


def main() -> None:
    """Print the table; a comparison that this vLLM cannot run says why."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm
    import vllm._custom_ops as ops

    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, vllm {vllm.__version__}")
    tally, failed = Tally(), {}
    for m, k, n in SHAPES:
        x, weight = inputs(m, k, n)
        steps = {
            "quantizers": lambda x=x: compare_quantizers(tally, x, ops),
            "group quantizer": lambda x=x: compare_group_quantizer(tally, x),
            **{
                preset: lambda x=x, w=weight, p=preset: compare_row_scaled(tally, x, w, p, ops)
                for preset in ("int8_w8a8", "fp8_per_channel", "fp8_per_tensor")
            },
            "fp8_per_block": lambda x=x, w=weight: compare_block(tally, x, w, ops),
            "int4 g128": lambda x=x, w=weight: compare_int4(tally, x, w, 128, ops),
            "int4 g32": lambda x=x, w=weight: compare_int4(tally, x, w, 32, ops),
        }
        for name, step in steps.items():
            try:
                step()
            except (RuntimeError, ImportError, AttributeError, TypeError, NotImplementedError) as error:
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    tally.report()
    for name, reason in failed.items():
        print(f"{name}: not compared, {reason}")


if __name__ == "__main__":
    main()
