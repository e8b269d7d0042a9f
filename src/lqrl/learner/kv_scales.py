"""Calibration of key/value cache scales on what the policy has just seen (FP8-RL, arXiv 2601.18150)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lqrl.learner.update import all_max
from lqrl.phases import phase
from lqrl.quant.kv import SCALE_NAMES, KVObserver, attention_modules, calibrates_kv
from lqrl.rollouts.batching import microbatches

if TYPE_CHECKING:
    from lqrl.learner.module import PolicyModule
    from lqrl.learner.scorer import Scorer


CALIBRATION_PROMPTS = 32
"""Prompts that the first scales are taken from, before there are rollouts."""


CALIBRATION_TOKENS = 131_072
"""About as many tokens of an iteration as a rank's scales are taken from; of more, sequences drawn at random."""


@torch.no_grad()
def calibrate_kv_(
    scorer: Scorer,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    token_budget: int,
    most_tokens: int = CALIBRATION_TOKENS,
) -> Tensor:
    """Set each layer's ``k_scale`` and ``v_scale`` from the keys and values of these tokens.

    ``1.05 * P99.9(amax) / 448`` over the tokens' magnitudes, the maximum over ranks; a rank without rows takes part.
    The paper takes amax over micro-batches, which makes the scale depend on how the batch was cut.

    Args:
        scorer: of a policy that `lqrl.quant.kv.prepare_kv_` has prepared; its linear layers run as they are.
        input_ids: ``[B, T]``.
        attention_mask: ``[B, T]`` bool, true on one run of tokens a row.
        token_budget: most tokens of a forward pass.
        most_tokens: of more than these, as many sequences as reach them, drawn with a seed of its own; not at equal
            distances, since lengths may follow the order of samples. A quantile of this many tokens hardly moves, and
            a pass over all of them costs a tenth of an iteration.

    Returns:
        fp32 ``[layers, 2]``.

    Raises:
        ValueError: when a key or value is NaN or inf, no rank has a token, or a limit is below 1.
    """
    if min(token_budget, most_tokens) < 1:
        raise ValueError(f"token_budget ({token_budget}) and most_tokens ({most_tokens}) must be at least 1")
    modules, observer = attention_modules(scorer.policy), KVObserver()
    before, scorer.kv = scorer.kv, observer
    try:
        lengths = attention_mask.sum(1).cpu()
        rows = _part(lengths, most_tokens)
        for group in microbatches(lengths[rows], token_budget):
            chosen = rows[group].to(input_ids.device)
            scorer.score(input_ids[chosen], attention_mask[chosen], layers_only=True)
    finally:
        scorer.kv = before
    scales = torch.zeros(len(modules), 2, device=input_ids.device)
    for layer, pair in observer.scales().items():
        scales[layer] = pair
    scales = all_max(scales)
    if not bool(scales.isfinite().all()) or not bool((scales > 0).all()):
        layer = int((~(scales.isfinite() & (scales > 0))).any(1).nonzero()[0])
        raise ValueError(
            f"layer {layer}: the key/value cache has no usable scale ({scales[layer].tolist()}); keys or values are "
            "NaN or inf, or nothing was generated to calibrate on"
        )
    for module, (k_scale, v_scale) in zip(modules, scales, strict=True):
        module.get_buffer("k_scale").copy_(k_scale)
        module.get_buffer("v_scale").copy_(v_scale)
    return scales


def _part(lengths: Tensor, most_tokens: int) -> Tensor:
    """Rows with tokens, ascending: all, or of more than ``most_tokens`` tokens some that just reach them."""
    rows = lengths.nonzero().squeeze(1)
    if int(lengths.sum()) <= most_tokens:
        return rows
    drawn = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    enough = int((lengths[drawn].cumsum(0) < most_tokens).sum()) + 1
    return drawn[:enough].sort().values


def calibrate(module: PolicyModule, input_ids: Tensor, attention_mask: Tensor) -> None:
    """Cache scales of the policy as it is, from these tokens; nothing for caches without calibrated scales."""
    if calibrates_kv(module.scheme):
        with phase("calibrate"):
            ids, mask = input_ids.to(module.device), attention_mask.to(module.device)
            calibrate_kv_(module.scorer, ids, mask, token_budget=module.token_budget)


def calibrate_first(module: PolicyModule) -> None:
    """Scales for the first rollouts, from prompts; those of a resumed run come with its checkpoint.

    Raises:
        ValueError: when there are no prompts to calibrate on.
    """
    if not calibrates_kv(module.scheme):
        return
    if any(float(buffer) != 1.0 for m in attention_modules(module.policy) for buffer in map(m.get_buffer, SCALE_NAMES)):
        return
    prompts = module.calibration_prompts
    if not prompts:
        raise ValueError(
            f"scheme {module.scheme.name!r} calibrates its cache and has seen no tokens: set "
            "module.calibration_prompts to some prompts, or take +kv_fp8, which computes its scales"
        )
    longest = max(len(prompt.input_ids) for prompt in prompts)
    ids = torch.tensor([[*p.input_ids, *[0] * (longest - len(p.input_ids))] for p in prompts])
    lengths = torch.tensor([len(p.input_ids) for p in prompts])
    calibrate(module, ids, torch.arange(longest)[None] < lengths[:, None])
