"""A few short sequences that decide how an engine runs its layers, and how far rounding alone moves their result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lqrl.engines.slots import DecodeContext, PrefillContext, SlotCache
from lqrl.modeling.attention import AttentionContext, PackedContext
from lqrl.modeling.backbone import AttentionShape
from lqrl.quant.kv import KVRounding

Run = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""Hidden states ``[N, H]`` of tokens ``[N]`` at positions ``[N]``."""


class Probe:
    """Fixed tokens of sequences that fit ``max_positions``.

    Args:
        lengths: of the sequences; longer ones are cut.
        max_positions: see above.
        vocabulary: tokens that there are.
        device: where the decoder is.
        exact: attention is exact.
        kv: rounds keys and values, as a slot cache of its format does; ``None`` for a cache in the compute dtype.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_positions: int,
        vocabulary: int,
        device: torch.device,
        exact: bool,
        kv: KVRounding | None = None,
    ) -> None:
        self._lengths = [min(n, max_positions) for n in lengths]
        self._device, self._exact, self._kv = device, exact, kv
        self._positions = torch.cat([torch.arange(n, device=device) for n in self._lengths])
        self._tokens = (torch.arange(len(self._positions), device=device) * 7919 + 1) % vocabulary

    def packed(self, run: Run) -> Tensor:
        """All sequences in one forward pass."""
        context = PackedContext(self._lengths, self._device, self._kv, self._exact)
        return run(self._tokens, self._positions, context)

    def shaken(self, run: Run, seed: int) -> Tensor:
        """As `packed`, with attention whose results are off by up to one unit in their last place."""
        return run(self._tokens, self._positions, _Shaken(self._lengths, self._device, seed))

    def in_slots(self, run: Run, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> Tensor:
        """As `packed`, from a slot cache: all tokens but the last of each sequence, then those in a decode step."""
        starts = torch.tensor([0, *self._lengths]).cumsum(0)[:-1]
        slots = [slot for slot, n in enumerate(self._lengths) if n > 1]
        last = (starts + torch.tensor(self._lengths) - 1).to(self._device)
        first = torch.ones_like(self._tokens, dtype=torch.bool).index_fill_(0, last, False).nonzero()[:, 0]
        kv, layers = self._kv, range(len(shapes))
        method, scales = (None, []) if kv is None else (kv.method, [kv.scales(layer) for layer in layers])
        cache = SlotCache(shapes, dtype, self._device, method, scales, self._exact)
        cache.reserve(len(self._lengths), max(self._lengths))
        context = PrefillContext(cache, [self._lengths[slot] - 1 for slot in slots], slots)
        before = run(self._tokens[first], self._positions[first], context)
        positions = self._positions[last]
        step = DecodeContext(cache, positions, max(self._lengths), dtype)
        after = run(self._tokens[last], positions, step)
        return (
            before.new_empty(len(self._tokens), before.shape[1]).index_copy(0, first, before).index_copy(0, last, after)
        )


class _Shaken(PackedContext):
    """Attention whose results are off by up to one unit in their last place, at random."""

    def __init__(self, lengths: Sequence[int], device: torch.device, seed: int) -> None:
        super().__init__(lengths, device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """As `PackedContext.attend`, shaken."""
        out = super().attend(layer_idx, q, k, v, scaling, sliding_window)
        noise = torch.rand(out.shape, generator=self._generator, device=out.device) * 2 - 1
        return (out.double() * (1 + noise.double() * torch.finfo(out.dtype).eps)).to(out.dtype)


def deviation(hidden: Tensor, expected: Tensor) -> float:
    """The largest distance of two rows ``[N, H]``, as a share of the expected row; inf where one is not finite."""
    hidden, expected = hidden.double(), expected.double()
    share = (hidden - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(share.nan_to_num(torch.inf).max())
