"""Copies straight into the memory that vLLM computes with, in the place of a reload: learned, and proven before use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lqrl.engines.base import RefreshError
from lqrl.engines.copy import Copy, counted_copies_
from lqrl.engines.vllm.held import Held, Number, all_held, differing, state_of
from lqrl.engines.vllm.layout import SentTensors
from lqrl.engines.vllm.trial import TrialWeights

_BATCH_BYTES = 2**28  # of sources on a GPU that wait to be copied together
_SEEDS = (1, 2)


class UnexplainedError(RuntimeError):
    """What vLLM makes of weights is more than copies of them; they must be loaded by a reload."""


class DirectCopies:
    """Where each sent tensor goes in a model.

    Attributes:
        targets: places by the name of what is sent, as `lqrl.engines.vllm.layout.Part` has them.
        numbers: floats that are a sent tensor's only element, by its name.
        scratch: names of what generation changes, beside parameters and buffers; it is not compared.

    Args:
        held: of the model, while it holds what is sent.
        sent: that.
        scratch: see there.

    Raises:
        UnexplainedError: naming the first sent tensor that has no place.
    """

    def __init__(self, held: Held, sent: SentTensors, scratch: frozenset[str] = frozenset()) -> None:
        self.scratch = scratch
        self.targets: dict[str, list[Tensor]] = {name: [] for name in sent.names}
        self.numbers: dict[str, list[Number]] = {}
        self._places = {name: held.tensors[name].data_ptr() for name in held.registered}
        self._owners: dict[str, int] = {}
        memories = {held.tensors[name].untyped_storage().data_ptr() for name in held.registered}
        for name, tensor in held.tensors.items():
            if name in held.registered or tensor.untyped_storage().data_ptr() not in memories:
                for part in sent.parts_of(name, tensor):
                    self.targets[part.name].append(part.target)
                    self._places[name] = tensor.data_ptr()
        for name, number in held.numbers.items():
            found = sent.scalar_of(name, number.value)
            if found is not None:
                self.numbers.setdefault(found, []).append(number)
                self._owners[name] = id(number.owner)
        lost = next((name for name, found in self.targets.items() if not found and name not in self.numbers), None)
        if lost is not None:
            raise UnexplainedError(f"no tensor of its model holds {lost} as it was sent")

    def at(self, addresses: Mapping[str, int]) -> bool:
        """Whether all parameters and buffers are where they were.

        Args:
            addresses: of those that have storage, by name.
        """
        return all(self._places.get(name) == address for name, address in addresses.items())

    def moved(self, model: nn.Module) -> list[str]:
        """Names of what is written and lies elsewhere than when this was learned."""
        held = all_held(model)
        places = {name: tensor.data_ptr() for name, tensor in held.tensors.items()}
        owners = {name: id(number.owner) for name, number in held.numbers.items()}
        return [name for name, place in self._places.items() if places.get(name) != place] + [
            name for name, owner in self._owners.items() if owners.get(name) != owner
        ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def write(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        """Copy a complete set, on a GPU many tensors in one launch.

        Args:
            weights: as vLLM would load them. On a GPU they must stay as they are for as long as they are held here.

        Returns:
            The number of elements whose bits changed, by name.

        Raises:
            RefreshError: for a tensor that is not finite, or is not known, or does not come; the model holds part of
                the set then.
        """
        writing, come = _Writing(), set[str]()
        scalars: dict[str, Tensor] = {}
        for name, tensor in weights:
            come.add(name)
            if name not in self.targets:
                raise RefreshError(f"vLLM was tried without {name}; build a new engine")
            for target in self.targets[name]:
                writing.add(name, target, tensor)
            if name in self.numbers:
                scalars[name] = tensor.detach().reshape(())
        missing = self.targets.keys() - come
        if missing:
            raise RefreshError(f"{min(missing)} did not come; send a complete set of weights")
        changed = writing.finish()
        values = torch.stack([scalar.double() for scalar in scalars.values()]).tolist() if scalars else []
        for name, value in zip(scalars, values, strict=True):
            if not math.isfinite(value):
                raise RefreshError(f"{name} holds NaN or inf; fix the policy and refresh again")
            differ = sum(number.value != value for number in self.numbers[name])
            changed[name] = max(changed.get(name, 0), min(differ, 1))
            for number in self.numbers[name]:
                number.set(value)
        return changed


class _Writing:
    """Copies that wait for each other, and what has been found of those that are done."""

    def __init__(self) -> None:
        self._waiting: dict[torch.device, list[Copy]] = {}
        self._waiting_bytes = 0
        self._flags: list[tuple[list[str], Tensor]] = []

    def add(self, name: str, target: Tensor, source: Tensor) -> None:
        """Copy ``source``, now or later."""
        # Not `non_blocking`: it would read the host's half of a copy before it is there.
        source = source.detach().to(target.device, target.dtype if _is_cast(source, target) else source.dtype)
        waiting = self._waiting.setdefault(target.device, [])
        waiting.append(Copy(target, source.reshape(target.shape), name, len(waiting)))
        self._waiting_bytes += source.nbytes
        if not target.is_cuda or self._waiting_bytes >= _BATCH_BYTES:
            self._write()

    def _write(self) -> None:
        for device, copies in self._waiting.items():
            flags = torch.zeros(len(copies), 2, dtype=torch.int64, device=device)
            counted_copies_(copies, flags)
            self._flags.append(([copy.name for copy in copies], flags))
        self._waiting, self._waiting_bytes = {}, 0

    def finish(self) -> dict[str, int]:
        """Changed elements by name; those of a tensor with several places count in one."""
        self._write()
        changed: dict[str, int] = {}
        found = [flags.cpu() for _, flags in self._flags]
        for (names, _), flags in zip(self._flags, found, strict=True):
            for name, (differ, broken) in zip(names, flags.tolist(), strict=True):
                if broken:
                    raise RefreshError(f"{name} holds NaN or inf; fix the policy and refresh again")
                changed[name] = max(changed.get(name, 0), differ)
        return changed


def _is_cast(source: Tensor, target: Tensor) -> bool:
    return source.dtype != target.dtype and source.is_floating_point() and target.is_floating_point()


# ---------------------------------------------------------------- the proof


class Snapshot(NamedTuple):
    """What a model holds, and what it says.

    Attributes:
        state: see `lqrl.engines.vllm.held.state_of`.
        said: log-probs.
        objects: what the state knows by its address, which must not become another one's.
    """

    state: dict[str, str]
    said: tuple[float, ...]
    objects: tuple[Any, ...]


@dataclass(frozen=True)
class Rehearsal:
    """A model that can be loaded and asked.

    Attributes:
        model: the model.
        stream: what is sent, as vLLM would load it.
        reload: has vLLM load a stream.
        say: log-probs of some tokens under what it holds; raises `RefreshError` when they are not finite.
    """

    model: nn.Module
    stream: Callable[[Mapping[str, Tensor]], Iterator[tuple[str, Tensor]]]
    reload: Callable[[Iterator[tuple[str, Tensor]]], None]
    say: Callable[[], tuple[float, ...]]

    def look(self) -> Snapshot:
        """What it holds and says."""
        held = all_held(self.model)
        return Snapshot(state_of(held), self.say(), tuple(held.others.values()))

    def learn(self, like: Mapping[str, Tensor], device: torch.device) -> DirectCopies:
        """Find where each tensor goes, by trial weights that vLLM loads, and prove it.

        Two sets of random values are loaded by vLLM, then both are written directly, each over the other one; what the
        model holds and says must be what it was after the reload. So the map, which is made from the first set, is
        tried on one that it was not made from.

        Args:
            like: names, shapes and dtypes of what is sent.
            device: where it comes from.

        Returns:
            The map; the model holds the second set.

        Raises:
            UnexplainedError: when direct copies do not give what a reload gives.
        """
        one, two = (TrialWeights(like, device, seed) for seed in _SEEDS)
        self.reload(self.stream(one))
        first = self.look()
        held = all_held(self.model)
        scratch = frozenset(differing(first.state, state_of(held))) - held.registered
        copies = DirectCopies(held, SentTensors(self.stream(one)), scratch)
        self.reload(self.stream(two))
        second = self.look()
        if first.said == second.said:
            raise UnexplainedError("its model says the same of the trial tokens whatever the weights are")
        for weights, reloaded in ((one, first), (two, second)):
            copies.write(self.stream(weights))
            check_same(self.look(), reloaded, copies.scratch)
        return copies


def check_same(written: Snapshot, reloaded: Snapshot, scratch: frozenset[str]) -> None:
    """Compare what direct copies gave with what a reload of the same weights gives.

    Args:
        written: after the copies.
        reloaded: after the reload.
        scratch: names that are not compared.

    Raises:
        UnexplainedError: naming the first difference.
    """
    odd = next((name for name in differing(reloaded.state, written.state) if name not in scratch), None)
    if odd is not None:
        raise UnexplainedError(f"{odd} is more than a copy of what was sent")
    if written.said != reloaded.said:
        raise UnexplainedError("its kernels compute with memory that is in no tensor of its model")
