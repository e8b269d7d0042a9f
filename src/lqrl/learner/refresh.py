"""One refresh of a module's engines: export, stage, ship."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lqrl.engines.base import Digests, NamedTensors, RolloutEngine, WeightStage
from lqrl.learner.frozen import SentOnce, frozen_stamp, note_frozen
from lqrl.learner.kv_scales import calibrate_first
from lqrl.learner.module import PolicyModule
from lqrl.phases import phase
from lqrl.quant import QuantScheme
from lqrl.quant.weight_key import weights_stamp
from lqrl.types import RefreshReport


@phase("refresh")
def refresh_engines(
    module: PolicyModule, stages: Sequence[WeightStage] = (), *, full_precision: bool = True
) -> RefreshReport | None:
    """Bring every engine of ``module`` to its policy version and weights; those that hold them are left alone.

    Args:
        module: with engines built.
        stages: change the weights on their way to the rollout engine, in order; the full-precision engine of
            validation gets them unchanged.
        full_precision: also refresh the full-precision engine, if there is one.

    Returns:
        What the rollout engine's refresh did, or ``None`` when it was fresh.

    Raises:
        RefreshError: from the engine; it then refuses to generate.
        ValueError: for stages in exact mode, where the engine must hold the learner's weights.
    """
    if module.exact and stages:
        raise ValueError(
            f"exact: true needs an engine with the learner's weights, and {type(stages[0]).__name__} changes them: "
            "remove the stages of EngineRefresh, or set exact to false"
        )
    calibrate_first(module)
    version, report = module.policy_version, None
    # A loaded checkpoint or averaged weights have no version of their own.
    stamp = weights_stamp((*module.policy.parameters(), *module.policy.buffers()))
    if module.engine.policy_version != version or module.shipped.get("rollout") != stamp:
        report = _ship_rollout(module, stages, version)
        module.shipped["rollout"] = stamp
    full = module.full_engine
    if full_precision and full is not None and (full.policy_version != version or module.shipped.get("full") != stamp):
        _ship(full, module.exported_weights(QuantScheme.preset("none")), version)
        module.shipped["full"] = stamp
    return report


def refresh_metrics(report: RefreshReport, scheme: QuantScheme) -> dict[str, float]:
    """What is logged of a refresh; not what the engine did not count, nor codes where ``scheme`` has none."""
    fractions = {"refresh/elements_changed_fraction": report.elements_changed_fraction}
    if scheme.quantizes:
        fractions["refresh/codes_changed_fraction"] = report.codes_changed_fraction
    counted = {name: fraction for name, fraction in fractions.items() if not math.isnan(fraction)}
    return {"refresh/seconds": report.seconds, **counted}


def _ship_rollout(module: PolicyModule, stages: Sequence[WeightStage], version: int) -> RefreshReport:
    """Everything; or, once a policy with adapters has been sent whole, all but its frozen matrices."""
    base = frozen_stamp(module.policy) if module.sends_adapters else ()
    sent, noted = module.sent_once, {}
    # An engine of version -1 holds nothing that can be relied on.
    if sent is not None and sent.stamp == base and module.engine.policy_version >= 0:
        frozen, weights = sent.digests, module.exported_weights(skip=sent.digests.keys())
    else:
        frozen, weights = None, module.exported_weights(module.engine.takes)
        if module.sends_adapters:
            weights = note_frozen(weights, module.policy, noted)
    for stage in stages:
        weights = stage(weights, policy_version=version)
    report = _ship(module.engine, weights, version, frozen)
    if noted:
        module.sent_once = SentOnce(base, noted)
    return report


@torch.no_grad()
def _ship(engine: RolloutEngine, weights: NamedTensors, version: int, frozen: Digests | None = None) -> RefreshReport:
    engine.wake()
    if frozen is None:
        return engine.update_weights(weights, policy_version=version)
    return engine.update_weights(weights, policy_version=version, frozen=frozen)
