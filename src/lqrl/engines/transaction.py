"""Loading a complete set of weights into a model in place: every element once, or an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lqrl.engines.base import Digests, NamedTensors, RefreshError
from lqrl.engines.copy import Copy, counted_copies_, counted_copy_
from lqrl.engines.digest import digest, tensor_digests
from lqrl.quant.stream import StableTensors
from lqrl.quant.walk import walk

# What codes are made of; scales in one byte count as codes too, since they change as rarely.
_CODES = frozenset({torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn})

_BATCH_BYTES = 2**30  # of sources that wait to be copied together


@dataclass(frozen=True)
class Written:
    """What `write_weights_` did; the fields are those of `lqrl.types.RefreshReport`."""

    tensors: int
    elements: int
    frozen_elements: int
    elements_changed_fraction: float
    codes_changed_fraction: float


class _Ledger:
    """What has been written, and flags that stay on the device until the end (one host round trip a refresh)."""

    def __init__(self, model: nn.Module | HeldTensors, frozen: Digests) -> None:
        self._model = model
        self.frozen = frozen
        self.written: dict[str, int] = {}
        self._flags: dict[torch.device, Tensor] = {}  # a row for each tensor, in the order they came
        self._waiting: dict[torch.device, list[Copy]] = {}
        self._waiting_bytes = 0

    @cached_property
    def _names(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        # Not before the first tensor: the sender's GPU is busy with the stream from then on.
        held = self._model
        return (held.targets, held.aliases) if isinstance(held, HeldTensors) else loadable_tensors(held)

    @property
    def targets(self) -> dict[str, Tensor]:
        return self._names[0]

    def add(self, name: str, source: Tensor, stable: bool) -> None:
        """Write ``source``; one that is ``stable`` may wait until many are written together."""
        target = self._target(name, source)
        source = source.resolve_neg()  # a view that stands for the negative has the bits of the positive
        if stable and source.device == target.device:
            source = source.detach() if source.requires_grad else source
            self._waiting.setdefault(target.device, []).append(Copy(target, source, name, len(self.written)))
            self.written[name] = source.numel()
            self._waiting_bytes += source.numel() * source.element_size()
            if self._waiting_bytes >= _BATCH_BYTES:
                self._write_waiting()
            return
        # Not `non_blocking`: it would read the host's half of a copy before it is there, or after it was overwritten.
        source = source.detach().to(target.device)
        counted_copy_(target, source, name, self._flags_of(target.device)[len(self.written)])
        self.written[name] = source.numel()

    def _flags_of(self, device: torch.device) -> Tensor:
        if device not in self._flags:
            self._flags[device] = torch.zeros(len(self.targets), 2, dtype=torch.int64, device=device)
        return self._flags[device]

    def _write_waiting(self) -> None:
        for device, copies in self._waiting.items():
            counted_copies_(copies, self._flags_of(device))
        self._waiting, self._waiting_bytes = {}, 0

    def _target(self, name: str, source: Tensor) -> Tensor:
        target = self.targets.get(name)
        if target is None and name in self._names[1]:
            raise RefreshError(f"{name} is tied to {self._names[1][name]}; send it once, under that name")
        if target is None:
            raise RefreshError(
                f"the engine has no tensor named {name}; export with the scheme the engine was built for"
            )
        if name in self.written:
            raise RefreshError(f"{name} came twice")
        if name in self.frozen:
            raise RefreshError(f"{name} came although it is declared frozen; send it or declare it, not both")
        _check_plain(name, source)
        if source.shape != target.shape:
            raise RefreshError(f"{name} has shape {tuple(source.shape)}, the engine's is {tuple(target.shape)}")
        if source.dtype != target.dtype:
            raise RefreshError(
                f"{name} is {source.dtype}, the engine's is {target.dtype}; export in the engine's dtype"
            )
        return target

    def close(self) -> Written:
        missing = sorted(self.targets.keys() - self.written.keys() - self.frozen.keys())
        if missing:
            elements, total = sum(self.written.values()), sum(t.numel() for t in self.targets.values())
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise RefreshError(f"{elements} of {total} elements were written; missing: {shown}")
        self._check_frozen()
        self._write_waiting()
        flags = torch.stack([f.cpu() for f in self._flags.values()]).sum(0).tolist() if self._flags else []
        counts = {True: [0, 0], False: [0, 0]}  # is a code -> changed, elements
        for (name, elements), (changed, broken) in zip(self.written.items(), flags, strict=False):
            if broken:
                raise RefreshError(f"{name} holds NaN or inf; fix the policy and refresh again")
            count = counts[self.targets[name].dtype in _CODES]
            count[0] += changed
            count[1] += elements
        for name in self.frozen:
            counts[self.targets[name].dtype in _CODES][1] += self.targets[name].numel()
        fractions = {code: changed / max(elements, 1) for code, (changed, elements) in counts.items()}
        held = sum(self.targets[name].numel() for name in self.frozen)
        return Written(len(self.written), sum(self.written.values()), held, fractions[False], fractions[True])

    def _check_frozen(self) -> None:
        unknown = [name for name in self.frozen if name not in self.targets]
        if unknown:
            raise RefreshError(f"the engine has no tensor named {unknown[0]}, which was declared frozen")
        if not self.frozen:
            return
        held = tensor_digests([self.targets[name] for name in self.frozen])
        for (name, expected), found in zip(self.frozen.items(), held, strict=True):
            if found != expected:
                raise RefreshError(
                    f"{name} was declared frozen with digest {expected:x}, the engine holds {found:x}; send a complete "
                    "set of weights (a stage that changes such a tensor cannot be used with adapters)"
                )


def _check_plain(name: str, source: Tensor) -> None:
    """Refuse what has no elements, or elements that lie elsewhere than its address and strides say."""
    if not isinstance(source, Tensor):
        raise RefreshError(f"{name} is a {type(source).__name__}; send a tensor")
    if source.is_meta:
        raise RefreshError(f"{name} is on the meta device and has no elements; load the sender's weights first")
    if source.layout != torch.strided or source.is_nested:
        layout = "nested" if source.is_nested else source.layout
        raise RefreshError(f"{name} is {layout}; send it dense (tensor.to_dense())")
    if type(source).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # pyright: ignore[reportAttributeAccessIssue]
        raise RefreshError(
            f"{name} is a {type(source).__name__}, whose elements lie in other tensors; send a plain tensor "
            "(full_tensor() of a DTensor)"
        )


class HeldTensors:
    """The tensors of a model, walked once for many refreshes.

    Attributes:
        targets, aliases: see `loadable_tensors`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.targets, self.aliases = loadable_tensors(model)
        self._places = [
            (where, key, tensor, tensor.data_ptr(), name) for name, where, key, tensor, _ in _held(model, twice=False)
        ]

    def moved(self) -> list[str]:
        """Names whose tensor is another one than at the walk, or lies elsewhere."""
        return [
            name
            for where, key, tensor, address, name in self._places
            if where.get(key) is not tensor or tensor.data_ptr() != address
        ]


def loadable_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by state-dict name, tied ones once; and ``{other name: first name}``."""
    targets: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, _, _, tensor, persistent in _held(model, twice=True):
        if not persistent:
            continue
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            targets[name] = tensor.detach() if tensor.requires_grad else tensor
    return targets, aliases


def all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, the model's own computed ones (rotary frequencies, packed codes) included."""
    seen: set[int] = set()
    for name, _, _, tensor, _ in _held(model, twice=False):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _held(model: nn.Module, twice: bool) -> Iterator[tuple[str, Mapping[str, Tensor | None], str, Tensor, bool]]:
    """Name, the dictionary that holds the tensor and its key, the tensor, and whether it is part of the state dict.

    Reads the modules' own dictionaries: torch's iterators take several times as long. ``twice``: modules that occur
    twice come twice.
    """
    for prefix, module in walk(model, twice):
        dot = f"{prefix}." if prefix else ""
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield dot + name, module._parameters, name, tensor, True
        for name, tensor in module._buffers.items():
            if tensor is not None:
                yield dot + name, module._buffers, name, tensor, name not in module._non_persistent_buffers_set


@torch.no_grad()
def write_weights_(model: nn.Module | HeldTensors, weights: NamedTensors, frozen: Digests | None = None) -> Written:
    """Copy ``weights`` over the tensors of ``model``, in place; those declared ``frozen`` are checked instead.

    `StableTensors` are copied together, in a few launches; other streams tensor by tensor, as they come.

    Raises:
        RefreshError: see `lqrl.engines.base.RolloutEngine.update_weights`; part of ``model`` may be overwritten then.
    """
    ledger = _Ledger(model, frozen or {})
    stable = isinstance(weights, StableTensors)
    if isinstance(weights, StableTensors):
        weights = weights.unchecked()
    try:
        for name, tensor in weights:
            ledger.add(name, tensor, stable)
    except RefreshError:
        raise
    except Exception as error:
        raise RefreshError(f"the stream of weights failed after {len(ledger.written)} tensors: {error}") from error
    return ledger.close()


def model_digest(model: nn.Module) -> str:
    """Digest of every parameter and buffer."""
    return digest(all_tensors(model))
