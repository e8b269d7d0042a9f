"""Calibration of key/value cache scales on what the policy has just seen (FP8-RL, arXiv 2601.18150)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lqrl.learner.update import world_size
from lqrl.modeling.backbone import hidden_states, pack
from lqrl.quant.kv import KVObserver, attention_modules
from lqrl.rollouts.batching import microbatches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def calibrate_kv_(policy: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, *, token_budget: int) -> Tensor:
    """Set each layer's ``k_scale`` and ``v_scale`` from the keys and values of these tokens.

    ``1.05 * P99.9(amax) / 448`` over the tokens' magnitudes, the maximum over ranks; a rank without rows takes part.
    The paper takes amax over micro-batches, which makes the scale depend on how the batch was cut.

    Args:
        policy: prepared by `lqrl.quant.kv.prepare_kv_`; runs as it is, linear layers in low precision if they are.
        input_ids: ``[B, T]``.
        attention_mask: ``[B, T]`` bool, true on one run of tokens a row.
        token_budget: most tokens of a forward pass.

    Returns:
        fp32 ``[layers, 2]``.

    Raises:
        ValueError: when a key or value is NaN or inf, or no rank has a row.
    """
    modules, observer = attention_modules(policy), KVObserver()
    for rows in microbatches(attention_mask.sum(1).cpu(), token_budget):
        ids, mask = input_ids[rows.to(input_ids.device)], attention_mask[rows.to(input_ids.device)]
        hidden_states(policy, pack(ids, mask, observer))
    scales = torch.zeros(len(modules), 2, device=input_ids.device)
    for layer, pair in observer.scales().items():
        scales[layer] = pair
    if world_size() > 1:
        dist.all_reduce(scales, dist.ReduceOp.MAX)
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
