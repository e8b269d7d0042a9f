"""`StateOffload`: an optimizer's state in main memory while nobody steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lqrl.engines.releasable import padded
from lqrl.phases import phase

_PAGE = 4096  # bytes: what is pinned begins and ends with a page

_Key = tuple[int, str]
"""A parameter, by identity, and the name of one of its states."""


class _Held(NamedTuple):
    """A state on its parameter's device."""

    parameter: Tensor
    name: str
    tensor: Tensor

    @property
    def key(self) -> _Key:
        return id(self.parameter), self.name


class StateOffload:
    """Moves the state of an optimizer to main memory and, before its next step, back: the same bits.

    What moves are the tensors that lie where their parameter lies; a step counter that an optimizer keeps on the host
    stays. `offload` puts host tensors in their place, so that a state dict, and with it a checkpoint, holds the same
    values at any time; a state that is loaded in between is taken as it is. The optimizer's step brings everything
    back by itself.

    Main memory is allocated by the first `offload` and kept. Copies are in the order of the current stream.

    Args:
        optimizer: any whose states are plain tensors.
        pin: keep main memory pinned, so that a GPU copies at the full speed of its bus. It cannot be swapped out then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pin: bool = True) -> None:
        self._optimizer, self._pin = optimizer, pin
        self._homes: dict[_Key, Tensor] = {}  # where a state goes
        self._away: dict[_Key, _Held] = {}  # the tensors are those in main memory
        self._pinned: list[int] = []
        self._unpin = weakref.finalize(self, _unpin, self._pinned)
        self._unpin.atexit = False
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def offload(self) -> int:
        """Move everything to main memory; again is no error. Returns the bytes that the device has back.

        Raises:
            ValueError: for a state that is no plain tensor, and when no state is on its parameter's device.
            RuntimeError: when there is not enough main memory.
        """
        held = list(self._held())
        if not held:
            self._check_some_away()
            return 0
        with phase("memory"):
            self._make_homes(held)
            moved: dict[int, Tensor] = {}  # one tensor may be a state of many parameters
            for each in held:
                home = moved.get(id(each.tensor))
                if home is None:
                    home = moved[id(each.tensor)] = self._homes[each.key]
                    home.copy_(each.tensor, non_blocking=True)
                self._optimizer.state[each.parameter][each.name] = home
                self._away[each.key] = each._replace(tensor=home)
            for device in {each.tensor.device for each in held if each.tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # who reads the host tensors waits for no stream
        return sum(home.nbytes for home in moved.values())

    @torch.no_grad()
    def restore(self) -> int:
        """Bring everything back that `offload` moved; again is no error. Returns the bytes that the device gave."""
        if not self._away:
            return 0
        with phase("memory"):
            back: dict[int, Tensor] = {}
            for parameter, name, home in self._away.values():
                states = self._optimizer.state.get(parameter, {})
                if states.get(name) is not home:
                    continue  # loaded or dropped since
                if id(home) not in back:
                    back[id(home)] = home.to(parameter.device, non_blocking=True, copy=True)
                states[name] = back[id(home)]
            self._away.clear()
        return sum(tensor.nbytes for tensor in back.values())

    def close(self) -> None:
        """Let the optimizer go and unpin; what is in main memory stays there, as ordinary tensors."""
        self._hook.remove()
        self._away.clear()
        self._homes.clear()
        if self._pinned:
            torch.cuda.synchronize()
        self._unpin()

    def _before_step(self, *_: object) -> None:
        self.restore()

    def _held(self) -> Iterator[_Held]:
        for parameter, states in self._optimizer.state.items():
            for name, value in states.items():
                if not isinstance(value, Tensor) or value.device != parameter.device:
                    continue
                held = _Held(parameter, name, value)
                if held.key in self._away and self._away[held.key].tensor is value:
                    continue
                # bitsandbytes marks a tensor that it moves itself so
                if type(value) not in (Tensor, nn.Parameter) or getattr(value, "is_paged", False):
                    raise ValueError(
                        f"state {name!r} of {type(self._optimizer).__name__} is a {type(value).__name__} that is "
                        "sharded, paged or packed: remove OptimizerOffload, and offload by the strategy's or the "
                        "optimizer's own option"
                    )
                yield held

    def _check_some_away(self) -> None:
        if self._optimizer.state and not self._away:
            raise ValueError(
                f"no state of {type(self._optimizer).__name__} is on the device of its parameter: there is nothing to "
                "offload; remove OptimizerOffload"
            )

    def _make_homes(self, held: list[_Held]) -> None:
        """Main memory for those that have none of their layout; one piece a dtype, since ``torch.save`` wants that."""
        new: dict[_Key, tuple[Tensor, tuple[int, ...]]] = {}
        once = {id(each.tensor): each for each in reversed(held)}  # the first of those that share a tensor
        for each in once.values():
            tensor, home = each.tensor, self._homes.get(each.key)
            strides = torch.empty_like(tensor, device="meta").stride()
            if home is None or (home.shape, home.dtype, home.stride()) != (tensor.shape, tensor.dtype, strides):
                new[each.key] = tensor, strides
        pinned = self._pin and any(tensor.is_cuda for tensor, _ in new.values())
        for dtype in {tensor.dtype for tensor, _ in new.values()}:
            some = {key: value for key, value in new.items() if value[0].dtype == dtype}
            piece, start = self._main_memory(sum(padded(tensor.nbytes) for tensor, _ in some.values()), pinned), 0
            for key, (tensor, strides) in some.items():
                flat = piece[start : start + tensor.nbytes].view(dtype)
                self._homes[key] = flat.as_strided(tensor.shape, strides)
                start += padded(tensor.nbytes)

    def _main_memory(self, size: int, pinned: bool) -> Tensor:
        # PyTorch would round what it pins up to a power of two. Zeros: a checkpoint holds the gaps, too.
        size = -(-size // _PAGE) * _PAGE
        whole = torch.zeros(size + _PAGE, dtype=torch.uint8)
        # Through NumPy: a storage that begins with what is pinned, which PyTorch then knows as pinned.
        piece = torch.from_numpy(whole.numpy()[-whole.data_ptr() % _PAGE :][:size])
        if pinned:
            error = int(_runtime().cudaHostRegister(piece.data_ptr(), size, 0))
            if error:
                raise RuntimeError(
                    f"{size / 2**30:.2f} GiB of main memory cannot be pinned (CUDA error {error}): free some, or set "
                    "OptimizerOffload's pin_memory to false"
                )
            self._pinned.append(piece.data_ptr())
        return piece


def _runtime() -> Any:
    return torch.cuda.cudart()


def _unpin(addresses: list[int]) -> None:
    while addresses:
        _runtime().cudaHostUnregister(addresses.pop())
