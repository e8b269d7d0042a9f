"""A refresh of a subset: what is not sent is declared with a digest, and the engine checks it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_models import PREFIX, built, engine, exported, perturb_
from torch import Tensor, nn

from lqrl.engines.base import RefreshError
from lqrl.engines.digest import tensor_digest
from lqrl.quant import Lora, QuantizedLinear, QuantScheme, export_weights
from lqrl.quant.methods import linear_method
from lqrl.quant.scheme import PRESETS
from lqrl.types import Prompt, SamplingParams

pytest.importorskip("peft")


def split(weights: list[tuple[str, Tensor]]) -> tuple[list[tuple[str, Tensor]], dict[str, int]]:
    """What an adapter refresh sends (adapters and vectors), and the digests of the rest."""
    sent = [(n, t) for n, t in weights if ".lora_" in n or t.dim() < 2]
    return sent, {n: int(tensor_digest(t)) for n, t in weights if ".lora_" not in n and t.dim() >= 2}


def test_a_refresh_of_adapters_equals_a_complete_one():
    lora = Lora(r=4)
    model, rollout = built("nvfp4_w4a16", lora, torch.bfloat16)
    other = engine(model, "nvfp4_w4a16", lora, torch.bfloat16)
    perturb_(model, 0.1)
    weights = exported(model, "nvfp4_w4a16", lora, torch.bfloat16)
    sent, frozen = split(weights)
    report = rollout.update_weights(sent, policy_version=1, frozen=frozen)
    complete = other.update_weights(weights, policy_version=1)
    assert report.digest == complete.digest
    assert report.elements + report.frozen_elements == complete.elements
    assert report.elements == sum(t.numel() for _, t in sent) < 0.2 * complete.elements
    assert report.codes_changed_fraction == 0.0
    assert report.elements_changed_fraction > 0.0
    assert complete.frozen_elements == 0
    skipped = export_weights(
        model, QuantScheme.preset("nvfp4_w4a16"), export_dtype=torch.bfloat16, adapters=True, skip=frozen
    )
    assert [n for n, _ in skipped] == [n for n, _ in sent]


def refused(change) -> str:
    lora = Lora(r=4)
    model, rollout = built("int8_w8a8", lora, torch.float32)
    weights = exported(model, "int8_w8a8", lora, torch.float32)
    sent, frozen = split(weights)
    sent, frozen = change(sent, frozen)
    with pytest.raises(RefreshError) as error:
        rollout.update_weights(sent, policy_version=1, frozen=frozen)
    assert rollout.policy_version == -1
    with pytest.raises(RuntimeError, match="refuses to generate"):
        rollout.generate([Prompt(0, (5,))], SamplingParams(max_tokens=1), seed=0)
    assert rollout.update_weights(weights, policy_version=2).frozen_elements == 0
    return str(error.value)


CODES = f"{PREFIX}.weight"


def test_a_wrong_digest_of_a_frozen_tensor_is_refused():
    message = refused(lambda sent, frozen: (sent, frozen | {CODES: frozen[CODES] ^ 1}))
    assert message.startswith(f"{CODES} was declared frozen with digest")


def test_a_tensor_that_is_neither_sent_nor_declared_is_refused():
    def drop(sent, frozen):
        frozen.pop(CODES)
        return sent, frozen

    assert f"missing: {CODES}" in refused(drop)


def test_a_tensor_that_is_sent_and_declared_is_refused():
    norm = "model.norm.weight"
    message = refused(lambda sent, frozen: (sent, frozen | {norm: int(tensor_digest(dict(sent)[norm]))}))
    assert "model.norm.weight came although it is declared frozen" in message


def test_a_declared_tensor_that_the_engine_does_not_have_is_refused():
    assert "no tensor named nothing" in refused(lambda sent, frozen: (sent, frozen | {"nothing": 1}))


@settings(max_examples=15)
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_held_code_is_seen(at, bit):
    layer = QuantizedLinear(nn.Linear(64, 48), linear_method(PRESETS["nvfp4_w4a16"]))
    codes = layer.get_buffer("weight_packed")
    before = int(tensor_digest(codes))
    codes.view(-1)[at % codes.numel()] ^= 1 << bit
    assert int(tensor_digest(codes)) != before
