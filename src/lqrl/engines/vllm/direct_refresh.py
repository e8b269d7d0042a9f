"""Whether an engine's refreshes may be direct copies: decided once, by trying."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lqrl.engines.base import RefreshError
from lqrl.engines.vllm.coverage import CODES
from lqrl.engines.vllm.direct import DirectCopies, Rehearsal, Snapshot, UnexplainedError, check_same

log = logging.getLogger(__name__)


class DirectRefresh:
    """The direct copies of an engine, if it has any.

    An engine that holds good weights learns them in its next refresh (`learn`) and still has vLLM reload what it was
    sent, which must be what `rehearse` gave (`confirm`). What is proven by then, with all bits compared by digest:
    of two sets of random values and, unless it was streamed, of one set of real ones, direct copies give the same
    parameters, buffers, numbers and tensors in attributes, and log-probs of some tokens, as vLLM's reload. What is not:
    that vLLM treats no other values otherwise. So a later refresh has the digest that every refresh has, and its NaN
    check.

    Attributes:
        copies: the map; ``None`` before it is learned, and where there is none.
        refusal: why there is none.

    Args:
        like: names, shapes and dtypes of what is sent.
        device: where it comes from.
    """

    def __init__(self, like: Mapping[str, Tensor], device: torch.device) -> None:
        self.copies: DirectCopies | None = None
        self.refusal: str | None = None
        self._like, self._device = like, device

    def ready(self, addresses: Mapping[str, int]) -> bool:
        """Whether the next refresh may be direct.

        Args:
            addresses: of the model's parameters and buffers.
        """
        if self.copies is not None and not self.copies.at(addresses):
            self.forget()
        return self.copies is not None

    def learn(self, rehearsal: Rehearsal) -> None:
        """Make the map, if that has not failed before; the model holds trial weights then."""
        if self.refusal is None:
            with self._declining():
                self.copies = rehearsal.learn(self._like, self._device)

    def rehearse(self, rehearsal: Rehearsal, weights: Mapping[str, Tensor]) -> Snapshot | None:
        """Write ``weights`` over the trial weights, for `confirm`; without a map do nothing."""
        if self.copies is not None:
            with self._declining():
                self.copies.write(rehearsal.stream(weights))
                return rehearsal.look()
        return None

    def confirm(self, rehearsal: Rehearsal, written: Snapshot | None) -> None:
        """Compare with what vLLM has made of the same weights, and holds now.

        Args:
            rehearsal: the engine's model.
            written: of `rehearse`; ``None`` where they were streamed.
        """
        if self.copies is None:
            return
        with self._declining():
            if written is not None:
                check_same(written, rehearsal.look(), self.copies.scratch)
            moved = self.copies.moved(rehearsal.model)
            if moved:
                raise UnexplainedError(f"each reload puts {moved[0]} elsewhere")
            log.info("refreshes are copied into vLLM's memory: that has given what its reloads give")

    @contextmanager
    def _declining(self) -> Iterator[None]:
        """Whatever goes wrong here, vLLM can still reload."""
        try:
            yield
        except Exception as error:
            self.copies, self.refusal = None, str(error)
            expected = isinstance(error, (UnexplainedError, RefreshError))
            log.log(
                logging.INFO if expected else logging.WARNING,
                "vLLM reloads all weights in each refresh, since they cannot be copied into its memory: %s",
                error,
                exc_info=None if expected else error,
            )

    def write(self, stream: Iterable[tuple[str, Tensor]]) -> tuple[float, float] | None:
        """Copy a complete set into the model; only when `ready`.

        Returns:
            What `changed_shares` says.

        Raises:
            RefreshError: see `DirectCopies.write`; or when the copies themselves fail.
        """
        assert self.copies is not None
        try:
            changed = self.copies.write(stream)
        except RefreshError:
            raise
        except Exception as error:
            raise RefreshError(f"the weights could not be copied into vLLM's memory: {error}") from error
        return changed_shares(changed, self._like)

    def forget(self) -> None:
        """Learn anew: a reload has come between."""
        self.copies = None


def changed_shares(changed: Mapping[str, int], like: Mapping[str, Tensor]) -> tuple[float, float] | None:
    """What `lqrl.engines.vllm.coverage.changed_fractions` counts, from the copies of a set.

    Args:
        changed: elements whose bits changed, by name.
        like: what was sent; only shapes and dtypes are read.

    Returns:
        The shares of unquantized elements and of codes; ``None`` where vLLM has other names for some of them.
    """
    if not like.keys() <= changed.keys():
        return None

    def share(tensors: Iterable[tuple[str, Tensor]]) -> float:
        # One scale that is sent once may be held for every channel.
        counts = [(min(changed[name], tensor.numel()), tensor.numel()) for name, tensor in tensors]
        return sum(differ for differ, _ in counts) / max(sum(total for _, total in counts), 1)

    codes = {name for name, tensor in like.items() if tensor.dtype in CODES}
    return (
        share((name, tensor) for name, tensor in like.items() if name not in codes),
        share((name, tensor) for name, tensor in like.items() if name in codes),
    )
