"""The kernel for products of a few rows on Hopper GPUs, against the products that it stands for."""

from __future__ import annotations

import torch

from lqrl.doctor.machine import dotted
from lqrl.doctor.report import Row, Section, WrongResultError, attempt
from lqrl.doctor.row_kernels import check_near
from lqrl.quant import hopper_gemm
from lqrl.quant.hopper_cuts import cut_for
from lqrl.quant.hopper_source import Kind

_ROWS, _OUTPUTS, _INPUTS = 48, 512, 1024
_ERRORS: dict[Kind, float] = {"bf16": 3e-3, "e4m3": 4e-3, "int8": 3e-3}  # of a bf16 result; e4m3 is added in 14 bits
_DTYPES: dict[Kind, torch.dtype] = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def hopper_section() -> Section:
    """A row for each CUDA GPU."""
    rows = [
        attempt(f"cuda:{index} few rows", _few_rows, torch.device("cuda", index))
        for index in range(torch.cuda.device_count())
    ]
    none = Row("few rows", "missing", "no NVIDIA GPU", "a GPU of capability 9.0")
    return Section("Hopper kernel", tuple(rows) or (none,))


def _few_rows(name: str, device: torch.device) -> Row:
    reason = hopper_gemm.obstacle(device.index)
    if reason is not None:
        dot = dotted(torch.cuda.get_device_capability(device))
        detail = f"{reason}, and this is {dot}" if "capability" in reason else reason
        off = reason.startswith(hopper_gemm.VARIABLE)
        remedy = f"unset {hopper_gemm.VARIABLE}" if off else ""
        return Row(name, "missing", f"{detail}: Triton's and the libraries' products run instead", remedy)
    for kind in _DTYPES:
        check(kind, device)
    return Row(name, "ok", "compiled by NVRTC, agrees with float64")


def check(kind: Kind, device: torch.device) -> None:
    """One product of each kind, by the cut that it is given.

    Raises:
        WrongResultError: when it is not the product.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(rows, _INPUTS, generator=generator).mul(20).to(_DTYPES[kind]).to(device)
        for rows in (_ROWS, _OUTPUTS)
    )
    scales = [torch.rand(rows, 1, generator=generator).to(device) for rows in (_ROWS, _OUTPUTS)]
    cut = cut_for(kind, _ROWS, _OUTPUTS, _INPUTS)
    if cut is None:
        raise WrongResultError(f"no cut for {_ROWS} rows of {kind}")
    got = hopper_gemm.linear(x, weight, cut, *([] if kind == "bf16" else scales))
    true = x.double() @ weight.double().t()
    if kind != "bf16":
        true = true * scales[1].view(1, -1) * scales[0]
    check_near(f"the {kind} product of a few rows", got, true, _ERRORS[kind])
    if kind == "bf16":
        gated = hopper_gemm.linear(x, weight, cut, gated=True)
        gate, up = (part.bfloat16().double() for part in true.split(_OUTPUTS // 2, 1))
        check_near("the product of a gate", gated, torch.nn.functional.silu(gate) * up, 2 * _ERRORS[kind])
