"""Checks of the Triton kernels that draw tokens in exact mode, see `exact_cases`."""

from __future__ import annotations

import torch
from exact_inputs import randn, same
from torch import Tensor

from lqrl.quant import exact


def check_draws(device: torch.device) -> None:
    from lqrl.quant import triton_exact_draw as t

    small = device.type == "cpu"
    for vocabulary in (1, 9, 5000) if small else (1, 9, 1024, 1025, 5000, 151936):
        rows = 18 if small else 300
        logits = randn(device, rows, vocabulary) * 3
        uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
        uniform = uniform.to(device)
        for temperature in (1.0, 0.7):
            tokens, largest, log_total = t.draw(logits, uniform, temperature)
            for a, b in zip(t.totals(logits, temperature), (largest, log_total), strict=True):
                same(a, b, "drawing changes no sum")
            same(largest, exact.tempered(logits.amax(1), temperature), "largest")
            tempered = logits.double() / temperature
            total = (tempered - tempered.amax(1, keepdim=True)).exp().sum(1).log()
            assert (log_total - total).abs().max() < 2e-6, (vocabulary, temperature)
            cumulative = tempered.softmax(1).cumsum(1)
            above = cumulative.gather(1, tokens[:, None]).squeeze(1)
            below = torch.where(tokens > 0, cumulative.gather(1, (tokens - 1).clamp_min(0)[:, None]).squeeze(1), 0)
            assert ((below - 1e-6 <= uniform) & (uniform <= above + 1e-6)).all(), (vocabulary, temperature)
            logprobs = t.token_logprobs(logits, tokens, temperature, largest, log_total)
            chosen = exact.tempered(logits.gather(1, tokens[:, None]).squeeze(1), temperature).double()
            same(logprobs, (chosen - largest.double() - log_total).float(), "log-probs")
            for start, end in ((3, 4), (5, 17)):
                part = t.draw(logits[start:end].contiguous(), uniform[start:end].contiguous(), temperature)
                for a, b in zip(part, (tokens, largest, log_total), strict=True):
                    same(a, b[start:end], (start, end))
        greedy = t.draw(logits.round(), None, 1.0)  # with equals
        same(greedy.tokens, logits.round().argmax(1), "greedy")
        same(greedy.log_total, t.totals(logits.round(), 1.0)[1], "greedy")
    logits = torch.full((2, 3000), -torch.inf, device=device)
    logits[:, [5, 2950]] = 1.0  # the others are never drawn
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64, device=device)
    assert t.draw(logits, ends, 1.0).tokens.tolist() == [5, 2950]
    for odd in (torch.nan, torch.inf):
        logits[1, 7] = odd
        for uniform in (ends, None):
            tokens, largest, _ = t.draw(logits, uniform, 1.0)
            assert largest.isnan().tolist() == [False, True]
            assert 0 <= tokens[1] < 3000
    logits[1] = -torch.inf
    tokens, *rows = t.draw(logits, ends, 1.0)
    assert t.token_logprobs(logits, tokens, 1.0, *rows).isnan().tolist() == [False, True]
    assert 0 <= tokens[1] < 3000


def kept_share(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities ``[N, V]`` float64 of what top-k, then top-p keep, 0 elsewhere; the first of equals first."""
    values, ids = (logits.double() / temperature).sort(dim=1, descending=True, stable=True)
    shares = values.softmax(1)
    if top_k:
        shares[:, top_k:] = 0
    before = shares.cumsum(1) - shares
    shares = shares * (before < top_p * shares.sum(1, keepdim=True) - 1e-12)
    return torch.zeros_like(shares).scatter_(1, ids, shares)


def check_truncated_draws(device: torch.device) -> None:
    from lqrl.quant import triton_exact_draw, triton_truncated_draw

    small = device.type == "cpu"
    truncations = [(0, 0.05, 1.0), (40, 0.6, 0.7), (7, 1.0, 1.0), (0, 0.9, 1.3)]
    if not small:
        truncations += [(1, 1.0, 1.0), (0, 0.9999, 0.7), (10**6, 0.8, 1.0)]
    for vocabulary in (1, 9, 2100) if small else (1, 9, 1024, 1025, 5000, 151936):
        rows = 10 if small else 300
        logits = randn(device, rows, vocabulary) * 3
        logits[3:6] = (logits[3:6] * 2).round() / 2  # equals
        logits[6] = 1.5
        logits[7] *= 40  # sharp: fewer than top_k of them have weight
        logits[8] *= 0.01
        uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
        uniform = uniform.to(device)
        for top_k, top_p, temperature in truncations:
            case = vocabulary, top_k, top_p
            draws, log_mass = triton_truncated_draw.draw(logits, uniform, temperature, top_k, top_p)
            for a, b in zip(triton_exact_draw.totals(logits, temperature), draws[1:], strict=True):
                same(a, b, "drawing changes no sum")
            shares = kept_share(logits, temperature, top_k, top_p)
            mass = shares.sum(1)
            assert ((log_mass.double().exp() - mass).abs() < 1e-5).all(), case
            more = kept_share(logits, temperature, top_k, top_p + 1e-6)  # fp32 weights move the edge of top-p
            assert (more.gather(1, draws.tokens[:, None]) > 0).all(), case
            cumulative = shares.cumsum(1)
            above = cumulative.gather(1, draws.tokens[:, None]).squeeze(1)
            taken, target = shares.gather(1, draws.tokens[:, None]).squeeze(1), uniform * mass
            assert ((above - taken - 1e-5 <= target) & (target <= above + 1e-5)).all(), case
            for start, end in ((3, 4), (5, 9)):
                part = triton_truncated_draw.draw(
                    logits[start:end].contiguous(), uniform[start:end].contiguous(), temperature, top_k, top_p
                )
                same(part[0].tokens, draws.tokens[start:end], case)
                same(part[1], log_mass[start:end], case)
    logits = torch.full((3, 3000), -torch.inf, device=device)
    logits[:, [5, 2950]] = 1.0  # the others are never drawn, however many are asked for
    logits[2, 7] = torch.nan
    ends = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64, device=device)
    for top_k, top_p in ((30, 1.0), (1, 1.0), (0, 0.7), (30, 0.4)):
        draws, log_mass = triton_truncated_draw.draw(logits, ends, 1.0, top_k, top_p)
        both = top_k != 1 and top_p > 0.5
        assert draws.tokens[:2].tolist() == [5, 2950 if both else 5], (top_k, top_p)
        assert draws.largest.isnan().tolist() == [False, False, True]
        assert 0 <= draws.tokens[2] < 3000
        torch.testing.assert_close(log_mass[:2].exp(), torch.full_like(log_mass[:2], 1.0 if both else 0.5))
