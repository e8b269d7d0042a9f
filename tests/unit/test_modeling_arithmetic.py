"""An engine's rounding in the learner: formulas bit for bit, gradients, and nothing else changed."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from lqrl.algorithms.logprobs import head_logits
from lqrl.learner.scorer import Scorer
from lqrl.modeling.arithmetic import Arithmetic, RoundedRMSNorm, WideRotary, rms_norm, use_arithmetic_
from lqrl.modeling.attention import PackedContext, lqrl_attention
from lqrl.modeling.backbone import load_model
from lqrl.modeling.exact import exact_learner_
from lqrl.modeling.head import output_head
from lqrl.modeling.recompute import recompute_layers_
from lqrl.quant import QuantScheme, prepare_
from lqrl.testing import tiny_config, tiny_moe_config

BF16, FP32 = torch.bfloat16, torch.float32
ONCE = Arithmetic(rounds_normed=False, rounds_rotated=False)
EVERY = [Arithmetic(*flags) for flags in product((True, False), repeat=4)]
EPS = 1e-5


def config_of(family: str) -> PretrainedConfig:
    if family == "qwen3_moe":
        return tiny_moe_config()
    if family == "mistral":
        return MistralConfig(**tiny_config("llama").to_dict())
    return tiny_config(family)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
NORMS = {"llama": 5, "mistral": 5, "qwen2": 5, "qwen3": 9, "qwen3_moe": 9}  # of two layers


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    """Inputs ``[40, 48]`` of sizes far apart, and a weight."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 48, generator=generator) * torch.logspace(-2, 2, 40)[:, None]
    return x, 1 + 0.3 * torch.randn(48, generator=generator)


def ids_and_mask() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 64, (3, 14), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(14) < torch.tensor([14, 9, 3])[:, None]


def scored(config: PretrainedConfig, arithmetic: Arithmetic | None, dtype: torch.dtype, **options: Any) -> Any:
    """Log-probs and gradients of fp32 masters; ``scheme`` and ``checkpointing`` are options."""
    policy = load_model(config, dtype=FP32, seed=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.normal_(1, 0.3, generator=torch.Generator().manual_seed(len(name)))
    if options.get("scheme", "none") != "none":
        prepare_(policy, QuantScheme.preset(options["scheme"]), export_dtype=dtype)
    scorer, names = Scorer(policy, 0.7, dtype), [name for name, _ in policy.named_parameters()]
    if options.get("checkpointing"):
        recompute_layers_(policy)
    if arithmetic is not None:
        scorer.follow_(arithmetic)
    assert [name for name, _ in policy.named_parameters()] == names
    policy.train()
    ids, mask = ids_and_mask()
    out = scorer.score(ids, mask)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("wide", [False, True])
def test_a_norm_is_the_formula_bit_for_bit(dtype: torch.dtype, wide: bool, rows: tuple[Tensor, Tensor]) -> None:
    x, weight = rows[0].to(FP32 if wide else dtype), rows[1].to(dtype)
    x32, w32 = x.float(), weight.float()
    normed = x32 * torch.rsqrt((x32 * x32).mean(1, keepdim=True) + EPS)
    once, _ = rms_norm(x, weight, EPS, rounds_normed=False)
    twice, _ = rms_norm(x, weight, EPS, rounds_normed=True)
    assert once.dtype == twice.dtype == dtype
    assert torch.equal(once, (normed * w32).to(dtype))
    assert torch.equal(twice, normed.to(dtype) * weight)
    assert torch.equal(once, twice) == (dtype == FP32)


@pytest.mark.parametrize("rounds_normed", [True, False])
def test_a_norm_is_transformers_in_fp32_and_where_it_rounds_twice(
    rounds_normed: bool, rows: tuple[Tensor, Tensor]
) -> None:
    for dtype in (FP32, BF16):
        x, plain = rows[0].to(dtype), LlamaRMSNorm(48, EPS).to(dtype)
        plain.weight.data.copy_(rows[1])
        ours = RoundedRMSNorm(plain.weight, EPS, Arithmetic(rounds_normed=rounds_normed))
        equal = (ours(x) == plain(x)).float().mean()
        assert equal == 1 if dtype == FP32 or rounds_normed else 0.5 < equal < 0.95


@pytest.mark.parametrize("rounds_normed", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_of_a_norm_are_those_of_the_plain_module(
    dtype: torch.dtype, rounds_normed: bool, rows: tuple[Tensor, Tensor]
) -> None:
    gradients = []
    plain, given = LlamaRMSNorm(48, EPS), rows[0].to(dtype)
    plain.weight.data.copy_(rows[1].to(dtype))
    norm = LlamaRMSNorm(48, EPS).to(dtype)
    norm.weight.data.copy_(rows[1])
    for module, x in (
        (plain, given.float()),
        (RoundedRMSNorm(norm.weight, EPS, Arithmetic(rounds_normed=rounds_normed)), given),
    ):
        x = x.clone().requires_grad_()
        out = module(x)
        (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        gradients.append((x.grad, module.weight.grad))
    for ours, true in zip(gradients[1], gradients[0], strict=True):
        assert ours.dtype == dtype
        assert relative(ours, true) < (1e-6 if dtype == FP32 else 5e-3)


# ---------------------------------------------------------------- rotary embeddings


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_rotary_embedding_is_the_formula_bit_for_bit(dtype: torch.dtype) -> None:
    policy = load_model(tiny_config("llama"), dtype=dtype, seed=0)
    decoder: Any = policy.get_decoder()
    plain, attention = decoder.rotary_emb, decoder.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 30, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    cos, sin = plain(q, torch.arange(30)[None])
    seen: list[Tensor] = []

    class Context(PackedContext):
        def attend(self, layer_idx: int, q: Tensor, k: Tensor, *rest: Any) -> Tensor:  # type: ignore[override]
            seen.extend((q, k))
            return super().attend(layer_idx, q, k, *rest)

    wide = apply_rotary_pos_emb(q, k, *WideRotary(plain)(q, torch.arange(30)[None]))
    out, _ = lqrl_attention(attention, *wide, v, None, attention_context=Context([30]))
    assert out.dtype == dtype
    c, s = (x[..., :8].float() for x in (cos, sin))
    for x, turned, own in zip((q, k), seen, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        a, b = x.float().chunk(2, -1)
        assert torch.equal(turned, torch.cat([a * c - b * s, b * c + a * s], -1).to(dtype))
        assert torch.equal(turned, own) == (dtype == FP32)


# ---------------------------------------------------------------- logits


@pytest.mark.parametrize("scheme", ["none", "int8_w8a8+lm_head"])
def test_rounded_logits_have_the_gradient_of_those_that_are_not(scheme: str) -> None:
    policy = load_model(tiny_config("llama"), dtype=BF16, seed=0)
    if scheme != "none":
        prepare_(policy, QuantScheme.preset(scheme), export_dtype=BF16)
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    plain, head = output_head(policy), output_head(policy, rounds_logits=True)
    assert head.product is not None
    logits = head_logits(hidden, plain.weight) if plain.product is None else plain.product(hidden)
    rounded = head.product(hidden)
    assert rounded.dtype == FP32
    assert (rounded == logits.to(BF16).float()).float().mean() > 0.99  # sums of another order, near a boundary
    assert torch.equal(rounded, rounded.to(BF16).float())
    (values, grads), (own, own_grads) = (
        scored(tiny_config("llama"), Arithmetic(rounds_logits=flag), BF16) for flag in (True, False)
    )
    assert not torch.equal(values, own)
    assert all(relative(grads[name], own_grads[name]) < 0.05 for name in own_grads)


# ---------------------------------------------------------------- whole policies


@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp32_every_arithmetic_is_the_same(family: str) -> None:
    config = config_of(family)
    plain, gradients = scored(config, None, FP32)
    for arithmetic in EVERY:
        values, others = scored(config, arithmetic, FP32)
        assert torch.equal(values, plain) if not arithmetic.rounds_logits else torch.allclose(values, plain, atol=1e-5)
        assert others.keys() == gradients.keys()
        assert all(relative(others[name], gradients[name]) < 2e-5 for name in gradients), arithmetic


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_replaced_is_counted(family: str) -> None:
    counts = {
        Arithmetic(): 0,
        Arithmetic(rounds_logits=True): 0,
        Arithmetic(rounds_rotated=False): 1,
        Arithmetic(rounds_normed=False): NORMS[family],
        Arithmetic(rounds_sums=False): NORMS[family] + 2,
        Arithmetic(False, False, False): NORMS[family] + 3,
    }
    for arithmetic, count in counts.items():
        assert use_arithmetic_(load_model(config_of(family), dtype=BF16, seed=0), arithmetic) == count


def test_an_architecture_whose_rounding_is_not_known_is_left_alone() -> None:
    assert use_arithmetic_(load_model(tiny_config("gemma"), dtype=BF16, seed=0), ONCE) == 0


@pytest.mark.parametrize("arithmetic", [ONCE, Arithmetic(False, True, False), Arithmetic(False, False, False)])
@pytest.mark.parametrize("scheme", ["none", "int8_w8a8"])
def test_gradients_in_bf16_are_as_near_to_fp32_as_those_of_the_plain_policy(
    arithmetic: Arithmetic, scheme: str
) -> None:
    config = config_of("qwen3")
    (_, true), (own, plain), (values, ours) = (
        scored(config, a, dtype, scheme=scheme) for a, dtype in ((None, FP32), (None, BF16), (arithmetic, BF16))
    )
    assert not torch.equal(values, own)
    assert (values - own).abs().max() < 0.5
    gaps = {name: (relative(ours[name], true[name]), relative(plain[name], true[name])) for name in true}
    assert sum(a for a, _ in gaps.values()) < 1.1 * sum(b for _, b in gaps.values()), gaps


def test_layers_run_again_in_the_backward_pass_round_the_same() -> None:
    arithmetic, config = Arithmetic(False, False, False), config_of("qwen3")
    (a, grads), (b, again) = (scored(config, arithmetic, BF16, checkpointing=flag) for flag in (False, True))
    assert torch.equal(a, b)
    assert all(torch.equal(grads[name], again[name]) for name in grads)


def test_an_exact_scorer_follows_nothing() -> None:
    policy = load_model(tiny_config("llama"), dtype=FP32, seed=0)
    exact_learner_(policy, FP32)
    with pytest.raises(ValueError, match="follows no other"):
        Scorer(policy, 1.0, FP32, exact=True).follow_(ONCE)


@torch.no_grad()
def test_a_deep_copy_computes_with_weights_of_its_own() -> None:
    scorer, (ids, mask) = Scorer(load_model(config_of("llama"), dtype=BF16, seed=0), 1.0, BF16), ids_and_mask()
    scorer.follow_(Arithmetic(False, False, False))
    other, before = copy.deepcopy(scorer), scorer.score(ids, mask)
    for parameter in other.parameters():
        parameter.mul_(1.1)
    assert torch.equal(scorer.score(ids, mask), before)
    assert not torch.equal(other.score(ids, mask), before)
