"""The low-bit output head: one product for the engine's logits and the learner's log-probs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lqrl.algorithms import chunked_logprobs
from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.modeling.head import output_head
from lqrl.quant import QuantScheme, export_weights, prepare_
from lqrl.quant.linear import AlignedLinear, QuantizedLinear
from lqrl.testing.models import tiny_config
from lqrl.types import Prompt, SamplingParams

SCHEME = QuantScheme.preset("int8_w8a8+lm_head")
DTYPES = [torch.float32, torch.bfloat16]
TIED, UNTIED = "qwen3", "llama"


def learner(family: str, dtype: torch.dtype, device: torch.device):
    policy = load_model(tiny_config(family), dtype=torch.float32, seed=0, device=device)
    prepare_(policy, SCHEME, export_dtype=dtype)
    return policy


def engine(policy, dtype: torch.dtype, device: torch.device) -> TorchEngine:
    built = TorchEngineFactory()(EngineSpec(policy.config, SCHEME, dtype, device, 64, ()))
    built.update_weights(export_weights(policy, SCHEME, export_dtype=dtype), policy_version=0)
    return built


@pytest.mark.parametrize("family", [TIED, UNTIED])
def test_the_head_is_a_target_only_when_the_scheme_says_so(family):
    policy = learner(family, torch.float32, torch.device("cpu"))
    assert isinstance(policy.get_output_embeddings(), AlignedLinear)
    assert policy.get_output_embeddings().weight is policy.get_submodule("lm_head").weight
    assert (policy.get_input_embeddings().weight is policy.get_output_embeddings().weight) == (family == TIED)
    plain = load_model(tiny_config(family), dtype=torch.float32, seed=0)
    prepare_(plain, QuantScheme.preset("int8_w8a8"), export_dtype=torch.float32)
    assert output_head(plain).product is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [TIED, UNTIED])
def test_engine_and_learner_give_equal_logits_of_equal_hidden_states(family, dtype, device):
    policy = learner(family, dtype, device)
    built = engine(policy, dtype, device)
    assert isinstance(built.decoder.model.get_output_embeddings(), QuantizedLinear)
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    head = output_head(policy)
    assert head.product is not None
    logits = built.decoder.logits(hidden)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, head.product(hidden))
    # A row's logits do not depend on its company.
    assert torch.equal(logits[3:4], built.decoder.logits(hidden[3:4]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [TIED, UNTIED])
def test_rollout_logprobs_are_the_learners(family, dtype, device):
    policy = learner(family, dtype, device)
    completions = engine(policy, dtype, device).generate(
        [Prompt(0, (5, 6, 7))], SamplingParams(n=4, max_tokens=8), seed=0
    )[0]
    ids = torch.tensor([[5, 6, 7, *c.token_ids.tolist()] for c in completions], device=device)
    with torch.no_grad():
        logprobs = Scorer(policy, 1.0, dtype).score(ids, torch.ones_like(ids, dtype=torch.bool))[:, 3:].cpu()
    rollout = torch.stack([c.logprobs for c in completions]).cpu()
    limit = 2e-2 if dtype == torch.float32 else 0.3  # a flipped code, a rounded bf16 value
    assert float((logprobs - rollout).abs().max()) < limit


def test_logprobs_are_those_of_the_codes_and_gradients_those_of_the_weight(device):
    policy = learner(UNTIED, torch.float32, device)
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    targets, head = torch.arange(6, device=device), output_head(policy)
    assert head.product is not None
    logprobs = chunked_logprobs(hidden, head.weight, targets, temperature=0.7, chunk_size=4, product=head.product)
    logits = head.product(hidden.detach()) / 0.7
    assert torch.equal(logprobs, logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1))
    logprobs.sum().backward()
    # Straight through: d/dlogits = (onehot - softmax(low-bit logits)) / temperature, then the plain product's.
    d_logits = (nn.functional.one_hot(targets, logits.shape[1]) - logits.softmax(1)) / 0.7
    weight = head.weight.detach()
    torch.testing.assert_close(hidden.grad, d_logits @ weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.weight.grad, d_logits.T @ hidden.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_weight_gets_the_gradients_of_both_its_uses(dtype, device):
    policy = learner(TIED, dtype, device)
    ids = torch.tensor([[5, 6, 7, 8, 9]], device=device)
    Scorer(policy, 1.0, dtype).score(ids, torch.ones_like(ids, dtype=torch.bool)).sum().backward()
    grad = policy.get_input_embeddings().weight.grad
    assert grad is not None
    assert grad.dtype == torch.float32
    assert bool((grad.abs().sum(1) > 0).all())  # every row of the head has a part in the log-partition


def test_tied_weights_are_shipped_for_the_embedding_and_as_codes_for_the_head():
    policy = learner(TIED, torch.float32, torch.device("cpu"))
    names = [name for name, _ in export_weights(policy, SCHEME, export_dtype=torch.float32)]
    assert {"model.embed_tokens.weight", "lm_head.weight", "lm_head.weight_scale"} <= set(names)
    full = [name for name, _ in export_weights(policy, QuantScheme.preset("none"), export_dtype=torch.float32)]
    assert "lm_head.weight" not in full


def test_unknown_additions_and_missing_heads_are_named():
    with pytest.raises(ValueError, match="unknown addition 'head' to scheme 'int8_w8a8'; use one of lm_head"):
        QuantScheme.preset("int8_w8a8+head")
    with pytest.raises(ValueError, match="no effect"):
        QuantScheme.preset("none+lm_head")
    with pytest.raises(ValueError, match="output head, Sequential has no linear one"):
        prepare_(nn.Sequential(nn.Linear(4, 4)), SCHEME, export_dtype=torch.float32)
