"""A fast fingerprint of a model's tensors: equal for equal bits, computed where the tensors are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lqrl.engines.sampling import mix64
from lqrl.quant.triton_use import use_triton

_BLOCK = 2**15  # words that share one table of place values; on a CPU a block stays in the cache
_SECOND = 2**32  # places of blocks begin here, places within one at 1
_BLOCKS = {"cpu": 1}  # blocks hashed at once; elsewhere many, for few launches
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def word_size(tensor: Tensor) -> int:
    """Bytes of the widest integers that divide ``tensor``."""
    return next(n for n in _WORDS if tensor.nbytes % n == 0)


def _words(tensor: Tensor) -> Tensor:
    """The bits of ``tensor`` as a flat tensor of integers."""
    tensor, size = tensor.detach().contiguous(), word_size(tensor)
    if tensor.storage_offset() * tensor.element_size() % size:  # a view of words must begin with one
        tensor = tensor.clone()
    return tensor.flatten().view(torch.int8).view(_WORDS[size])


@torch.no_grad()
def tensor_digest(tensor: Tensor) -> Tensor:
    """A 0-dimensional int64 digest of the bits of ``tensor``, on its device.

    Each word is mixed with its position and the results are added with wrap-around, so the order of the work does not
    matter but the order of the words does.
    """
    if use_triton(tensor):
        from lqrl.engines import triton_digest

        return triton_digest.tensor_digests([tensor])[0]
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    width = min(_BLOCK, max(words.numel(), 1))  # padding adds nothing, so a small tensor needs no whole block
    place = mix64(torch.arange(width, dtype=torch.int64, device=tensor.device) + 1) | 1
    step = _BLOCK * _BLOCKS.get(tensor.device.type, 256)
    for start in range(0, words.numel(), step):
        part = words[start : start + step].long()
        if part.numel() % width:
            part = F.pad(part, (0, -part.numel() % width))
        part = part.view(-1, width)
        # The xor folds high bits down: a product alone would let two flipped sign bits cancel.
        mixed = (part ^ ((part >> 32) & 0xFFFFFFFF)) * place
        mixed ^= (mixed >> 29) & 0x7FFFFFFFF
        block = torch.arange(start // _BLOCK, start // _BLOCK + len(part), device=tensor.device)
        total += (mixed.sum(1) * (mix64(block + _SECOND) | 1)).sum()
    return total


def tensor_digests(tensors: Sequence[Tensor]) -> list[int]:
    """`tensor_digest` of each, on the host; those on one GPU are hashed together."""
    values = [0] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    for here in places.values():
        if use_triton(tensors[here[0]]):
            from lqrl.engines import triton_digest

            found = triton_digest.tensor_digests([tensors[place] for place in here])
        else:
            found = torch.stack([tensor_digest(tensors[place]) for place in here])
        for place, value in zip(here, found.tolist(), strict=True):
            values[place] = value
    return values


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hex digest of names, shapes, dtypes and bits of ``tensors``, whatever their order."""
    named = sorted(tensors, key=lambda item: item[0])
    values = tensor_digests([t for _, t in named])
    text = [f"{name} {tuple(t.shape)} {t.dtype} {v}" for (name, t), v in zip(named, values, strict=True)]
    return hashlib.sha1("\n".join(text).encode(), usedforsecurity=False).hexdigest()
