"""`CodeModule`: what an engine's low-bit layers share: shipped tensors as buffers, and the kernel's layout of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lqrl.quant.methods.base import LinearMethod, Operands
from lqrl.quant.targets import LowBitLinear


class CodeModule(LowBitLinear):
    """Base of an engine's layers: shipped tensors as buffers, no gradient.

    What the kernel reads and the shipped tensors are not is kept in buffers besides, which are not persistent. After
    writing a shipped tensor call `pack`; ``load_state_dict`` does it. Subclasses call `_hold` once.

    Args:
        method: the format's operations.
        compute_dtype: dtype of the replaced layer.

    Raises:
        RuntimeError: under ``torch.inference_mode()``, whose tensors cannot be refreshed later.
    """

    def __init__(self, method: LinearMethod, compute_dtype: torch.dtype) -> None:
        super().__init__()
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "build the engine under torch.no_grad(): tensors made in inference_mode cannot be updated"
            )
        self.method = method
        self.compute_dtype = compute_dtype
        self.shipped_names: tuple[str, ...] = ()
        self._derived_names: list[str] = []
        self._operands: dict[str, list[Operands]] | None = None
        self._addresses: list[int] = []  # of the shipped tensors that the operands were laid out from
        self.register_load_state_dict_post_hook(_pack_after_load)

    @abstractmethod
    def _matrices(self) -> dict[str, list[dict[str, Tensor]]]:
        """The shipped tensors of each weight, as the method names them; a list holds weights of one shape.

        The key begins the names of the buffers that hold the list's operands.
        """

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep ``tensors`` as what is shipped, and lay them out."""
        self.shipped_names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.pack()

    def shipped(self) -> dict[str, Tensor]:
        """The stored tensors, by name."""
        buffers: dict[str, Any] = self._buffers  # `get_buffer` takes ten times as long
        return {name: buffers[name] for name in self.shipped_names}

    @property
    def reads_copies(self) -> bool:
        """Whether the kernel reads something else than the shipped tensors."""
        return bool(self._derived_names)

    def rehome(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold shipped tensors in other memory that has the same contents."""
        for name, tensor in tensors.items():
            self._buffers[name] = tensor
        self._drop_layout()
        self.pack()

    def pack(self) -> None:
        """Bring what the kernel reads up to date with the shipped tensors, in place."""
        shipped = self.shipped().values()
        # Where the kernel reads the shipped tensors themselves, writing them in place was all.
        same = self._operands is not None and not self._derived_names
        if not same or self._addresses != [t.data_ptr() for t in shipped]:
            self._pack(shipped)

    @torch.no_grad()
    def _pack(self, shipped: Collection[Tensor]) -> None:
        if not any(t.is_meta for t in shipped):
            matrices, before = self._matrices(), self._operands
            if before is None:
                self._operands = {key: self._first_layout(key, group) for key, group in matrices.items()}
            else:
                for key, group in matrices.items():
                    for tensors, out in zip(group, before[key], strict=True):
                        self.method.operands(tensors, self.compute_dtype, out)
            self._addresses = [t.data_ptr() for t in shipped] if before is None else self._addresses
        self._packed_versions = self._versions()

    def _first_layout(self, key: str, group: list[dict[str, Tensor]]) -> list[Operands]:
        """Operands of each weight of a list; those that are no shipped tensors get one buffer a list."""
        buffers: dict[int, Tensor] = {}
        layout = []
        for place, tensors in enumerate(group):
            operands = list(self.method.operands(tensors, self.compute_dtype))
            for index, operand in enumerate(operands):
                if any(operand.data_ptr() == t.data_ptr() for t in tensors.values()):
                    continue
                if len(group) == 1:
                    buffers[index] = operand
                    continue
                if place == 0:
                    buffers[index] = operand.new_empty((len(group), *operand.shape))
                operands[index] = buffers[index][place].copy_(operand)
            layout.append(tuple(operands))
        for index, buffer in buffers.items():
            name = f"{key}_{index}"
            self._derived_names.append(name)
            self.register_buffer(name, buffer, persistent=False)
        return layout

    def use_method(self, method: LinearMethod) -> None:
        """Compute with another method that reads the same shipped tensors."""
        self.method = method
        self._drop_layout()
        self.pack()

    def _drop_layout(self) -> None:
        self._operands = None
        for name in self._derived_names:
            del self._buffers[name]
        self._derived_names = []

    def _versions(self) -> list[int]:
        return [t._version for t in self.shipped().values()]

    def _ready(self) -> dict[str, list[Operands]]:
        if self._operands is None:
            raise RuntimeError("this layer is on the meta device: call to_empty(device=...) and load its weights first")
        if self._derived_names and self._versions() != self._packed_versions:
            raise RuntimeError(f"the codes of a {type(self).__name__} changed: call pack() after writing them")
        return self._operands

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CodeModule:
        before = self.shipped()
        device = before[self.shipped_names[0]].device
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=device)).dtype
        self._drop_layout()  # it belongs to the old device and dtype
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self.get_buffer(name)
            if new.dtype != old.dtype:  # model.to(dtype) means the compute dtype, never codes and scales
                self._buffers[name] = old.to(new.device)
        self.pack()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._packed_versions = self._versions()  # a copied or unpickled tensor counts its writes anew


def _pack_after_load(module: nn.Module, _: Any) -> None:
    assert isinstance(module, CodeModule)
    module.pack()
