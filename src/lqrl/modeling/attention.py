"""The attention that learner and engine share: pure functions, and the context that says where sequences begin.

Models run without padding: all tokens of a batch lie in one row ``[1, N]``. A context, handed to the model as the
keyword ``attention_context``, knows which of them form a sequence. transformers passes it on to `lqrl_attention`, which
is registered under the name ``"lqrl"``; no mask is registered under that name, so transformers builds none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lqrl.modeling import varlen
from lqrl.quant import exact as exact_rows
from lqrl.quant.triton_use import on_device

ATTENTION_NAME = "lqrl"
KVHook = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Layer, keys and values ``[1, Hkv, N, D]`` to the keys and values that queries see: a low-bit cache's rounding."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None = None) -> Tensor:
    """Causal self-attention of sequences that start at position 0.

    Args:
        q: ``[B, H, T, D]``.
        k, v: ``[B, Hkv, T, D]``; ``H`` is a multiple of ``Hkv`` (grouped queries).
        scaling: factor of the scores.
        sliding_window: a query sees this many keys, itself included; ``None`` for all.

    Returns:
        ``[B, H, T, D]``. Right padding does not change the rows before it.
    """
    length, grouped = q.shape[2], q.shape[1] != k.shape[1]
    if sliding_window is None or length <= sliding_window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    at = torch.arange(length, device=q.device)
    distance = at[:, None] - at[None, :]
    mask = (distance >= 0) & (distance < sliding_window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Attention of one new token a sequence over its cached keys.

    The queries that share a key head are rows of one small product, so keys are never repeated.

    Args:
        q: ``[R, H, D]``.
        k, v: ``[R, Hkv, L, D]``, usually a view of the cache; values may have another width.
        bias: ``[R, 1, 1, L]`` in the dtype of ``q``; 0 where the key is live, ``-inf`` elsewhere.
        scaling: factor of the scores.

    Returns:
        ``[R, H, D]``.
    """
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, width)
    mask = bias.expand(rows, kv_heads, heads // kv_heads, k.shape[2])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scaling).reshape(rows, heads, -1)


def live_bias(positions: Tensor, length: int, dtype: torch.dtype, sliding_window: int | None = None) -> Tensor:
    """The ``bias`` of `decode_attention`: keys ``0..position`` are live, within the window if there is one.

    Args:
        positions: ``[R]`` int64, position of each sequence's new token.
        length: keys that are looked at, more than any position.
        dtype: dtype of the queries.
        sliding_window: as in `causal_attention`.

    Returns:
        ``[R, 1, 1, length]``.
    """
    at = torch.arange(length, device=positions.device)
    dead = at > positions[:, None]
    if sliding_window is not None:
        dead |= at <= positions[:, None] - sliding_window
    bias = torch.zeros(dead.shape, dtype=dtype, device=positions.device).masked_fill_(dead, float("-inf"))
    return bias[:, None, None, :]


class NoContextError(RuntimeError):
    """A model's attention was called without a context."""


class AttentionContext(ABC):
    """What one forward pass knows about its sequences."""

    @abstractmethod
    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attention of layer ``layer_idx``: ``q`` is ``[1, H, N, D]``, ``k`` and ``v`` ``[1, Hkv, N, D]``.

        Returns:
            ``[1, N, H, D]``.
        """


class PackedContext(AttentionContext):
    """Whole sequences, one after the other, each attending to itself; differentiable.

    Args:
        lengths: tokens of each sequence, in order; their sum is ``N``.
        device: where the tokens are.
        kv: changes keys and values before they are attended to, such as the rounding of a low-bit cache.
        exact: a row's bits depend on its sequence alone; the gradient is that of the usual kernels.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        kv: KVHook | None = None,
        exact: bool = False,
    ) -> None:
        self._kv = kv
        self.lengths = [n for n in lengths if n > 0]
        if not self.lengths:
            raise ValueError("PackedContext needs at least one token; drop empty sequences before packing")
        self.longest = max(self.lengths)
        self.tokens = sum(self.lengths)
        self.sequences = exact_rows.packed_sequences(self.lengths, device) if exact else None
        self._device = torch.device(device)
        self._uneven = min(self.lengths) != self.longest

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Without padding where PyTorch can, else scattered to ``[B, H, T, D]`` and gathered back."""
        if q.shape[2] != self.tokens:
            raise ValueError(f"the model got {q.shape[2]} tokens, its attention_context describes {self.tokens}")
        if self._kv is not None:
            k, v = self._kv(layer_idx, k, v)
        if self.sequences is not None:
            return _ExactAttention.apply(q, k, v, self, self.sequences, scaling, sliding_window)
        return self.usual(q, k, v, scaling, sliding_window)

    def usual(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None) -> Tensor:
        """`attend` on PyTorch's kernels."""
        if self._uneven and varlen.serves(q, k, v):
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            return varlen.attend(q, k, v, self._offsets, self.longest, scaling, sliding_window)[None]
        out = causal_attention(self._unpack(q), self._unpack(k), self._unpack(v), scaling, sliding_window)
        rows = out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])
        return (rows.index_select(0, self._index) if self._uneven else rows)[None]

    @cached_property
    def _index(self) -> Tensor:
        """Where each token lies among the padded ones."""
        counts = torch.tensor(self.lengths)
        starts = torch.arange(len(self.lengths)) * self.longest - (counts.cumsum(0) - counts)
        return on_device(torch.arange(self.tokens) + starts.repeat_interleave(counts), self._device)

    @cached_property
    def _offsets(self) -> Tensor:
        """int32 ``[S + 1]``: where sequences begin, and the number of tokens."""
        counts = torch.tensor([0, *self.lengths], dtype=torch.int32)
        return on_device(counts.cumsum(0, dtype=torch.int32), self._device)

    def _unpack(self, x: Tensor) -> Tensor:
        rows = x[0].transpose(0, 1)  # [N, H, D]
        if self._uneven:
            padded = rows.new_zeros(len(self.lengths) * self.longest, *rows.shape[1:])
            rows = padded.index_copy(0, self._index, rows)
        return rows.reshape(len(self.lengths), self.longest, *rows.shape[1:]).transpose(1, 2)


class _ExactAttention(torch.autograd.Function):
    """Forward: one arithmetic for every row. Backward: that of PyTorch's kernels, which run again."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: PackedContext,
        sequences: exact_rows.Sequences,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.usual = lambda q, k, v: context.usual(q, k, v, scaling, window)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return exact_rows.attention(q, k, v, sequences, scaling, window)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.usual(*inputs)
        return *torch.autograd.grad(out, inputs, grad), None, None, None, None


def lqrl_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_context: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; its signature is transformers'.

    Raises:
        NoContextError: without ``attention_context``.
        NotImplementedError: for dropout while training, score soft-capping, attention sinks, position biases, masks.
    """
    if attention_context is None:
        raise NoContextError(
            "a model loaded by lqrl runs on packed tokens: call modeling.backbone.hidden_states(model, pack(...)); "
            'for model.generate() load it with transformers and attn_implementation="sdpa"'
        )
    if dropout > 0:
        raise NotImplementedError(f"attention dropout is not supported; set config.attention_dropout={dropout} to 0")
    if softcap is not None:
        raise NotImplementedError(f"config.attn_logit_softcapping={softcap} is not supported; use another architecture")
    if attention_mask is not None:
        raise NotImplementedError("packed attention takes no attention_mask; pack() has already dropped the padding")
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} passes {name} to its attention, which is not supported")
    # A rotary embedding in fp32 leaves its rounding to here, see `lqrl.modeling.arithmetic.WideRotary`.
    query, key = query.to(value.dtype), key.to(value.dtype)
    layer_idx: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_context.attend(layer_idx, query, key, value, scale, sliding_window), None


def register_attention() -> str:
    """Make `lqrl_attention` known to transformers; returns the name for ``attn_implementation``."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, lqrl_attention)
    return ATTENTION_NAME
