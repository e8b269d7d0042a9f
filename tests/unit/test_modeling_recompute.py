"""Activation checkpointing: the same gradients as bits, every layer run twice, and what cannot be is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from exact_sides import both
from torch import Tensor, nn

from lqrl.modeling.backbone import load_model
from lqrl.modeling.recompute import recompute_layers_
from lqrl.quant import Lora
from lqrl.quant.linear import AlignedLinear
from lqrl.testing import tiny_config, tiny_moe_config

FP32, BF16 = torch.float32, torch.bfloat16


def passes(checkpointing: bool, **options: Any) -> tuple[Tensor, dict[str, Tensor], Counter[str]]:
    """Log-probs and gradients of two micro-batches of unequal rows, and how often each MLP ran."""
    config = options.pop("config", None) or tiny_config("qwen3")
    case = both(config, options.pop("scheme"), options.pop("dtype", FP32), **options)
    if checkpointing:
        assert recompute_layers_(case.policy) == 2
    case.policy.train()
    runs: Counter[str] = Counter()
    for name, module in case.policy.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    generator = torch.Generator().manual_seed(0)
    scores, scorer = [], case.scorer(0.7)
    for lengths in ([12, 5, 9, 1], [7, 7]):
        ids = torch.randint(64, (len(lengths), 12), generator=generator)
        mask = torch.arange(12) < torch.tensor(lengths)[:, None]
        out = scorer.score(ids, mask)
        (out * torch.randn(out.shape, generator=generator)).sum().backward()
        scores.append(out.detach().flatten())
    return torch.cat(scores), {n: p.grad for n, p in case.policy.named_parameters() if p.grad is not None}, runs


LORA = Lora(r=3, alpha=6, train_norms=True)
CASES: dict[str, dict[str, Any]] = {
    "none": {"scheme": "none", "exact": False},
    "none-exact": {"scheme": "none"},
    "int8": {"scheme": "int8_w8a8", "exact": False},
    "int8-exact": {"scheme": "int8_w8a8"},
    # Parameters are fp32 and the forward pass gets their bf16 casts: the second one must too.
    "none-bf16": {"scheme": "none", "exact": False, "dtype": BF16},
    "int8-bf16": {"scheme": "int8_w8a8", "exact": False, "dtype": BF16},
    "int8-exact-bf16-kv": {"scheme": "int8_w8a8+kv_fp8", "dtype": BF16},
    "nvfp4-bf16": {"scheme": "nvfp4_w4a4", "exact": False, "dtype": BF16},
    "adapter": {"scheme": "int8_w8a8", "lora": LORA, "dtype": BF16, "exact": False},
    "adapter-exact": {"scheme": "int8_w8a8", "lora": LORA},
    "merge": {"scheme": "int4_w4a16_g32", "lora": Lora(r=3, alpha=6, refresh="merge"), "exact": False},
    "experts": {"scheme": "int8_w8a8", "exact": False, "config": tiny_moe_config()},
}


@pytest.mark.parametrize("case", list(CASES))
def test_gradients_are_those_without_it_bit_for_bit(case: str):
    scores, gradients, once = passes(False, **CASES[case])
    again, recomputed, twice = passes(True, **CASES[case])
    assert torch.equal(again, scores)
    assert gradients.keys() == recomputed.keys()
    assert all(torch.equal(recomputed[name], gradients[name]) for name in gradients)
    assert sum(float(g.abs().sum()) for g in gradients.values()) > 0
    assert twice == {name: 2 * count for name, count in once.items()}
    assert set(once.values()) == {2}  # micro-batches


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_codes_are_made_once_for_both_passes(monkeypatch, dtype: torch.dtype):
    made: list[AlignedLinear] = []
    exported = AlignedLinear.exported_weight
    monkeypatch.setattr(AlignedLinear, "exported_weight", lambda layer: made.append(layer) or exported(layer))
    passes(True, scheme="int8_w8a8", exact=False, dtype=dtype)
    assert len(made) == len(set(made))


def test_parameters_are_back_after_both_passes():
    case = both(tiny_config("qwen3"), "none", BF16, exact=False)
    recompute_layers_(case.policy)
    case.policy.train()
    before = dict(case.policy.named_parameters())
    ids = torch.arange(20).view(2, 10)
    out = case.scorer(1.0).score(ids, torch.ones_like(ids))
    out.sum().backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in case.policy.named_parameters() if p.grad is not None}
    out.sum().backward()
    after = dict(case.policy.named_parameters())
    assert all(after[name] is parameter and parameter.dtype == FP32 for name, parameter in before.items())
    assert all(torch.equal(after[n].grad, 2 * g) for n, g in first.items())  # type: ignore[arg-type]


def test_without_gradients_or_training_every_layer_runs_once():
    case = both(tiny_config("qwen3"), "none", exact=False)
    recompute_layers_(case.policy)
    runs: Counter[str] = Counter()
    case.policy.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.update(["mlp"]))
    ids = torch.arange(20).view(2, 10)
    case.policy.train()
    with torch.no_grad():
        case.scorer(1.0).score(ids, torch.ones_like(ids))
    case.policy.eval()
    case.scorer(1.0).score(ids, torch.ones_like(ids)).sum().backward()
    assert runs["mlp"] == 2


def test_layers_that_cannot_be_checkpointed_are_refused_by_name():
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.attention, self.mlp = inner.self_attn, inner.mlp

    policy = load_model(tiny_config("qwen3"), dtype=FP32, seed=0)
    policy.model.layers[1] = Wrapped(policy.model.layers[1])
    with pytest.raises(NotImplementedError, match="Qwen3ForCausalLM: 1 of 2 layers"):
        recompute_layers_(policy)
