"""The shared attention: packed and decode forms against a plain softmax over each sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lqrl.modeling.attention import (
    PackedContext,
    causal_attention,
    decode_attention,
    live_bias,
    lqrl_attention,
)


def reference(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
    """One sequence ``[H, T, D]`` in float64, key heads repeated, scores masked one by one."""
    repeat = q.shape[0] // k.shape[0]
    q, k, v = q.double(), k.double().repeat_interleave(repeat, 0), v.double().repeat_interleave(repeat, 0)
    scores = q @ k.transpose(1, 2) * scaling
    for i in range(q.shape[1]):
        for j in range(k.shape[1]):
            if j > i or (window is not None and j <= i - window):
                scores[:, i, j] = float("-inf")
    return (scores.softmax(-1) @ v).float()


def heads(tokens: int, query_heads: int = 4, key_heads: int = 2, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(1, query_heads, tokens, width, generator=generator)
    k, v = (torch.randn(1, key_heads, tokens, width, generator=generator) for _ in range(2))
    return q, k, v


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any), st.sampled_from([None, 1, 3]))
def test_packed_sequences_attend_only_to_themselves(lengths: list[int], window: int | None) -> None:
    q, k, v = heads(sum(lengths))
    out = PackedContext(lengths).attend(0, q, k, v, 0.3, window)
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        expected = reference(q[0, :, part], k[0, :, part], v[0, :, part], 0.3, window)
        torch.testing.assert_close(out[0, part].transpose(0, 1), expected, rtol=1e-5, atol=1e-5)
        start += n
    assert out.shape == (1, sum(lengths), 4, 8)


def test_packed_attention_has_the_gradient_of_separate_sequences() -> None:
    q, k, v = (x.double().requires_grad_() for x in heads(9))
    PackedContext([4, 5]).attend(0, q, k, v, 0.3, None).square().sum().backward()
    packed = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    for part in (slice(0, 4), slice(4, 9)):
        causal_attention(q[:, :, part], k[:, :, part], v[:, :, part], 0.3).square().sum().backward()
    for got, x in zip(packed, (q, k, v), strict=True):
        torch.testing.assert_close(got, x.grad)


@pytest.mark.parametrize("window", [None, 3])
def test_decode_equals_the_last_row_of_causal_attention(window: int | None) -> None:
    lengths = [2, 6, 5]
    stale = torch.full((3, 2, 9, 8), 7.0)  # beyond the live keys
    cache_k, cache_v = stale.clone(), stale.clone()
    queries, expected = [], []
    for row, n in enumerate(lengths):
        q, k, v = heads(n)
        cache_k[row, :, :n], cache_v[row, :, :n] = k[0], v[0]
        queries.append(q[0, :, -1])
        expected.append(causal_attention(q, k, v, 0.3, window)[0, :, -1])
    bias = live_bias(torch.tensor(lengths) - 1, 6, torch.float32, window)
    out = decode_attention(torch.stack(queries), cache_k[:, :, :6], cache_v[:, :, :6], bias, 0.3)
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_live_bias_by_hand() -> None:
    # position 2 of 4 keys, window 2: keys 1 and 2 are live
    bias = live_bias(torch.tensor([2]), 4, torch.float32, 2)
    assert bias.flatten().tolist() == [float("-inf"), 0.0, 0.0, float("-inf")]


def test_a_context_for_other_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="got 4 tokens, its attention_context describes 5"):
        PackedContext([2, 3]).attend(0, *heads(4), 0.3, None)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedContext([0, 0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention_context": None}, RuntimeError, r"hidden_states\(model, pack"),
        ({"dropout": 0.1}, NotImplementedError, "attention_dropout"),
        ({"softcap": 50.0}, NotImplementedError, "attn_logit_softcapping=50.0"),
        ({"s_aux": torch.zeros(4)}, NotImplementedError, "s_aux"),
        ({"attention_mask": torch.zeros(1)}, NotImplementedError, "takes no attention_mask"),
    ],
)
def test_what_is_not_supported_is_an_error(options: dict, error: type[Exception], message: str) -> None:
    arguments = {"attention_mask": None, "attention_context": PackedContext([3]), **options}
    with pytest.raises(error, match=message):
        lqrl_attention(SimpleNamespace(layer_idx=0), *heads(3), **arguments)  # type: ignore[arg-type]
