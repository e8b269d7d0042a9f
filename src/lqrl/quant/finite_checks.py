"""`FiniteChecks`: which of many tensors hold NaN or inf, for few launches and one host round trip."""

from __future__ import annotations

import torch
from torch import Tensor

from lqrl.quant.numerics.finite import whole_scale

_SMALL = 2**20  # elements; larger tensors are looked at alone and at once, and not kept
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_Group = tuple[torch.device, torch.dtype]


class FiniteChecks:
    """Looks at tensors as they come; what it finds stays on their devices until `refuse`."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._small: dict[_Group, list[tuple[int, Tensor]]] = {}
        self._found: dict[_Group, list[tuple[int, Tensor]]] = {}  # scalars that are finite where their tensor is

    def note(self, blamed: str, name: str, tensor: Tensor) -> None:
        """Look at ``tensor``, which must not change before `refuse`.

        Integers are finite, but for scales in bytes. Codes in fp8 are NaN only where their scale is, and are not read.

        Args:
            blamed: the name that the error gives.
            name: of the tensor; tells whether it is a scale.
            tensor: any.
        """
        place = len(self._names)
        if tensor.dtype in _FLOATS:
            if tensor.numel() > _SMALL:
                extremes = torch.aminmax(tensor)  # NaN is both
                self._found.setdefault((tensor.device, tensor.dtype), []).extend((place, e) for e in extremes)
            elif tensor.numel():
                self._small.setdefault((tensor.device, tensor.dtype), []).append((place, tensor))
        elif name.endswith("scale"):
            self._found.setdefault((tensor.device, torch.bool), []).append((place, whole_scale(name, tensor)))
        self._names.append(blamed)

    def refuse(self) -> None:
        """Raise ValueError naming the first tensor that is not finite."""
        places: list[int] = []
        flags: list[Tensor] = []
        for group, small in self._small.items():
            norms = torch._foreach_norm([t for _, t in small], torch.inf)  # pyright: ignore[reportPrivateImportUsage]
            self._found.setdefault(group, []).extend((p, n) for (p, _), n in zip(small, norms, strict=True))
        for (_, dtype), found in self._found.items():
            scalars = torch.stack([scalar for _, scalar in found])
            flags.append(scalars if dtype == torch.bool else scalars.isfinite())
            places += [place for place, _ in found]
        if not flags:
            return
        whole = torch.cat([f.to(flags[0].device) for f in flags]).tolist()
        broken = [place for place, finite in zip(places, whole, strict=True) if not finite]
        if broken:
            raise ValueError(
                f"{self._names[min(broken)]} holds NaN or inf in its export dtype; the update that made it must be "
                "undone"
            )
