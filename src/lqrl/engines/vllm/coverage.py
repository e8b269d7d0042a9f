"""Receiving a complete set of weights: held until every element is there, so that a faulty stream changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lqrl.engines.base import NamedTensors, RefreshError
from lqrl.quant.finite_checks import FiniteChecks
from lqrl.quant.stream import StableTensors

_CODES = frozenset({torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn})
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def receive(
    weights: NamedTensors, expected: Mapping[str, Tensor], aliases: Mapping[str, str], *, keep: bool
) -> dict[str, Tensor]:
    """All of ``weights``, checked by name, shape, dtype and element, in the order they came.

    The tensors of `StableTensors` are held as they are, others as copies.

    Args:
        weights: the stream.
        expected: what must come; only shapes and dtypes are read.
        aliases: names that are another one's.
        keep: copy `StableTensors` too, for a receiver that keeps them.

    Raises:
        RefreshError: on a missing, unknown, doubled, misshapen, mistyped or non-finite tensor, or when the stream
            raises.
    """
    copies = keep or not isinstance(weights, StableTensors)
    received: dict[str, Tensor] = {}
    checks = FiniteChecks()
    try:
        for name, tensor in weights:
            _check(name, tensor, expected, aliases, received)
            received[name] = tensor.detach().clone() if copies else tensor.detach()
            checks.note(name, name, received[name])
        checks.refuse()
    except RefreshError:
        raise
    except Exception as error:
        raise RefreshError(f"the stream of weights failed after {len(received)} tensors: {error}") from error
    missing = sorted(expected.keys() - received.keys())
    if missing:
        elements, total = (sum(t.numel() for t in held.values()) for held in (received, expected))
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RefreshError(f"{elements} of {total} elements came; missing: {shown}")
    return received


def _check(
    name: str,
    tensor: Tensor,
    expected: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    received: Mapping[str, Tensor],
) -> None:
    if name in aliases:
        raise RefreshError(f"{name} is tied to {aliases[name]}; send it once, under that name")
    if name not in expected:
        raise RefreshError(f"the engine has no tensor named {name}; export with the scheme the engine was built for")
    if name in received:
        raise RefreshError(f"{name} came twice")
    wanted = expected[name]
    if tensor.shape != wanted.shape:
        raise RefreshError(f"{name} has shape {tuple(tensor.shape)}, the engine's is {tuple(wanted.shape)}")
    if tensor.dtype != wanted.dtype:
        raise RefreshError(f"{name} is {tensor.dtype}, the engine's is {wanted.dtype}; export in the engine's dtype")


@torch.no_grad()
def changed_fractions(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[float, float]:
    """Share of unquantized elements, and of low-bit codes, whose bits differ; without elements 0.

    Args:
        before: an earlier set of the same names; empty when there was none, and everything is new.
        after: the set that has come.
    """
    changed = _changed(before, after) if before else [tensor.numel() for tensor in after.values()]
    counts = {True: [0, 0], False: [0, 0]}  # is a code -> changed, elements
    for tensor, differ in zip(after.values(), changed, strict=True):
        count = counts[tensor.dtype in _CODES]
        count[0] += differ
        count[1] += tensor.numel()
    elements, codes = (differ / max(total, 1) for differ, total in (counts[False], counts[True]))
    return elements, codes


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[int]:
    """Elements that differ, for each tensor; one host round trip."""
    flags = []
    for name, tensor in after.items():
        bits = _BITS[tensor.element_size()]
        old = before[name].to(tensor.device)
        flags.append(torch.count_nonzero(old.contiguous().view(bits) != tensor.contiguous().view(bits)))
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
