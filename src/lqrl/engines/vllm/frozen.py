"""The base under adapters, which vLLM is sent once: what it was sent and holds, and what later refreshes may change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lqrl.engines.base import Digests, RefreshError
from lqrl.engines.digest import tensor_digests


@dataclass(frozen=True)
class FrozenBase:
    """All matrices of a policy, and the vectors that vLLM loads in one layer with them.

    What is left, the norms and scales of a cache, has layers of its own and can be loaded alone.

    Attributes:
        digests: of the matrices, as they were sent.
        vectors: of the matrices' modules (biases, global scales), as they were sent.
        held: digests of vLLM's own tensors after that, by their names there.
    """

    digests: Digests
    vectors: Mapping[str, Tensor]
    held: Mapping[str, str]

    @classmethod
    def of(cls, sent: Mapping[str, Tensor], held: Mapping[str, str]) -> FrozenBase:
        """The base in ``sent``, a complete set without adapters."""
        matrices = [name for name, tensor in sent.items() if tensor.dim() >= 2]
        modules = {_module(name) for name in matrices}
        digests = tensor_digests([sent[name] for name in matrices])
        vectors = {name: t.clone() for name, t in sent.items() if t.dim() < 2 and _module(name) in modules}
        return cls(dict(zip(matrices, digests, strict=True)), vectors, held)

    def check_declared(self, frozen: Digests) -> None:
        """Refuse a declaration that is not of this base.

        Raises:
            RefreshError: when other tensors than its matrices are declared, or with other digests.
        """
        odd = sorted(frozen.keys() ^ self.digests.keys())
        if odd:
            raise RefreshError(
                "vLLM loads whole layers: with adapters, declare all matrices of the base frozen, or nothing; "
                f"{odd[0]} is {'no matrix of it' if odd[0] in frozen else 'not declared'}"
            )
        for name, expected in frozen.items():
            if expected != self.digests[name]:
                raise RefreshError(
                    f"{name} was declared frozen with digest {expected:x}, the engine was sent {self.digests[name]:x}; "
                    "send a complete set of weights (a stage that changes such a tensor cannot be used with adapters)"
                )

    def loose(self, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What of ``sent``, a set without matrices and adapters, is to be loaded.

        Raises:
            RefreshError: when a vector changed that cannot be loaded without the matrix beside it.
        """
        for name, vector in self.vectors.items():
            if not torch.equal(sent[name], vector.to(sent[name].device)):
                raise RefreshError(
                    f"{name} changed, and vLLM cannot load it without the frozen matrix beside it; send a complete set"
                )
        return {name: tensor for name, tensor in sent.items() if name not in self.vectors}

    def check_held(self, held: Mapping[str, str], loaded: Collection[str]) -> None:
        """Refuse a vLLM whose tensors are not those of this base.

        Args:
            held: digests of its tensors.
            loaded: names of those that were loaded since.

        Raises:
            RefreshError: naming one that changed.
        """
        modules = {_module(name) for name in loaded}
        for name, value in self.held.items():
            if held.get(name) != value and _module(name) not in modules:
                raise RefreshError(f"{name} is frozen, and vLLM holds other values than after it was sent")


def _module(name: str) -> str:
    return name.rpartition(".")[0]
