"""Building the policy that is trained, the reference that is not, and the description of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_info

from lqrl.engines.base import EngineSpec
from lqrl.learner.scorer import Scorer
from lqrl.learner.seeds import derive_seed
from lqrl.modeling.backbone import load_model
from lqrl.modeling.sources import resolve_source
from lqrl.quant import QuantScheme, UpdateAwareScaling, add_adapters_, prepare_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lqrl.learner.module import PolicyModule


def build_policy(module: PolicyModule) -> PreTrainedModel:
    """Load the policy, fold UAQ, swap the linears for aligned ones, add adapters; in training mode, on the CPU."""
    policy = load_model(resolve_source(module.model_name), dtype=module.master_dtype)
    folded = UpdateAwareScaling(module.uaq_scale).fold_(policy) if module.uaq_scale != 1.0 else 0
    aligned = module.aligned and module.scheme.quantizes
    swapped = prepare_(policy, module.scheme, export_dtype=module.compute_dtype) if aligned else []
    if module.lora is not None:
        seed = derive_seed(module.seed, "lora")
        add_adapters_(policy, module.lora, export_dtype=module.compute_dtype, seed=seed)
    policy.train()
    parameters = list(policy.parameters())
    rank_zero_info(
        f"policy {module.model_name}: {sum(p.numel() for p in parameters):,} parameters "
        f"({sum(p.numel() for p in parameters if p.requires_grad):,} trained), rollouts in {module.scheme.name}, "
        f"{len(swapped)} aligned linear layers, {folded} scaled by UAQ"
    )
    return policy


def build_reference(module: PolicyModule, device: torch.device) -> Scorer:
    """The policy that training starts from, in full precision and without gradient, for the KL penalty."""
    reference = load_model(resolve_source(module.model_name), dtype=module.compute_dtype, device=device).eval()
    return Scorer(reference.requires_grad_(False), module.sampling.temperature, module.compute_dtype)


def engine_spec(module: PolicyModule, device: torch.device, scheme: QuantScheme) -> EngineSpec:
    """What the engine factory is given: for the module's own scheme its rollout engine, else one of merged weights."""
    config = module.policy.config
    return EngineSpec(
        config=config,
        scheme=scheme,
        dtype=module.compute_dtype,
        device=device,
        max_model_len=int(config.max_position_embeddings),
        eos_token_ids=module.eos_token_ids,
        lora=module.lora if module.sends_adapters and scheme is module.scheme else None,
    )
