"""NaN and inf in tensors of any format."""

from __future__ import annotations

import torch
from torch import Tensor

from lqrl.quant.numerics.mx import E8M0_NAN

_FLOAT8_NAN = 0x7F  # e4m3 has no inf and one NaN a sign


def all_finite(tensor: Tensor) -> Tensor:
    """Whether no element is NaN or inf: a bool on the tensor's device; integers are always finite."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype == torch.float8_e4m3fn:
        return ((tensor.view(torch.uint8) & _FLOAT8_NAN) != _FLOAT8_NAN).all()
    # The extremes tell (NaN is both), many times faster than a look at each element.
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def whole_scale(name: str, tensor: Tensor) -> Tensor:
    """`all_finite`, and for a scale in bytes (e8m0) that none is NaN; codes in bytes may be anything."""
    if tensor.dtype == torch.uint8 and name.endswith("weight_scale"):
        return (tensor != E8M0_NAN).all()
    return all_finite(tensor)
