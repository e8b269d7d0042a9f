"""Kernels that let the one behind them begin early, where that one asks for it: `lqrl.quant.hopper_gemm` in graphs."""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def next_may_begin() -> None:
    """Once all programs have come here, the next kernel may take what room is left, and wait for this one's end there.

    It makes ready and reads what this kernel does not write, a product its weights. Kernels launched the usual way
    are not concerned.
    """
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
