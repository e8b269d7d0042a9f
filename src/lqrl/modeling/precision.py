"""Which numbers a forward pass computes with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lqrl.quant.experts import AlignedExperts
from lqrl.quant.linear import AlignedLinear

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_dtype(name: str) -> torch.dtype:
    """A dtype by its torch name.

    Raises:
        ValueError: for a name that is neither float32 nor bfloat16.
    """
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def cast_parameters(policy: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """``policy``'s parameters in ``dtype``, differentiable; without those of aligned layers, which round their own.

    A forward pass on these computes with what is exported, not with the masters. Tied parameters come under each of
    their names, as one tensor.
    """
    aligned = tuple(f"{n}." for n, m in policy.named_modules() if isinstance(m, (AlignedLinear, AlignedExperts)))
    done: dict[int, Tensor] = {}
    cast: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if not name.startswith(aligned):
            if id(parameter) not in done:
                done[id(parameter)] = parameter.to(dtype)
            cast[name] = done[id(parameter)]
    return cast
