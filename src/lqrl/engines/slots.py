"""The key/value cache in slots, one sequence a slot, and the attention contexts that fill and read it."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lqrl.engines.layers import Rotation
from lqrl.engines.releasable import ReleasableMemory, padded, releasable_memory
from lqrl.modeling.attention import AttentionContext, PackedContext, decode_attention, live_bias
from lqrl.modeling.backbone import AttentionShape
from lqrl.phases import phase
from lqrl.quant import exact
from lqrl.quant.kv import Cached, KVCacheMethod
from lqrl.quant.triton_use import on_device

log = logging.getLogger(__name__)


class SlotCache:
    """Keys and values of every layer in slots, as views of storage that only grows.

    A view is ``[slots, Hkv, length, D]``. Under a low-bit format it holds codes; a second one, fp32
    ``[slots, Hkv, length, 1]``, holds the scales of tokens and heads where the format has those.

    Args:
        shapes: heads and widths of each layer.
        dtype: dtype of the keys and values that go in and come out.
        device: where they live.
        method: the cache's low-bit format, or ``None``.
        scales: calibrated scale of each layer's keys and values, read when they are used.
        exact: attention over the cache is exact, see `lqrl.modeling.exact`.
        releasable: the storage can be given away between two calls of ``generate``, see
            `lqrl.engines.releasable.ReleasableMemory`; on CUDA it does not move then.
    """

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        dtype: torch.dtype,
        device: torch.device,
        method: KVCacheMethod | None = None,
        scales: Sequence[tuple[Tensor, Tensor]] = (),
        exact: bool = False,
        releasable: bool = False,
    ) -> None:
        self.shapes = list(shapes)
        self.dtype = dtype
        self.device = device
        self.exact = exact
        self.slots = 0
        self.length = 0
        self._method = method
        self._layer_scales = [(k.to(device), v.to(device)) for k, v in scales]
        self._releasable = releasable
        self._memory: ReleasableMemory | None = None  # of a releasable cache that has storage
        self._zeroed = True
        self._capacity = 0
        self._storage: list[tuple[Tensor, ...]] = []
        self._views: list[tuple[Tensor, ...]] = []  # keys, values and, per token and head, their scales

    @property
    def held(self) -> bool:
        """Whether the memory is there; nothing may read or write the cache while it is released."""
        return self._memory is None or self._memory.held

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(flat.nbytes for layer in self._storage for flat in layer) if self.held else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, in all layers."""
        return sum(shape.kv_heads * width * t.itemsize for shape in self.shapes for width, t in self._parts(shape))

    @property
    def geometry(self) -> tuple[int, int, int]:
        """Slots, their length, and where the first begins: equal while no view has moved."""
        return self.slots, self.length, self._storage[0][0].data_ptr() if self._storage else 0

    def reserve(self, slots: int, length: int, keep: bool = False) -> None:
        """Make room for ``slots`` sequences of at most ``length`` tokens; what was cached is gone.

        ``keep`` leaves more and longer slots as they are, for those who remember where they lie. Released memory is
        taken back.
        """
        if slots * length > self._capacity:
            self.free()
            self._storage = self._allocate(slots * length)
            self._capacity = slots * length
        self.restore()
        if keep and slots <= self.slots and length <= self.length:
            return
        self.slots = self.length = 0  # until the views are there: an interrupt may come in between
        self._views = [
            tuple(
                flat[: slots * shape.kv_heads * length * width].view(slots, shape.kv_heads, length, width)
                for flat, (width, _) in zip(layer, self._parts(shape), strict=True)
            )
            for shape, layer in zip(self.shapes, self._storage, strict=True)
        ]
        self.slots, self.length = slots, length

    def release(self) -> int:
        """Give the memory of a releasable cache away, and with it all that is cached; bytes that were given."""
        if self._memory is None:
            return 0
        with phase("memory"):
            self._zeroed = False
            given = self._memory.release()
        if given:
            log.info("the key/value cache gave %.2f GiB away", given / 2**30)
        return given

    def restore(self) -> int:
        """Take the memory back, empty; bytes that were taken. See `ReleasableMemory.restore` for what it raises."""
        if self._memory is None or (self._memory.held and self._zeroed):
            return 0
        with phase("memory"):
            taken = self._memory.restore()
            self.clear()
            self._zeroed = True
        log.info("the key/value cache took %.2f GiB back", taken / 2**30)
        return taken

    def free(self) -> None:
        """Give all memory back for good: the next one lies elsewhere."""
        self.slots = self.length = self._capacity = 0
        self._storage, self._views = [], []
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._zeroed = True

    def check_held(self) -> None:
        """Raise a RuntimeError while the memory is released: on CUDA a kernel that uses it would end the process."""
        if not self.held:
            raise RuntimeError("the key/value cache is released; `SlotCache.reserve` takes its memory back")

    def clear(self) -> None:
        """Zero the storage: a value that was NaN would outlive its weights (0 * NaN) where keys are masked.

        Released memory comes back zeroed.
        """
        if self.held:
            for flat in (flat for layer in self._storage for flat in layer):
                flat.zero_()

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[1, Hkv, N, D]`` keys and values at `rows`."""
        parts = [keys, values]
        if self._method is not None:
            scales = self._layer_scales[layer]
            (keys, k_scale), (values, v_scale) = (
                self._method.quantize(x, scale) for x, scale in zip((keys, values), scales, strict=True)
            )
            parts = [keys, values, k_scale, v_scale] if self._method.per_token else [keys, values]
        for view, new in zip(self._views_of(layer), parts, strict=True):
            width = view.shape[3]
            # Models make [N, Hkv, D] and hand out a transposed view of it, so this reshape copies nothing.
            flat = new[0].transpose(0, 1).reshape(-1, width)
            _plain(view).view(-1, width).index_copy_(0, rows, _plain(flat))

    def rotate_and_write(
        self, layer: int, product: Sequence[Tensor], rotation: Rotation, positions: Tensor, slots: Tensor | None
    ) -> Tensor:
        """Store keys and values of query, key and value products; the rotated queries ``[N, H, D]``. On CUDA.

        Arguments as for `lqrl.engines.triton_cache_write.rotate_and_store`.
        """
        from lqrl.engines.triton_cache_write import rotate_and_store

        scales = self._layer_scales[layer] if self._method is not None else None
        return rotate_and_store(product, rotation, positions, slots, self._views_of(layer), self._method, scales)

    def read(self, layer: int, slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[slots, Hkv, length, D]`` of the first slots and tokens, in the cache's ``dtype``."""
        keys, values = (x.values(self.dtype) if isinstance(x, Cached) else x for x in self.stored(layer, slots, length))
        return keys, values

    def stored(self, layer: int, slots: int, length: int) -> tuple[Tensor | Cached, Tensor | Cached]:
        """The keys and values of `read` as they lie here: under a low-bit format codes with their scales."""
        live = [view[:slots, :, :length] for view in self._views_of(layer)]
        if self._method is None:
            return live[0], live[1]
        k_scale, v_scale = live[2:] if self._method.per_token else self._layer_scales[layer]
        return Cached(live[0], k_scale), Cached(live[1], v_scale)

    def seen(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as queries see them, rounded by the cache's format."""
        if self._method is None:
            return keys, values
        k_scale, v_scale = self._layer_scales[layer]
        return self._method.round_trip(keys, k_scale), self._method.round_trip(values, v_scale)

    def rows(self, kv_heads: int, slots: Tensor, positions: Tensor) -> Tensor:
        """Flat rows ``[N * Hkv]`` of the tokens at ``positions`` of ``slots``, both ``[N]`` int64."""
        heads = torch.arange(kv_heads, device=slots.device)
        return ((slots[:, None] * kv_heads + heads) * self.length + positions[:, None]).flatten()

    def copy(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of slots ``source`` to slots ``target`` (of equal number, disjoint)."""
        self.check_held()
        at = on_device(torch.tensor([source, target]), self.device)
        for cache in (_plain(view) for layer in self._views for view in layer):
            cache[at[1], :, :length] = cache[at[0], :, :length]

    def _parts(self, shape: AttentionShape) -> list[tuple[int, torch.dtype]]:
        """Width and dtype of what a layer stores."""
        codes = self.dtype if self._method is None else self._method.code_dtype
        parts = [(shape.key_width, codes), (shape.value_width, codes)]
        return [*parts, *[(1, torch.float32)] * 2] if self._method is not None and self._method.per_token else parts

    def _allocate(self, capacity: int) -> list[tuple[Tensor, ...]]:
        """Zeros for ``capacity`` tokens: the flat storage of each layer."""
        flats = [
            [(capacity * shape.kv_heads * width, dtype) for width, dtype in self._parts(shape)] for shape in self.shapes
        ]
        if not self._releasable:
            return [tuple(torch.zeros(n, dtype=t, device=self.device) for n, t in layer) for layer in flats]
        size = sum(padded(n * dtype.itemsize) for layer in flats for n, dtype in layer)
        self._memory = memory = releasable_memory(size, self.device)
        return [tuple(memory.tensor((n,), dtype).zero_() for n, dtype in layer) for layer in flats]

    def _views_of(self, layer: int) -> tuple[Tensor, ...]:
        self.check_held()
        return self._views[layer]


def _plain(tensor: Tensor) -> Tensor:
    """fp8 as bytes, which can be indexed and copied anywhere."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


class SlotContext(AttentionContext):
    """A context whose keys and values lie in slots: `lqrl.engines.fused_decoder` hands it products as they are."""

    @abstractmethod
    def attend_product(
        self, layer_idx: int, product: Sequence[Tensor], rotation: Rotation, shape: AttentionShape
    ) -> Tensor:
        """Rotate, store and attend.

        Args:
            layer_idx: which layer.
            product: query, key and value before norms and rotation, ``[N, heads * width]`` each.
            rotation: norms and rotation of the layer.
            shape: of its attention.

        Returns:
            ``[N, H * Dv]``.
        """


class PrefillContext(PackedContext, SlotContext):
    """Whole prompts, attending to themselves and leaving their keys and values in the cache.

    Args:
        cache: where to.
        lengths: tokens of each prompt.
        slots: slot of each prompt.
    """

    def __init__(self, cache: SlotCache, lengths: Sequence[int], slots: Sequence[int]) -> None:
        super().__init__(lengths, cache.device, cache.seen, cache.exact)
        self._cache = cache
        self._rows: dict[int, Tensor] = {}
        counts = np.array(lengths)
        ends = counts.cumsum()
        starts, none = ends - counts, np.zeros_like(counts)
        tokens = ends[-1]
        # Even rows: for one that begins at an odd place kernels are compiled anew.
        places = np.zeros((2, tokens + tokens % 2), np.int64)
        places[:, :tokens] = np.arange(tokens) - starts.repeat(counts), np.repeat(slots, counts)
        self.position_ids, self._slots = on_device(torch.from_numpy(places), cache.device)[:, :tokens]
        whole = [starts, counts, slots, none]
        last = [np.arange(len(counts)), none + 1, slots, counts - 1]
        tables = on_device(torch.from_numpy(np.stack([*whole, *last, ends - 1])), cache.device)
        self.last = tables[8]
        self._in_slots = exact.Sequences(tables[:4], self.longest, self.longest)
        self._last_in_slots = exact.Sequences(tables[4:8], 1, self.longest)

    def attend_product(
        self, layer_idx: int, product: Sequence[Tensor], rotation: Rotation, shape: AttentionShape
    ) -> Tensor:
        """Every prompt attends to what it has left in its slot."""
        q = self._cache.rotate_and_write(layer_idx, product, rotation, self.position_ids, self._slots)
        return self._attend_in_slots(layer_idx, q, self._in_slots, shape)

    def attend_last(
        self, layer_idx: int, product: Sequence[Tensor], rotation: Rotation, shape: AttentionShape
    ) -> Tensor:
        """As `attend_product`, of every prompt's last token alone: ``[S, H * Dv]``. All leave keys and values."""
        q = self._cache.rotate_and_write(layer_idx, product, rotation, self.position_ids, self._slots)
        return self._attend_in_slots(layer_idx, q.index_select(0, self.last), self._last_in_slots, shape)

    def _attend_in_slots(self, layer_idx: int, q: Tensor, sequences: exact.Sequences, shape: AttentionShape) -> Tensor:
        stored = self._cache.stored(layer_idx, self._cache.slots, self._cache.length)
        return exact.attention(q, *stored, sequences, shape.scaling, shape.sliding_window).flatten(1)

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attention as in `PackedContext`."""
        heads = k.shape[1]
        if heads not in self._rows:
            self._rows[heads] = self._cache.rows(heads, self._slots, self.position_ids)
        self._cache.write(layer_idx, self._rows[heads], k, v)
        return super().attend(layer_idx, q, k, v, scaling, sliding_window)


class DecodeContext(SlotContext):
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
        self._rows: dict[int, Tensor] = {}
        self._bias: dict[int | None, Tensor] = {}
        self._open: Tensor | None = None
        self._sequences: exact.Sequences | None = None
        if cache.exact:
            slots = self._slots()
            table = torch.stack([slots, torch.ones_like(slots), slots, positions])
            self._sequences = exact.Sequences(table, 1)

    def advance(self) -> None:
        """Go to the next token of every slot."""
        self._length += 1
        self._positions += 1
        for rows in self._rows.values():
            rows += 1
        if self._sequences is not None:
            self._sequences.table[3] += 1
        self._bias.clear()
        if self._open is not None:
            self._open.view(-1, self._cache.length).scatter_(1, self._positions[:, None], 0)

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Write the new keys and values, then attend over the live ones."""
        heads = k.shape[1]
        if heads not in self._rows:
            self._rows[heads] = self._cache.rows(heads, self._slots(), self._positions)
        self._cache.write(layer_idx, self._rows[heads], k, v)
        query, held = q[0].transpose(0, 1), (layer_idx, len(self._positions), self._length)
        if self._sequences is not None:
            stored = self._cache.stored(*held)
            return exact.attention(query, *stored, self._sequences, scaling, sliding_window)[None]
        if sliding_window not in self._bias:
            self._bias[sliding_window] = self._make_bias(sliding_window)
        return decode_attention(query, *self._cache.read(*held), self._bias[sliding_window], scaling)[None]

    def attend_product(
        self, layer_idx: int, product: Sequence[Tensor], rotation: Rotation, shape: AttentionShape
    ) -> Tensor:
        """`attend` in few kernels, which read the live tokens alone."""
        q = self._cache.rotate_and_write(layer_idx, product, rotation, self._positions, None)
        stored = self._cache.stored(layer_idx, self._cache.slots, self._cache.length)
        if self._sequences is not None:
            return exact.attention(q, *stored, self._sequences, shape.scaling, shape.sliding_window).flatten(1)
        from lqrl.engines.triton_decode_attention import attend

        return attend(q, *stored, self._positions, shape.scaling, shape.sliding_window).flatten(1)

    def _slots(self) -> Tensor:
        return torch.arange(len(self._positions), device=self._positions.device)

    def _make_bias(self, window: int | None) -> Tensor:
        if window is not None and window < self._length:
            return live_bias(self._positions, self._length, self._dtype, window)
        if self._open is None:
            self._open = live_bias(self._positions, self._cache.length, self._dtype)
        return self._open[..., : self._length]
