"""The key/value cache in slots, one sequence a slot, and the attention contexts that fill and read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lqrl.modeling.attention import AttentionContext, PackedContext, decode_attention, live_bias
from lqrl.modeling.backbone import AttentionShape


class SlotCache:
    """Keys and values of every layer, ``[slots, Hkv, length, D]``, as views of storage that only grows.

    Args:
        shapes: heads and widths of each layer.
        dtype: dtype of keys and values.
        device: where they live.
    """

    def __init__(self, shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = list(shapes)
        self.dtype = dtype
        self.device = device
        self.slots = 0
        self.length = 0
        self._capacity = 0
        self._storage: list[tuple[Tensor, Tensor]] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(k.nbytes + v.nbytes for k, v in self._storage)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for ``slots`` sequences of at most ``length`` tokens; what was cached is gone."""
        if slots * length > self._capacity:
            self.release()
            self._capacity = slots * length
            self._storage = [
                (self._zeros(s.kv_heads * s.key_width), self._zeros(s.kv_heads * s.value_width)) for s in self.shapes
            ]
        self.slots, self.length = slots, length
        self.keys, self.values = [], []
        for shape, (keys, values) in zip(self.shapes, self._storage, strict=True):
            for views, flat, width in ((self.keys, keys, shape.key_width), (self.values, values, shape.value_width)):
                size = slots * shape.kv_heads * length * width
                views.append(flat[:size].view(slots, shape.kv_heads, length, width))

    def release(self) -> None:
        """Give the memory back."""
        self.slots = self.length = self._capacity = 0
        self._storage, self.keys, self.values = [], [], []

    def clear(self) -> None:
        """Zero the storage: a value that was NaN would outlive its weights (0 * NaN) where keys are masked."""
        for keys, values in self._storage:
            keys.zero_()
            values.zero_()

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[1, Hkv, N, D]`` keys and values at `rows`."""
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            width = cache.shape[3]
            # Models make [N, Hkv, D] and hand out a transposed view of it, so this reshape copies nothing.
            cache.view(-1, width).index_copy_(0, rows, new[0].transpose(0, 1).reshape(-1, width))

    def rows(self, kv_heads: int, slots: Tensor, positions: Tensor) -> Tensor:
        """Flat rows ``[N * Hkv]`` of the tokens at ``positions`` of ``slots``, both ``[N]`` int64."""
        heads = torch.arange(kv_heads, device=slots.device)
        return ((slots[:, None] * kv_heads + heads) * self.length + positions[:, None]).flatten()

    def copy(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of slots ``source`` to slots ``target`` (of equal number, disjoint)."""
        at = torch.tensor([source, target], device=self.device)
        for cache in (*self.keys, *self.values):
            cache[at[1], :, :length] = cache[at[0], :, :length]

    def _zeros(self, width: int) -> Tensor:
        return torch.zeros(self._capacity * width, dtype=self.dtype, device=self.device)


class PrefillContext(PackedContext):
    """Whole prompts, attending to themselves and leaving their keys and values in the cache.

    Args:
        cache: where to.
        lengths: tokens of each prompt.
        slots: slot of each prompt.
    """

    def __init__(self, cache: SlotCache, lengths: Sequence[int], slots: Sequence[int]) -> None:
        super().__init__(lengths, cache.device)
        counts = torch.tensor(lengths)
        self.position_ids = torch.cat([torch.arange(n) for n in lengths]).to(cache.device)
        self.last = (counts.cumsum(0) - 1).to(cache.device)
        self._slots = torch.tensor(slots).repeat_interleave(counts).to(cache.device)
        self._cache = cache
        self._rows: dict[int, Tensor] = {}

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attention as in `PackedContext`."""
        heads = k.shape[1]
        if heads not in self._rows:
            self._rows[heads] = self._cache.rows(heads, self._slots, self.position_ids)
        self._cache.write(layer_idx, self._rows[heads], k, v)
        return super().attend(layer_idx, q, k, v, scaling, sliding_window)


class DecodeContext(AttentionContext):
    """One new token for each of the first ``R`` slots; it sees itself and what its slot holds before it.

    Args:
        cache: keys and values.
        positions: ``[R]`` int64, where each new token goes; `advance` moves them on, in place.
        length: one more than the largest position.
        dtype: of the queries.
    """

    def __init__(self, cache: SlotCache, positions: Tensor, length: int, dtype: torch.dtype) -> None:
        self._cache = cache
        self._positions = positions
        self._length = length
        self._dtype = dtype
        self._slots = torch.arange(positions.shape[0], device=positions.device)
        self._rows: dict[int, Tensor] = {}
        self._bias: dict[int | None, Tensor] = {}
        self._open = live_bias(positions, cache.length, dtype)

    def advance(self) -> None:
        """Go to the next token of every slot."""
        self._length += 1
        self._positions += 1
        for rows in self._rows.values():
            rows += 1
        self._bias.clear()
        self._open.view(-1, self._cache.length).scatter_(1, self._positions[:, None], 0)

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Write the new keys and values, then attend over the live ones."""
        heads = k.shape[1]
        if heads not in self._rows:
            self._rows[heads] = self._cache.rows(heads, self._slots, self._positions)
        if sliding_window not in self._bias:
            self._bias[sliding_window] = self._make_bias(sliding_window)
        self._cache.write(layer_idx, self._rows[heads], k, v)
        live = self._cache.keys[layer_idx], self._cache.values[layer_idx]
        keys, values = (x[: self._slots.shape[0], :, : self._length] for x in live)
        return decode_attention(q[0].transpose(0, 1), keys, values, self._bias[sliding_window], scaling)[None]

    def _make_bias(self, window: int | None) -> Tensor:
        if window is None or window >= self._length:
            return self._open[..., : self._length]
        return live_bias(self._positions, self._length, self._dtype, window)
