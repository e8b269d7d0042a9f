"""Building the policy that is trained, the reference that is not, and the description of the engine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lqrl.engines.base import EngineSpec, RolloutEngine
from lqrl.learner.scorer import Scorer
from lqrl.learner.seeds import derive_seed
from lqrl.modeling.backbone import load_model
from lqrl.modeling.exact import exact_learner_
from lqrl.modeling.fused import fuse_layers_
from lqrl.modeling.recompute import recompute_layers_
from lqrl.modeling.sources import resolve_source
from lqrl.modeling.trial import kernels_work
from lqrl.quant import QuantScheme, add_adapters_, fold_all_, prepare_, target_modules
from lqrl.quant.checkpoint import load_cache_scales_, resolve_scheme
from lqrl.quant.checkpoint_reader import holds_codes
from lqrl.quant.kv import calibrates_kv, kv_rounding, prepare_kv_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lqrl.learner.module import PolicyModule


FOLDED = "folded_transforms"
"""Key of a model's config.json that names the invariant transforms in its weights."""


def build_policy(module: PolicyModule) -> PreTrainedModel:
    """Load the policy, fold the transforms, swap the linears for aligned ones, add adapters; on the CPU."""
    source = resolve_source(module.model_name)
    policy = load_model(source, dtype=module.master_dtype)
    coded = holds_codes(source)
    if coded:
        _compare_schemes(policy, module, resolve_scheme(source))
    folded = _fold(policy, module)
    prepare_kv_(policy, module.scheme)
    if coded and calibrates_kv(module.scheme) and not any(folded) and load_cache_scales_(policy, source):
        rank_zero_info(f"the first rollouts have the cache scales of {module.model_name}, the next have new ones")
    swapped = []
    if module.aligned and module.scheme.quantizes:
        swapped = prepare_(policy, module.scheme, export_dtype=module.compute_dtype, backward=module.backward_mode)
    if module.lora is not None:
        seed = derive_seed(module.seed, "lora")
        add_adapters_(policy, module.lora, export_dtype=module.compute_dtype, seed=seed)
    if module.exact:
        exact_learner_(policy, module.compute_dtype)
    if module.activation_checkpointing:
        recompute_layers_(policy)
    policy.train()
    parameters = list(policy.parameters())
    rank_zero_info(
        f"policy {module.model_name}: {sum(p.numel() for p in parameters):,} parameters "
        f"({sum(p.numel() for p in parameters if p.requires_grad):,} trained), rollouts in {module.scheme.name}, "
        f"{len(swapped)} aligned layers, {sum(folded)} changed by {len(folded)} invariant transforms"
    )
    return policy


def _compare_schemes(policy: PreTrainedModel, module: PolicyModule, written: QuantScheme) -> None:
    """Say where the scheme of a run is another one than that of the compressed-tensors checkpoint it starts from."""
    asked = module.scheme
    if asked.weight is not None and asked.weight.dtype == "int3":
        asked = replace(asked, weight=replace(asked.weight, dtype="int4"))  # as it is stored
    fields = {f: (getattr(written, f), getattr(asked, f)) for f in ("weight", "activation", "kv_cache", "lm_head")}
    parts = [f"{f} ({theirs} there, {ours} here)" for f, (theirs, ours) in fields.items() if theirs != ours]
    layers = set(target_modules(policy, written)) ^ set(target_modules(policy, asked))
    if asked.quantizes and layers:
        parts.append(f"{len(layers)} layers that one of them leaves in high precision, such as {min(layers)}")
    if parts:
        rank_zero_warn(
            f"{module.model_name} holds the scheme {written.name}, and this run has {module.scheme.name}. They differ "
            f"in {', '.join(parts)}. The weights start at the values of the codes"
        )


def _fold(policy: PreTrainedModel, module: PolicyModule) -> list[int]:
    """Fold the transforms and note them in the config, which travels with every export.

    Raises:
        ValueError: when the model came with transforms folded in: UAQ twice is another scale, and silent.
    """
    before = policy.config.to_dict().get(FOLDED, [])
    if before and module.transforms:
        raise ValueError(
            f"{module.model_name} comes with {', '.join(before)} folded in, and transforms would fold "
            f"{', '.join(map(str, module.transforms))} on top; set transforms: [] to train on from this model"
        )
    folded = fold_all_(policy, module.transforms)
    if folded:
        setattr(policy.config, FOLDED, [str(transform)[:200] for transform in module.transforms])
    return folded


def build_scorer(module: PolicyModule) -> Scorer:
    """The learner's forward: aligned, it reads keys and values through the rounding of the engine's cache."""
    kv = kv_rounding(module.policy, module.scheme) if module.aligned else None
    return Scorer(module.policy, module.sampling.temperature, module.compute_dtype, kv, module.exact)


def build_engine(module: PolicyModule, device: torch.device) -> RolloutEngine:
    """The rollout engine; an aligned learner rounds where it does from here on.

    Raises:
        ValueError: when its completions may hold older tokens than ``max_staleness`` allows.
    """
    lag, allowed = module.engine_factory.max_lag, module.max_staleness
    if lag > allowed:
        raise ValueError(
            f"the engine ends rollouts whose first tokens are up to {lag} versions old (partial.max_lag), and "
            f"max_staleness is {allowed}; set model.init_args.max_staleness: {lag}"
        )
    name, started = type(module.engine_factory).__name__, time.monotonic()
    rank_zero_info(f"the rollout engine starts ({name})")
    engine = module.engine_factory(engine_spec(module, device))
    rank_zero_info(f"the rollout engine is there, after {time.monotonic() - started:.0f} s")
    changed = _follow(module, module.scorer, engine)
    if changed:
        rank_zero_info(f"{changed} modules of the policy round where the engine does: {engine.arithmetic}")
    fused = _fuse(module, module.policy, device)
    if fused:
        rank_zero_info(f"{fused} modules of the policy run on fused kernels")
    return engine


def _follow(module: PolicyModule, scorer: Scorer, engine: RolloutEngine) -> int:
    """An aligned learner rounds where the engine does, but for its logits, unless it is exact.

    Rounding the logits of both sides pays only where they are all but equal before: two logits that differ by d become
    a whole step apart, or equal. With that the mismatch is larger (docs/vllm.md), and ratios of policies move in steps.
    """
    if module.exact or not module.aligned:
        return 0
    return scorer.follow_(replace(engine.arithmetic, rounds_logits=False))


def _fuse(module: PolicyModule, policy: PreTrainedModel, device: torch.device) -> int:
    """How many modules run on fused kernels from here on: after `_follow`, which looks for theirs by type."""
    return 0 if module.exact or not kernels_work(device) else fuse_layers_(policy)


def build_reference(module: PolicyModule, device: torch.device) -> Scorer:
    """The policy that training starts from, in full precision and without gradient, for the KL penalty.

    It rounds where the learner does, so that rounding is no part of the penalty.
    """
    reference = load_model(resolve_source(module.model_name), dtype=module.compute_dtype, device=device).eval()
    scorer = Scorer(reference.requires_grad_(False), module.sampling.temperature, module.compute_dtype)
    _follow(module, scorer, module.engine)
    _fuse(module, reference, device)
    return scorer


def engine_spec(module: PolicyModule, device: torch.device, full_precision: bool = False) -> EngineSpec:
    """What the engine factory is given: for the rollout engine, or for validation's one of full-precision weights."""
    config = module.policy.config
    return EngineSpec(
        config=config,
        scheme=QuantScheme.preset("none") if full_precision else module.scheme,
        dtype=module.compute_dtype,
        device=device,
        max_model_len=int(config.max_position_embeddings),
        eos_token_ids=module.eos_token_ids,
        lora=module.lora if module.sends_adapters and not full_precision else None,
        exact=module.exact and not full_precision,
    )
