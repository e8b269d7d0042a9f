"""Top-k and top-p inside vLLM, by the rule of the embedded engine, with the mass that they keep.

vLLM reports log-probs before or after it truncates, not both, and the learner needs both: `Completion.log_mass` is
their difference. So truncation is done by a logits processor of ours, which knows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SAMPLE, TOP_K, TOP_P = "lqrl_sample", "lqrl_top_k", "lqrl_top_p"
"""Keys of a request's ``extra_args``."""


def truncate_(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set to -inf what top-k, then top-p of what top-k keeps, remove: as `lqrl.engines.sampling.sample` does.

    Args:
        logits: ``[R, V]`` float32, after temperature; changed in place.
        top_k: this many most likely tokens; 0 keeps all.
        top_p: smallest set of tokens with at least this mass; 1 keeps all.

    Returns:
        ``[R]`` float32, log of the mass that is kept.
    """
    values, order = logits.sort(1, descending=True)
    weights = torch.sub(values, values[:, :1]).exp_().double()
    total = weights.sum(1)
    if 0 < top_k < logits.shape[1]:
        weights[:, top_k:] = 0
    if top_p < 1:
        mass = weights.cumsum(1)
        weights = weights * (mass - weights < top_p * mass[:, -1:])
    logits.scatter_(1, order, values.masked_fill_(weights == 0, -torch.inf))
    return (weights.sum(1).log() - total.log()).float().clamp_max_(0)


class MassRecord:
    """What a truncating logits processor notes in every step, on the device until it is asked."""

    def __init__(self) -> None:
        self._steps: list[tuple[list[tuple[int, int]], Tensor]] = []

    def clear(self) -> None:
        """Forget everything."""
        self._steps.clear()

    def note(self, places: list[tuple[int, int]], log_mass: Tensor) -> None:
        """Note ``log_mass`` ``[R]`` of the samples and token positions ``places``."""
        self._steps.append((places, log_mass))

    def of_samples(self, lengths: list[int]) -> list[list[float]]:
        """The log masses of samples 0, 1, ... with these numbers of tokens.

        A position that was computed twice (a prompt in chunks, a sample that was preempted) has the last value.

        Raises:
            RuntimeError: when one is missing.
        """
        found: dict[tuple[int, int], float] = {}
        for places, log_mass in self._steps:
            found.update(zip(places, log_mass.tolist(), strict=True))
        try:
            return [[found[i, t] for t in range(length)] for i, length in enumerate(lengths)]
        except KeyError as error:
            raise RuntimeError(
                f"vLLM drew a token past the truncating logits processor (sample, position: {error}); switch "
                "asynchronous scheduling off: engine_args: {async_scheduling: false}"
            ) from error


def truncating_processor(record: MassRecord) -> type:
    """A class for ``vllm.LLM(logits_processors=[...])`` that truncates, and notes what it keeps into ``record``."""
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

    class Truncation(LogitsProcessor):
        """Truncates the rows of requests that ask for it in their ``extra_args``."""

        def __init__(self, *_: Any) -> None:
            self.rows: dict[int, tuple[dict[str, Any], list[int]]] = {}  # extra arguments, and the tokens so far

        def is_argmax_invariant(self) -> bool:
            """Its place is after temperature, and greedy requests pass it by."""
            return True

        def update_state(self, batch_update: Any) -> None:
            """Follow the requests through the rows of the batch."""
            if batch_update is None:
                return
            for row in batch_update.removed:
                self.rows.pop(row, None)
            for row, params, _, output in batch_update.added:
                self.rows.pop(row, None)
                if params.extra_args and SAMPLE in params.extra_args:
                    self.rows[row] = (params.extra_args, output)
            for source, target, direction in batch_update.moved:
                moved, other = self.rows.pop(source, None), self.rows.pop(target, None)
                if moved is not None:
                    self.rows[target] = moved
                if other is not None and direction == MoveDirectionality.SWAP:
                    self.rows[source] = other

        def apply(self, logits: Tensor) -> Tensor:
            """Truncate ``logits`` ``[R, V]``; all requests of a call have the same settings."""
            rows = sorted(row for row in self.rows if row < len(logits))
            if not rows:
                return logits
            settings = self.rows[rows[0]][0]
            index = torch.tensor(rows, device=logits.device)
            chosen = logits[index]
            log_mass = truncate_(chosen, settings[TOP_K], settings[TOP_P])
            logits[index] = chosen
            record.note([(self.rows[row][0][SAMPLE], len(self.rows[row][1])) for row in rows], log_mass)
            return logits

    return Truncation
