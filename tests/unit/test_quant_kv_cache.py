"""Low-bit key/value caches: the engine stores codes, the aligned learner reads through the same rounding."""

from __future__ import annotations

import pytest
import torch

from lqrl.engines.base import EngineSpec, RefreshError
from lqrl.engines.slots import SlotCache
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.learner.kv_scales import _part, calibrate_kv_
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import AttentionShape, load_model
from lqrl.quant import QuantScheme, TensorFormat, export_weights, prepare_
from lqrl.quant.kv import Fp8Static, Fp8TokenHead, Int8TokenHead, KVRounding, kv_method, kv_rounding, prepare_kv_
from lqrl.testing.models import tiny_config
from lqrl.types import Prompt, SamplingParams

METHODS = [Int8TokenHead(), Fp8TokenHead(), Fp8Static()]
KINDS = ["kv_int8", "kv_fp8", "kv_fp8_static"]


def built(scheme: QuantScheme, dtype: torch.dtype, device: torch.device, family: str = "qwen3"):
    policy = load_model(tiny_config(family), dtype=torch.float32, seed=0, device=device)
    prepare_kv_(policy, scheme)
    prepare_(policy, scheme, export_dtype=dtype)
    ids = torch.randint(5, 60, (4, 20), generator=torch.Generator().manual_seed(1)).to(device)
    if scheme.kv_cache is not None and not scheme.kv_cache.dynamic:
        calibrate_kv_(Scorer(policy, 1.0, dtype), ids, torch.ones_like(ids, dtype=torch.bool), token_budget=64)
    engine: TorchEngine = TorchEngineFactory(max_num_seqs=3)(EngineSpec(policy.config, scheme, dtype, device, 64, ()))
    engine.update_weights(export_weights(policy, scheme, export_dtype=dtype), policy_version=0)
    return policy, engine


def gaps(scheme: QuantScheme, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Mean |log-prob difference| of the engine to a learner with the cache's rounding, and to one without."""
    policy, engine = built(scheme, dtype, device)
    prompts = [Prompt(0, (5, 6, 7)), Prompt(1, (8, 9, 10, 11, 12))]
    groups = engine.generate(prompts, SamplingParams(n=4, max_tokens=12), seed=0)
    total = [0.0, 0.0]
    for prompt, group in zip(prompts, groups, strict=True):
        ids = torch.tensor([[*prompt.input_ids, *c.token_ids.tolist()] for c in group], device=device)
        rollout = torch.stack([c.logprobs for c in group]).cpu()
        for i, kv in enumerate((kv_rounding(policy, scheme), None)):
            with torch.no_grad():
                scored = Scorer(policy, 1.0, dtype, kv).score(ids, torch.ones_like(ids, dtype=torch.bool))
            total[i] += (scored[:, len(prompt.input_ids) :].cpu() - rollout).abs().mean().item() / 2
    return total[0], total[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linears", ["none", "int4_w4a16_g32", "int8_w8a8+lm_head"])
def test_the_learner_reads_what_the_engine_cached(kind, linears, device):
    aligned, not_aligned = gaps(QuantScheme.preset(f"{linears}+{kind}"), torch.float32, device)
    assert aligned < 0.2 * not_aligned  # a value near a rounding boundary may still flip
    assert not_aligned > 1e-4


def test_additions_combine_and_the_cache_alone_is_a_scheme():
    scheme = QuantScheme.preset("fp8_per_channel+lm_head+kv_fp8")
    assert scheme.lm_head
    assert kv_method(scheme) == Fp8TokenHead()
    only = QuantScheme.preset("none+kv_int8")
    assert not only.quantizes
    assert kv_method(only) == Int8TokenHead()
    odd = QuantScheme("odd", kv_cache=TensorFormat("int4", "token_head", dynamic=True))
    with pytest.raises(ValueError, match="no cache holds keys and values as int4 per token_head, dynamic; supported"):
        kv_method(odd)


@pytest.mark.parametrize("method", METHODS)
def test_the_cache_gives_back_what_the_learner_rounds(method, device):
    shape = AttentionShape(kv_heads=2, key_width=8, value_width=4, scaling=1.0, sliding_window=None)
    scale = torch.tensor([0.01], device=device)
    cache = SlotCache([shape], torch.float32, device, method, [(scale, scale)])
    cache.reserve(3, 5)
    keys, values = torch.randn(1, 2, 4, 8, device=device), torch.randn(1, 2, 4, 4, device=device)
    slots, positions = torch.tensor([2, 0, 0, 2], device=device), torch.tensor([0, 0, 1, 1], device=device)
    cache.write(0, cache.rows(2, slots, positions), keys, values)
    cache.copy([2], [1], 2)
    k_round, v_round = KVRounding(method, lambda layer: (scale, scale))(0, keys, values)
    stored_k, stored_v = cache.read(0, 3, 2)
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        assert torch.equal(stored_k[slot, :, position], k_round[0, :, token])
        assert torch.equal(stored_v[slot, :, position], v_round[0, :, token])
    assert torch.equal(stored_k[1], stored_k[2])
    assert all(torch.equal(a, b) for a, b in zip(cache.seen(0, keys, values), (k_round, v_round), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_low_bit_cache_is_smaller(method):
    shape = AttentionShape(kv_heads=2, key_width=64, value_width=64, scaling=1.0, sliding_window=None)
    one = torch.ones(1)
    sizes = []
    for m in (None, method):
        cache = SlotCache([shape], torch.bfloat16, torch.device("cpu"), m, [(one, one)])
        cache.reserve(4, 16)
        sizes.append(cache.bytes)
    # 64 codes and, per token and head, 4 bytes of scale against 128 bytes of bf16.
    assert sizes[1] / sizes[0] == (68 / 128 if method.per_token else 0.5)


def test_gradients_pass_straight_through():
    keys, values = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(2))
    scale = torch.full((1,), 0.1)
    rounded = KVRounding(Fp8Static(), lambda layer: (scale, scale))(0, keys, values)
    assert not torch.equal(rounded[0], keys)
    (rounded[0] * 2 + rounded[1]).sum().backward()
    assert torch.equal(keys.grad, torch.full_like(keys, 2.0))
    assert torch.equal(values.grad, torch.ones_like(values))


def test_calibration_takes_the_high_magnitudes_of_each_layer():
    scheme = QuantScheme.preset("none+kv_fp8_static")
    policy, engine = built(scheme, torch.float32, torch.device("cpu"))
    attention = policy.get_submodule("model.layers.1.self_attn")
    before = attention.get_buffer("v_scale").clone()
    assert 1e-5 < before.item() < 1.0
    shipped = engine.decoder.model.get_buffer("model.layers.1.self_attn.v_scale")
    assert torch.equal(shipped, before)
    with torch.no_grad():
        attention.get_submodule("v_proj").weight.mul_(600)  # beyond e4m3 at scale 1
    ids = torch.randint(5, 60, (4, 20), generator=torch.Generator().manual_seed(1))
    calibrate_kv_(Scorer(policy, 1.0, torch.float32), ids, torch.ones_like(ids, dtype=torch.bool), token_budget=64)
    torch.testing.assert_close(attention.get_buffer("v_scale"), before * 600, rtol=1e-3, atol=0)
    engine.update_weights(export_weights(policy, scheme, export_dtype=torch.float32), policy_version=1)
    assert torch.equal(shipped, attention.get_buffer("v_scale"))


def test_calibration_does_not_depend_on_the_cut_into_micro_batches():
    scheme = QuantScheme.preset("none+kv_fp8_static")
    policy, _ = built(scheme, torch.float32, torch.device("cpu"))
    ids = torch.randint(5, 60, (6, 10), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(10)[None] < torch.tensor([10, 3, 7, 10, 1, 5])[:, None]
    scorer = Scorer(policy, 1.0, torch.float32)
    whole, cut = (calibrate_kv_(scorer, ids, mask, token_budget=budget) for budget in (1000, 10))
    torch.testing.assert_close(whole, cut, rtol=1e-6, atol=0)


def test_many_tokens_are_calibrated_on_a_part_of_them():
    policy, _ = built(QuantScheme.preset("none+kv_fp8_static"), torch.float32, torch.device("cpu"))
    ids = torch.randint(5, 60, (64, 40), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([1, 40, 0, 40] * 16)  # long ones at equal distances
    mask, scorer = torch.arange(40)[None] < lengths[:, None], Scorer(policy, 1.0, torch.float32)
    rows = _part(lengths, 400)
    assert 400 <= int(lengths[rows].sum()) < 440
    assert {int(n) for n in lengths[rows]} == {1, 40}
    assert torch.equal(_part(lengths, 1296), lengths.nonzero().squeeze(1))
    some = calibrate_kv_(scorer, ids, mask, token_budget=100, most_tokens=400)
    chosen = calibrate_kv_(scorer, ids[rows], mask[rows], token_budget=1000)
    torch.testing.assert_close(some, chosen, rtol=1e-6, atol=0)
    assert not torch.allclose(some, calibrate_kv_(scorer, ids, mask, token_budget=100), rtol=1e-6)


@pytest.mark.parametrize("limits", [{"token_budget": 0}, {"token_budget": 8, "most_tokens": -1}])
def test_calibration_refuses_limits_below_one(limits):
    policy, _ = built(QuantScheme.preset("none+kv_fp8_static"), torch.float32, torch.device("cpu"))
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="must be at least 1"):
        calibrate_kv_(Scorer(policy, 1.0, torch.float32), ids, ids.bool(), **limits)


def test_no_tokens_calibrate_nothing():
    policy, _ = built(QuantScheme.preset("none+kv_fp8_static"), torch.float32, torch.device("cpu"))
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="nothing was generated to calibrate on"):
        calibrate_kv_(Scorer(policy, 1.0, torch.float32), ids, torch.zeros_like(ids).bool(), token_budget=8)


def test_scales_are_part_of_the_transaction_and_only_of_static_formats():
    scheme = QuantScheme.preset("none+kv_fp8_static")
    policy, engine = built(scheme, torch.float32, torch.device("cpu"))
    weights = dict(export_weights(policy, scheme, export_dtype=torch.bfloat16))
    assert weights["model.layers.0.self_attn.k_scale"].dtype == torch.float32
    weights = dict(export_weights(policy, scheme, export_dtype=torch.float32))
    del weights["model.layers.0.self_attn.k_scale"]
    with pytest.raises(RefreshError, match=r"missing: model\.layers\.0\.self_attn\.k_scale"):
        engine.update_weights(weights.items(), policy_version=1)
    plain = dict(export_weights(policy, QuantScheme.preset("none"), export_dtype=torch.float32))
    assert not [name for name in plain if name.endswith("_scale")]


def test_values_without_a_usable_scale_are_named():
    policy, _ = built(QuantScheme.preset("none+kv_fp8_static"), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        policy.get_submodule("model.layers.1.self_attn.v_proj").weight.fill_(float("nan"))
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="layer 1: the key/value cache has no usable scale"):
        calibrate_kv_(Scorer(policy, 1.0, torch.float32), ids, torch.ones_like(ids, dtype=torch.bool), token_budget=64)


def test_a_moved_policy_reads_its_new_scales():
    scheme = QuantScheme.preset("none+kv_fp8_static")
    policy, _ = built(scheme, torch.float32, torch.device("cpu"))
    rounding = kv_rounding(policy, scheme)
    assert rounding is not None
    policy.double().float()  # other buffers
    buffer = policy.get_submodule("model.layers.1.self_attn").get_buffer("k_scale").fill_(0.5)
    assert rounding.scales(1)[0].data_ptr() == buffer.data_ptr()


def test_two_caches_are_refused():
    with pytest.raises(ValueError, match="'kv_int8' sets kv_cache, which an addition before it has set"):
        QuantScheme.preset("int8_w8a8+kv_fp8+kv_int8")
