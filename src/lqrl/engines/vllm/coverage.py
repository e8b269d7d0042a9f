"""Receiving a complete set of weights: held until every element is there, so that a faulty stream changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lqrl.engines.base import NamedTensors, RefreshError
from lqrl.quant.finite_checks import FiniteChecks
from lqrl.quant.stream import StableTensors

CODES = frozenset({torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn})
"""What codes are made of; scales in one byte count as codes too."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOOK_BYTES = 2**26  # of tensors that wait to be looked at for NaN together


@torch.no_grad()
def checked(
    weights: NamedTensors,
    expected: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    *,
    keep: bool,
    frozen: Collection[str] = (),
    looks: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Pass ``weights`` on one by one, checked by name, shape, dtype and element; the end is the check of them all.

    The tensors of `StableTensors` are passed on as they are, others as copies.

    Args:
        weights: the stream.
        expected: what must come; only shapes and dtypes are read.
        aliases: names that are another one's.
        keep: copy `StableTensors` too, for a receiver that keeps them.
        frozen: names that are held already and must not come.
        looks: look for NaN and inf, and let the sender look; otherwise that is the receiver's.

    Raises:
        RefreshError: on an unknown, doubled, misshapen or mistyped tensor before it is passed on; at the end on a
            missing or non-finite one; or when the stream raises.
    """
    copies = keep or not isinstance(weights, StableTensors)
    if isinstance(weights, StableTensors) and not looks:
        weights = weights.unchecked()
    received: dict[str, int] = {}
    checks, waiting = FiniteChecks(), 0
    stream = iter(weights)
    while True:
        try:
            name, tensor = next(stream)
            _check(name, tensor, expected, aliases, received, frozen)
            tensor = tensor.detach().clone() if copies else tensor.detach()
            if looks:
                checks.note(name, name, tensor)
            waiting += tensor.nbytes
            if waiting > _LOOK_BYTES:  # small tensors are held until then
                checks.refuse()
                checks, waiting = FiniteChecks(), 0
        except StopIteration:
            break
        except RefreshError:
            raise
        except Exception as error:
            raise RefreshError(f"the stream of weights failed after {len(received)} tensors: {error}") from error
        received[name] = tensor.numel()
        yield name, tensor
        del tensor
    try:
        checks.refuse()
    except Exception as error:
        raise RefreshError(f"the stream of weights failed after {len(received)} tensors: {error}") from error
    missing = sorted(expected.keys() - received.keys())
    if missing:
        elements, total = sum(received.values()), sum(t.numel() for t in expected.values())
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RefreshError(f"{elements} of {total} elements came; missing: {shown}")


def _check(
    name: str,
    tensor: Tensor,
    expected: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    received: Collection[str],
    frozen: Collection[str],
) -> None:
    if name in aliases:
        raise RefreshError(f"{name} is tied to {aliases[name]}; send it once, under that name")
    if name in frozen:
        raise RefreshError(f"{name} came although it is declared frozen; send it or declare it, not both")
    if name not in expected:
        raise RefreshError(f"the engine has no tensor named {name}; export with the scheme the engine was built for")
    if name in received:
        raise RefreshError(f"{name} came twice")
    wanted = expected[name]
    if tensor.shape != wanted.shape:
        raise RefreshError(f"{name} has shape {tuple(tensor.shape)}, the engine's is {tuple(wanted.shape)}")
    if tensor.dtype != wanted.dtype:
        raise RefreshError(f"{name} is {tensor.dtype}, the engine's is {wanted.dtype}; export in the engine's dtype")


class Passing(Mapping[str, Tensor]):
    """A stream in the place of the mapping of all its tensors, for a receiver that goes through its items once.

    Attributes:
        elements: of each that has passed.

    Args:
        stream: names and tensors.
        kept: names that can be asked for after they have passed.
    """

    def __init__(self, stream: Iterable[tuple[str, Tensor]], kept: Collection[str]) -> None:
        self.elements: dict[str, int] = {}
        self._stream, self._kept = stream, dict.fromkeys(kept, torch.empty(0))

    def items(self) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
        """The stream; nothing of it is held here, but for what is kept."""
        for name, tensor in self._stream:
            self.elements[name] = tensor.numel()
            if name in self._kept:
                self._kept[name] = tensor
            yield name, tensor
            del tensor

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


@torch.no_grad()
def changed_fractions(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], frozen: Iterable[Tensor] = ()
) -> tuple[float, float]:
    """Share of unquantized elements, and of low-bit codes, whose bits differ; without elements 0.

    Args:
        before: an earlier set; where it lacks some of the names, everything is new.
        after: the set that has come.
        frozen: what was held already, and counts as unchanged; only shapes and dtypes are read.
    """
    known = after.keys() <= before.keys()
    changed = _changed(before, after) if known else [tensor.numel() for tensor in after.values()]
    counts = {True: [0, 0], False: [0, 0]}  # is a code -> changed, elements
    for tensor, differ in zip(after.values(), changed, strict=True):
        count = counts[tensor.dtype in CODES]
        count[0] += differ
        count[1] += tensor.numel()
    for tensor in frozen:
        counts[tensor.dtype in CODES][1] += tensor.numel()
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
