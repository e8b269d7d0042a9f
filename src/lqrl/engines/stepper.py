"""Decode steps on buffers that stay where they are: run one by one, or captured once and replayed as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lqrl.engines.decoder import Decoder
from lqrl.engines.sampling import Sampled, has_draw_kernel, sample, sample_exact
from lqrl.engines.slots import DecodeContext, SlotCache
from lqrl.quant.hopper_gemm import early_products
from lqrl.types import SamplingParams

log = logging.getLogger(__name__)

# Rows that a captured step may have: up to each limit, multiples of the number beside it.
_BUCKETS = ((4, 1), (8, 4), (64, 8), (128, 16), (256, 32), (2**31, 64))


def bucket(rows: int) -> int:
    """The smallest number of rows, at least ``rows``, that steps are captured for."""
    step = next(step for most, step in _BUCKETS if rows <= most)
    return -(-rows // step) * step


class Steps(NamedTuple):
    """What some steps drew for each running slot: ``[steps, rows]`` each, views that the next steps overwrite.

    ``log_mass`` is ``None`` when nothing was truncated.
    """

    tokens: Tensor
    logprobs: Tensor
    log_mass: Tensor | None


class Stepper:
    """Draws the next tokens of the first slots, ``R`` at a time.

    The host writes last tokens and positions of the slots, and one uniform for each token to come; `run` leaves what
    was drawn in a ring of as many steps as pass between two looks of the host. All of it lies in buffers that do not
    move, so on CUDA a step is captured once for each number of rows (rounded up, see `bucket`) and replayed. Rows
    beyond the running ones work on slots that nobody uses. Graphs read weights and cache where they are; they survive a
    refresh, and a cache that is released and comes back.

    Args:
        decoder: the model.
        cache: its keys and values.
        interval: most steps of one `run`.
        capture: use CUDA graphs where a step can be captured: on CUDA, when the decoder runs lean and tokens are drawn
            without asking the host.
    """

    def __init__(self, decoder: Decoder, cache: SlotCache, interval: int, capture: bool) -> None:
        self._decoder, self._cache, self.interval = decoder, cache, interval
        self._capture = capture and cache.device.type == "cuda"
        self._params = SamplingParams()
        self._graphs: dict[tuple[int, float, int, float], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # memory that the graphs share: only one of them runs
        self._geometry: object = None
        self._context: DecodeContext | None = None
        self._rows = self._wide = 0
        self._allocate(0)

    def _allocate(self, slots: int) -> None:
        device, shape = self._cache.device, (self.interval, slots)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)  # which row of the ring comes next
        self._drawn = torch.zeros(shape, dtype=torch.int64, device=device)
        self._logprobs, self._mass = (torch.zeros(shape, device=device) for _ in range(2))

    @property
    def captured(self) -> int:
        """How many steps have been captured and are still valid."""
        return len(self._graphs)

    def reserve(self, slots: int, length: int, params: SamplingParams) -> None:
        """Make room for ``slots`` sequences of at most ``length`` tokens; what buffers and cache held is gone."""
        self._params = params
        free = has_draw_kernel(params, self._decoder.device, self._decoder.vocabulary) or not params.truncates
        self._captures = self._capture and free and self._decoder.lean is not None
        wide = bucket(slots) if self._captures else slots
        self._cache.reserve(wide, length, keep=self._captures)
        if wide > len(self.tokens):
            self._drop_graphs()
            self._allocate(wide)
        if self._cache.geometry != self._geometry:
            self._drop_graphs()
            self._geometry = self._cache.geometry

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._pool = None

    def start(self, rows: int, length: int) -> None:
        """Go on with the first ``rows`` slots, after tokens and positions were written.

        Args:
            rows: running slots.
            length: one more than the largest position.
        """
        self._rows, self._wide = rows, bucket(rows) if self._captures else rows
        if self._captures:
            self.tokens[rows : self._wide] = 0
            self.positions[rows : self._wide] = 0
        else:
            self._context = DecodeContext(self._cache, self.positions[:rows], length, self._cache.dtype)

    def run(self, steps: int) -> Steps:
        """Draw ``steps`` tokens for every running slot; their uniforms are in the first rows of ``uniforms``."""
        self._cache.check_held()  # a replayed step looks at nothing
        self._at.zero_()
        for _ in range(steps):
            self._step()
        rows = slice(0, self._rows)
        mass = self._mass[:steps, rows] if self._params.truncates else None
        return Steps(self._drawn[:steps, rows], self._logprobs[:steps, rows], mass)

    def _step(self) -> None:
        if not self._captures:
            assert self._context is not None
            self._draw(self._rows, self._context)
            self._context.advance()
            return
        key = self._wide, self._params.temperature, self._params.top_k, self._params.top_p
        if key in self._graphs:
            self._graphs[key].replay()
            return
        self._free_step()  # compiles and loads what the capture must find ready; its tokens count
        self._graphs[key] = self._captured()

    def _free_step(self) -> None:
        """A step whose context is made of the positions alone."""
        positions = self.positions[: self._wide]
        context = DecodeContext(self._cache, positions, self._cache.length, self._cache.dtype)
        self._draw(self._wide, context)
        positions += 1

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool), early_products():
                self._free_step()
        except RuntimeError as error:
            raise RuntimeError(
                f"a decode step of {self._wide} rows could not be captured as a CUDA graph; set the engine's "
                "cuda_graphs to false"
            ) from error
        log.info("captured a decode step of %d rows", self._wide)
        return graph

    def _draw(self, rows: int, context: DecodeContext) -> None:
        tokens, positions = self.tokens[:rows], self.positions[:rows]
        hidden = self._decoder(tokens, positions, context)
        uniform = self.uniforms[:, :rows].index_select(0, self._at)[0]
        drawn = self.sample(self._decoder.logits(hidden), uniform)
        tokens.copy_(drawn.tokens)
        for ring, new in self._rings(drawn):
            ring[:, :rows].index_copy_(0, self._at, new[None])
        self._at += 1

    def sample(self, logits: Tensor, uniform: Tensor | None) -> Sampled:
        """Draw from fp32 logits ``[R, V]`` with uniforms ``[R]`` as `run` does."""
        return (sample_exact if self._decoder.exact else sample)(logits, uniform, self._params)

    def _rings(self, drawn: Sampled) -> Iterator[tuple[Tensor, Tensor]]:
        yield self._drawn, drawn.tokens
        yield self._logprobs, drawn.logprobs
        if drawn.log_mass is not None:
            yield self._mass, drawn.log_mass
