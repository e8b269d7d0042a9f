"""An aligned learner with vLLM's rounding: its parts have the bits of vLLM's, and its log-probs are nearer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from vllm_models import DEVICE, config_of, policy_of, refreshed

from lqrl.learner.scorer import Scorer
from lqrl.modeling.arithmetic import rms_norm, use_arithmetic_
from lqrl.modeling.backbone import load_model
from lqrl.modeling.head import output_head
from lqrl.quant import QuantScheme, prepare_
from lqrl.types import Prompt, SamplingParams

pytestmark = pytest.mark.vllm

BF16 = torch.bfloat16
NEARLY = 0.9995 if DEVICE.type == "cuda" else 1.0
"""Equal bits; a GPU adds squares in another order, which now and then moves a value over a rounding boundary."""


def module_of(engine: Any, path: str) -> tuple[Any, Any]:
    """A module of vLLM's model, and the config that it runs under."""
    (model,) = engine._llm.collective_rpc(lambda worker: worker.get_model())
    return model.get_submodule(path), engine._llm.llm_engine.vllm_config


def run(engine: Any, path: str, *given: Tensor) -> Any:
    from vllm.config import set_current_vllm_config

    module, config = module_of(engine, path)
    with set_current_vllm_config(config):
        return module(*(x.clone() for x in given))


def equal(a: Tensor, b: Tensor) -> float:
    return float((a == b).double().mean())


@pytest.fixture
def learner() -> Any:
    """In bf16, with the engine's rounding but for logits."""
    policy = load_model(config_of("qwen3"), dtype=BF16, device=DEVICE)
    policy.load_state_dict(policy_of("qwen3").state_dict())
    use_arithmetic_(policy, refreshed("qwen3", dtype=BF16).arithmetic)
    return policy


@torch.no_grad()
@pytest.mark.parametrize("path", ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm"])
def test_a_norm_has_vllms_bits(path: str, learner: Any) -> None:
    engine, width = refreshed("qwen3", dtype=BF16), 64 if path.endswith("q_norm") else 256
    ours, theirs = learner.model.layers[1].get_submodule(path), module_of(engine, f"model.layers.1.{path}")[0]
    weight = (1 + 0.3 * torch.randn(width, device=DEVICE)).to(BF16)
    for norm in (ours, theirs):
        norm.weight.copy_(weight)
    x, residual = (scale * torch.randn(200, width, device=DEVICE).to(BF16) for scale in (1, 3))
    assert equal(ours(x), run(engine, f"model.layers.1.{path}", x)) >= NEARLY
    if width == 256:
        out, stream = run(engine, f"model.layers.1.{path}", x, residual)
        total = residual.float() + x
        assert torch.equal(stream, total.to(BF16))
        read = stream if engine.arithmetic.rounds_sums else total
        assert equal(ours(read), out) >= NEARLY
        own, _ = rms_norm(stream, weight, 1e-6, rounds_normed=True)
        assert equal(own, out) < 0.9


@torch.no_grad()
def test_a_norm_that_rounds_once_has_the_bits_of_vllms_kernel() -> None:
    """The CPU build has the kernel that the CUDA build runs, and runs another."""
    x, weight = torch.randn(200, 256, device=DEVICE).to(BF16), (1 + torch.randn(256, device=DEVICE)).to(BF16)
    refreshed("qwen3", dtype=BF16)  # loads the kernels
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-6)
    assert equal(rms_norm(x, weight, 1e-6, rounds_normed=False)[0], out) >= NEARLY
    assert equal(rms_norm(x, weight, 1e-6, rounds_normed=True)[0], out) < 0.9


@torch.no_grad()
def test_a_rotary_embedding_has_vllms_bits(learner: Any) -> None:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    positions = torch.arange(100, device=DEVICE)
    q, k = (torch.randn(100, heads * 64, device=DEVICE).to(BF16) for heads in (4, 2))
    theirs = run(refreshed("qwen3", dtype=BF16), "model.layers.0.self_attn.rotary_emb", positions, q, k)
    q, k = (x.view(100, -1, 64).transpose(0, 1)[None] for x in (q, k))
    wide = learner.model.rotary_emb
    for rotary, least, most in ((wide, 1, 1), (wide.rotary, 0.5, 0.95)):
        turned = apply_rotary_pos_emb(q, k, *rotary(q, positions[None]))
        for a, b in zip(turned, theirs, strict=True):
            assert least <= equal(a[0].transpose(0, 1).flatten(1).to(BF16), b) <= most


@torch.no_grad()
def test_rounded_logits_have_vllms_bits(learner: Any) -> None:
    engine = refreshed("qwen3", dtype=BF16)
    (model,) = engine._llm.collective_rpc(lambda worker: worker.get_model())
    hidden = torch.randn(50, 256, device=DEVICE).to(BF16)
    head = output_head(learner, rounds_logits=True)
    assert head.product is not None
    assert equal(head.product(hidden), model.compute_logits(hidden).float()) > 0.999  # sums of another order


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("preset", ["none", "int8_w8a8"])
def test_log_probs_are_no_farther_from_vllms(family: str, preset: str) -> None:
    """What is left on the CPU is attention; logits in fp32, whose rounding would be most of a gap this small."""
    engine, scheme = refreshed(family, preset, BF16, spread=0.05, fp32_head=True), QuantScheme.preset(preset)
    prompts = [Prompt(i, tuple(4 + (7 * i + j) % 60 for j in range(5 + i))) for i in range(8)]
    groups = engine.generate(prompts, SamplingParams(n=4, max_tokens=24, ignore_eos=True), seed=3)
    k3 = []
    for follows in (False, True):
        policy = copy.deepcopy(policy_of(family, spread=0.05)).to(DEVICE)  # type: ignore[arg-type]
        if scheme.quantizes:
            prepare_(policy, scheme, export_dtype=BF16)
        scorer = Scorer(policy, 1.0, BF16)
        if follows:
            scorer.follow_(engine.arithmetic)
        gaps = []
        for prompt, group in zip(prompts, groups, strict=True):
            ids = torch.tensor([[*prompt.input_ids, *c.token_ids.tolist()] for c in group], device=DEVICE)
            scores = scorer.score(ids, torch.ones_like(ids, dtype=torch.bool))[:, len(prompt.input_ids) :]
            gaps.append((scores.cpu() - torch.stack([c.logprobs for c in group])).flatten().double())
        gap = torch.cat(gaps)
        k3.append(float((torch.expm1(gap) - gap).mean()))
    # Measured with the CPU build 0.32: none 2.1e-5 to 1.6e-5 (llama), int8 1.8e-4 to 1.7e-4, 2.2e-4 to 1.8e-4 (qwen3).
    assert k3[1] < (0.9 if preset == "none" else 1.02) * k3[0]
