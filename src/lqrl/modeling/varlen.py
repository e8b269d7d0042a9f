"""Attention of packed sequences by PyTorch's variable-length kernel, which computes no padding; on CUDA, in 16 bits."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lqrl.modeling.trial import compare, works

log = logging.getLogger(__name__)

_WIDEST_HEAD = 256


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """PyTorch's function; whether it asks to be told of grouped queries depends on the release."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        log.info("torch %s has no variable-length attention: packed sequences are padded for theirs", torch.__version__)
        return None
    parameters = inspect.signature(varlen_attn).parameters
    missing = {"scale", "window_size"} - parameters.keys()
    if missing:
        log.info("variable-length attention of torch %s takes no %s", torch.__version__, " and no ".join(missing))
        return None
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in parameters else varlen_attn


def attend(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scaling: float, window: int | None
) -> Tensor:
    """Causal self-attention of each sequence; differentiable.

    Args:
        q: ``[N, H, D]``.
        k, v: ``[N, Hkv, D]``; ``H`` is a multiple of ``Hkv``.
        offsets: ``[S + 1]`` int32 on the device: where sequences begin, and N.
        longest: tokens of the longest sequence.
        scaling: factor of the scores.
        window: a query sees this many keys, itself included; ``None`` for all.

    Returns:
        ``[N, H, D]``.
    """
    kernel = _kernel()
    assert kernel is not None
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    sides = (-1 if window is None else window - 1, 0)  # keys before and after a query
    return kernel(q, k, v, offsets, offsets, longest, longest, scale=scaling, window_size=sides)


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` takes these: 16-bit heads of one width on an NVIDIA GPU where it gave right answers."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    width = q.shape[-1]
    fits = width == v.shape[-1] and width <= _WIDEST_HEAD and width % 8 == 0
    return fits and _works(q.device, q.dtype)


@functools.cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Try it, forward and backward, against attention of one sequence at a time."""
    if _kernel() is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False

    def attempt() -> None:
        for window in (None, 5):
            _try(device, dtype, window)

    return works("kernels of variable-length attention", device, attempt)


def _try(device: torch.device, dtype: torch.dtype, window: int | None) -> None:
    from lqrl.modeling.attention import causal_attention  # which relies on this module

    lengths, (heads, kv_heads, width) = [3, 70], (4, 2, 64)
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn(sum(lengths), count, width, generator=generator).to(device, dtype).requires_grad_()

    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    seed = torch.randn(sum(lengths), heads, width, generator=generator).to(device, dtype)
    offsets = torch.tensor([0, 3, 73], dtype=torch.int32, device=device)
    got = attend(q, k, v, offsets, max(lengths), width**-0.5, window)
    made = (got, *torch.autograd.grad(got, (q, k, v), seed))
    parts = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        a, b, c = (x.float().transpose(0, 1)[None] for x in (a, b, c))
        out = causal_attention(a, b, c, width**-0.5, window)
        parts.append(out[0].transpose(0, 1))
    wanted = torch.cat(parts)
    compare(
        f"attention with a window of {window}",
        made,
        (wanted, *torch.autograd.grad(wanted, (q, k, v), seed.float())),
    )
