"""Token codes that travel with the tensor they were made of, from a norm to the linear layers that read it.

The tensor itself carries them, so nothing between the two has to know: a module that passes another tensor on, a view
or a copy passes none, and its reader quantizes for itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor

from lqrl.quant.methods.base import Coded, TokenCodes

_NAME = "_lqrl_token_codes"


class _Carried(NamedTuple):
    kind: TokenCodes
    coded: Coded
    readers: int
    state: tuple[int, int]


def _state(x: Tensor) -> tuple[int, int]:
    """Another value once ``x`` may hold something else."""
    return x._version, x.data_ptr()


def carry(x: Tensor, kind: TokenCodes, coded: Coded, readers: int) -> None:
    """Let ``x`` ``[..., K]`` carry its codes until ``readers`` layers have taken them, or it changes."""
    if readers and not x.is_inference():  # an inference tensor counts no changes
        setattr(x, _NAME, _Carried(kind, coded, readers, _state(x)))


def take(x: Tensor, kind: TokenCodes | None, readers: int = 1) -> Coded | None:
    """The codes that ``x`` ``[..., K]`` carries for ``readers`` layers, or ``None``: quantize.

    The last reader's are gone from ``x``, which the backward pass may keep.

    Args:
        x: what a layer reads.
        kind: of the codes that the layer takes; ``None`` for a layer that takes none.
        readers: how many layers take them at once.
    """
    found: _Carried | None = getattr(x, _NAME, None)
    if found is None:
        return None
    left = found.readers - readers
    good = kind == found.kind and _state(x) == found.state
    if good and left > 0:
        setattr(x, _NAME, found._replace(readers=left))
    else:
        delattr(cast(Any, x), _NAME)
    return found.coded if good else None
