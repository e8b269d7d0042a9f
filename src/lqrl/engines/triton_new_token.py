"""A decode step's new tokens: rotated, stored and attended to in one launch, or in two with the same bits.

In one launch, the program that attends over the newest keys of a sequence and a key head norms, rotates and quantizes
the new key and value, writes them into the cache and reads them back with the others. Every program turns the queries
for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lqrl.engines.layers import Rotation
from lqrl.engines.triton_cache_write import rotate_and_store
from lqrl.engines.triton_decode_attention import ROWS, Tile, attend, launch
from lqrl.engines.triton_heads import as_norms_read, kind_of, least_rows
from lqrl.quant.kv import Cached, KVCacheMethod


def takes_new(group: int, width: int, itemsize: int, normed: bool) -> bool:
    """Whether one launch can do all.

    The key is one more row of the tile of its queries. A norm adds up in the order of other kernels only where its tile
    is as large as theirs.

    Args:
        group: query heads of a key head.
        width: of a head.
        itemsize: bytes of an element of the product.
        normed: heads have norms.
    """
    return group < ROWS and (not normed or least_rows(width, itemsize) <= ROWS)


def attend_new(
    product: Sequence[Tensor],
    rotation: Rotation,
    views: Sequence[Tensor],
    positions: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    method: KVCacheMethod | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
    apart: bool | None = None,
) -> Tensor:
    """Store the keys and values of one new token a sequence, and attend over the cache.

    Args:
        product: ``[R, H * D]``, ``[R, Hkv * D]`` and ``[R, Hkv * Dv]``, see
            `lqrl.engines.triton_cache_write.rotate_and_store`.
        rotation: tables and norms of the layer.
        views: the cache, see there; row ``i`` is at slot ``i``.
        positions: ``[R]`` int64 on the device, where each new token goes.
        scaling: factor of the scores.
        sliding_window: a token sees this many keys, its own included; ``None`` for all.
        method: the cache's low-bit format, or ``None``.
        scales: calibrated scales of the layer's keys and values, for a format that has them.
        tile, splits: see `lqrl.engines.triton_decode_attention.attend`; tiles of four warps.
        apart: in two launches; without, only where one cannot do it. It changes no bit.

    Returns:
        ``[R, H, Dv]`` in the dtype of the product.
    """
    q, k, v = product
    keys, values = views[:2]
    (kv_heads, _, width), normed = keys.shape[1:], rotation.query_norm is not None
    heads = q.shape[1] // width
    stored: tuple[Tensor | Cached, Tensor | Cached] = (keys, values)
    if method is not None:
        key_scale, value_scale = views[2:] if method.per_token else scales or views[2:]
        stored = Cached(keys, key_scale), Cached(values, value_scale)
    if apart is None:
        apart = not takes_new(heads // kv_heads, width, q.element_size(), normed)
    if apart:
        q = rotate_and_store(product, rotation, positions, None, views, method, scales)
        return attend(q, *stored, positions, scaling, sliding_window, tile=tile, splits=splits)
    if normed:
        q, k = as_norms_read(q, width), as_norms_read(k, width)
    codes = [x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (keys, values)]
    norms = rotation.query_norm, rotation.key_norm
    new = (k, v, v.stride(0), rotation.cos, rotation.sin, *norms, rotation.eps, *codes)
    return launch(
        q, (heads, width), *stored, positions, scaling, sliding_window, tile, splits,
        new, Q_ROW=q.stride(0), K_ROW=k.stride(0), CODES=kind_of(method),
    )  # fmt: skip
