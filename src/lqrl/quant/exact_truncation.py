"""Top-k and top-p in exact mode, in torch operations: a row's kept tokens depend on its logits alone."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_BITS = 45
"""Weights of at most 1 are integers in units of ``2**-UNIT_BITS``, whose sums have no order."""
MAX_VOCABULARY = 2 ** (63 - UNIT_BITS) - 1
"""As many of the largest weights fit 63 bits."""
_FEW = 1024  # most likely tokens that top-p tries before it sorts the whole vocabulary


def draw_truncated(
    logits: Tensor, largest: Tensor, log_total: Tensor, uniform: Tensor, top_k: int, top_p: float, few: bool = True
) -> tuple[Tensor, Tensor]:
    """Tokens after top-k and top-p, and the log of the kept mass.

    Of equal logits the first is the more likely one, which libraries leave open.

    Args:
        logits: fp32 ``[R, V]``, over the temperature.
        largest, log_total: their normalizer, see `lqrl.quant.exact.Normalizer`.
        uniform: ``[R]`` float64 in ``[0, 1)``; a token is drawn by its place in the vocabulary.
        top_k: most likely tokens that are kept; 0 for all.
        top_p: smallest set with at least this share of their mass is kept; 1 for all.
        few: look at the 1024 most likely tokens first when only top-p is set.

    Returns:
        int64 ``[R]`` and fp32 ``[R]``.

    Raises:
        NotImplementedError: for a vocabulary whose sums would not fit 63 bits.
    """
    vocabulary = logits.shape[1]
    if vocabulary > MAX_VOCABULARY:
        raise NotImplementedError(
            f"exact mode truncates vocabularies of at most {MAX_VOCABULARY} tokens, got {vocabulary}; set top_k to 0 "
            "and top_p to 1, or exact to false"
        )
    few = few and top_k == 0 and top_p < 1 and vocabulary > 4 * _FEW
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32  # integers in the order of the logits
    order |= torch.arange(vocabulary - 1, -1, -1, device=logits.device)
    size = min(top_k or (_FEW if few else vocabulary), vocabulary)
    ids = vocabulary - 1 - (order.topk(size, 1).values & 0xFFFFFFFF)
    weights = (torch.sub(logits.gather(1, ids), largest[:, None]).exp_() * 2.0**UNIT_BITS).long()
    wide = None
    if top_p < 1:
        mass = weights.cumsum(1)
        whole = mass[:, -1].double() if top_k > 0 else log_total.exp() * 2.0**UNIT_BITS
        goal = (top_p * whole)[:, None]
        wide = mass[:, -1] < goal[:, 0] if few else None
        weights = weights * (mass - weights < goal)
    cumulative = torch.zeros_like(order).scatter_(1, ids, weights).cumsum(1)
    kept = cumulative[:, -1]
    target = torch.minimum((uniform * kept.double()).long(), kept - 1)
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1).clamp_max_(vocabulary - 1)
    log_mass = ((kept.double() * 2.0**-UNIT_BITS).log() - log_total).float().clamp_max_(0)
    if wide is not None and bool(wide.any()):
        at = wide.nonzero().squeeze(1)
        again = draw_truncated(logits[at], largest[at], log_total[at], uniform[at], top_k, top_p, few=False)
        tokens.index_copy_(0, at, again[0])
        log_mass.index_copy_(0, at, again[1])
    return tokens, log_mass
