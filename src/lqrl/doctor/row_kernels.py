"""Self-test of exact mode's operations: near what float64 gives, and a row alone has the bits it has in a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lqrl.doctor.report import WrongResultError
from lqrl.quant import exact

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_LENGTHS = (3, 6)  # of the sequences of attention, together the rows of every test


def check_row_kernels(device: torch.device) -> None:
    """Run each operation of `lqrl.quant.exact` once on ``device``, in fp32 and bf16.

    Raises:
        WrongResultError: naming the operation.
    """
    for dtype in _TOLERANCE:
        _check_dtype(device, dtype)
    logits, uniform = _random(sum(_LENGTHS), 700, device=device) * 3, torch.linspace(0, 0.9, sum(_LENGTHS)).double()
    uniform = uniform.to(device)
    totals = exact.normalizer(logits, 1.0)
    expected = logits.double().logsumexp(1)
    check_near("the log-softmax", (totals.largest.double() + totals.log_total), expected, 1e-5)
    tokens, _ = exact.sample(logits, uniform, 1.0)
    alone, _ = exact.sample(logits[2:3], uniform[2:3], 1.0)
    _equal("a draw", alone, tokens[2:3])
    greedy, _ = exact.sample(logits, None, 1.0)
    _equal("the greedy token", greedy, logits.argmax(1))


def _check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    near, rows = _TOLERANCE[dtype], sum(_LENGTHS)
    x, weight = (_random(n, 96, device=device, seed=n).to(dtype) for n in (rows, 40))
    packed = exact.pack(weight)
    y = exact.linear(x, packed)
    check_near("the product", y, x.double() @ weight.double().T, near)
    _equal("a row of the product", exact.linear(x[2:3], packed), y[2:3])
    gain = 1 + _random(96, device=device).to(dtype)
    normed, _ = exact.rms_norm(x, gain, 1e-6)
    wide = x.double()
    check_near("the norm", normed, wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * gain.double(), near)
    _equal("a row of the norm", exact.rms_norm(x[2:3], gain, 1e-6)[0], normed[2:3])
    check_near("SiLU", exact.silu(x), F.silu(wide), near)
    q, k, v = (_random(rows, heads, 32, device=device, seed=heads).to(dtype) for heads in (4, 2, 3))
    v = v[:, :2]
    attended = exact.attention(q, k, v, exact.packed_sequences(_LENGTHS, device), 0.2)
    first = _LENGTHS[0]
    expected = [_attention(q[part], k[part], v[part]) for part in (slice(first), slice(first, rows))]
    check_near("attention", attended, torch.cat(expected), near)
    alone = exact.attention(q[first:], k[first:], v[first:], exact.packed_sequences(_LENGTHS[1:], device), 0.2)
    _equal("a sequence of attention", alone, attended[first:])


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    return out[0].transpose(0, 1)


def _random(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def check_near(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Refuse ``got`` if it is further from ``expected``, float64, than ``tolerance`` of its size.

    Raises:
        WrongResultError: when it is.
    """
    error = ((got.double() - expected).norm() / expected.norm()).item()
    if not error <= tolerance:
        raise WrongResultError(f"{what} in {got.dtype} is off by {error:.1e} of its size")


def _equal(what: str, got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got, expected):
        raise WrongResultError(f"{what} in {got.dtype} has other bits alone than in a batch")
