"""`StableTensors`: a stream of weights that may be read later than it is received."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


class StableTensors(Iterator[tuple[str, Tensor]]):
    """Named tensors whose memory nobody writes while the receiver holds them, so that it may copy several at once.

    Any other iterable promises nothing: its sender may send all of them in one buffer. A stage that changes tensors on
    their way drops the promise, unless it wraps what it yields again.

    Args:
        weights: the names and tensors; none of them is memory of the receiver.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = iter(weights)

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._weights)
