"""`StableTensors`: a stream of weights that may be read later than it is received."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor


class StableTensors(Iterator[tuple[str, Tensor]]):
    """Named tensors whose memory nobody writes while the receiver holds them, so that it may copy several at once.

    Any other iterable promises nothing: its sender may send all of them in one buffer. A stage that changes tensors on
    their way drops the promise, unless it wraps what it yields again.

    Args:
        weights: the names and tensors; none of them is memory of the receiver.
        unchecked: makes the same stream without the sender's look for NaN and inf, if there is one.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        unchecked: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        self._weights = iter(weights)
        self._unchecked = unchecked

    def __next__(self) -> tuple[str, Tensor]:
        self._unchecked = None
        return next(self._weights)

    def unchecked(self) -> StableTensors:
        """This stream, for a receiver that looks for NaN and inf itself: the sender's look takes time.

        The stream itself where it has begun, or where the sender's look cannot be left out.
        """
        return self if self._unchecked is None else StableTensors(self._unchecked())
