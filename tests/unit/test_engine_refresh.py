"""A refresh is a transaction: complete and counted, or the engine refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from engine_models import SIZES
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import GemmaConfig, PreTrainedModel, Qwen2Config

from lqrl.engines.base import EngineSpec, RefreshError, StaleEngineError
from lqrl.engines.digest import digest, tensor_digest
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.engines.transaction import HeldTensors, all_tensors
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.stream import StableTensors
from lqrl.types import Prompt, SamplingParams

CPU = torch.device("cpu")
CONFIG = Qwen2Config(**SIZES)
NONE, INT8 = QuantScheme.preset("none"), QuantScheme.preset("int8_w8a8")
SCHEMES = pytest.mark.parametrize("scheme", [NONE, INT8], ids=lambda s: s.name)
PROMPT, PARAMS = Prompt(1, (1, 2, 3)), SamplingParams(n=2, max_tokens=6)
Stream = list[tuple[str, Tensor]]


def policy(seed: int = 0) -> PreTrainedModel:
    return load_model(CONFIG, dtype=torch.float32, seed=seed)


def stream(seed: int = 0, scheme: QuantScheme = INT8) -> Stream:
    return list(export_weights(policy(seed), scheme, export_dtype=torch.float32))


def empty_engine(scheme: QuantScheme = INT8, device: torch.device = CPU) -> TorchEngine:
    return TorchEngineFactory()(EngineSpec(CONFIG, scheme, torch.float32, device, 64, ()))


@SCHEMES
def test_every_element_is_written_once(scheme: QuantScheme) -> None:
    weights = stream(0, scheme)
    report = empty_engine(scheme).update_weights(weights, policy_version=3)
    assert report.policy_version == 3
    assert report.tensors == len(weights)
    assert report.elements == sum(t.numel() for _, t in weights)
    assert report.seconds > 0


@SCHEMES
def test_storage_does_not_move(scheme: QuantScheme, device: torch.device) -> None:
    engine = empty_engine(scheme, device)
    held = HeldTensors(engine.decoder.model)
    engine.update_weights(stream(0, scheme), policy_version=0)
    engine.update_weights(stream(1, scheme), policy_version=1)
    assert not held.moved()


@SCHEMES
def test_digests_follow_the_weights_there_and_back(scheme: QuantScheme, device: torch.device) -> None:
    engine = empty_engine(scheme, device)
    a, b = stream(0, scheme), stream(1, scheme)
    first, again, other, back = (engine.update_weights(w, policy_version=i) for i, w in enumerate((a, a, b, a)))
    assert first.digest == again.digest == back.digest != other.digest
    assert again.elements_changed_fraction == again.codes_changed_fraction == 0
    # biases of zero and norms of one are equal in both policies
    assert 0.5 < other.elements_changed_fraction < 1
    assert (other.codes_changed_fraction > 0.9) == scheme.quantizes
    other_engine = empty_engine(scheme, device)
    assert other_engine.update_weights(b, policy_version=0).digest == other.digest


@SCHEMES
def test_a_refreshed_engine_samples_like_a_new_one(scheme: QuantScheme) -> None:
    engine, fresh = empty_engine(scheme), empty_engine(scheme)
    engine.update_weights(stream(0, scheme), policy_version=0)
    before = engine.generate([PROMPT], PARAMS, seed=0)[0]
    engine.update_weights(stream(1, scheme), policy_version=1)
    fresh.update_weights(stream(1, scheme), policy_version=1)
    a, b = (e.generate([PROMPT], PARAMS, seed=0)[0] for e in (engine, fresh))
    for x, y, old in zip(a, b, before, strict=True):
        assert torch.equal(x.token_ids, y.token_ids)
        assert torch.equal(x.logprobs, y.logprobs)
        assert not torch.equal(x.logprobs, old.logprobs)
        assert x.policy_version == 1


def test_changed_fractions_by_hand() -> None:
    engine = empty_engine()
    engine.update_weights(stream(), policy_version=0)
    weights = dict(stream())
    codes = sum(t.numel() for t in weights.values() if t.dtype == torch.int8)
    rest = sum(t.numel() for t in weights.values() if t.dtype != torch.int8)
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] ^= 1
    weights["model.norm.weight"][:2] += 1
    report = engine.update_weights(weights.items(), policy_version=1)
    assert report.codes_changed_fraction == pytest.approx(1 / codes)
    assert report.elements_changed_fraction == pytest.approx(2 / rest)


def test_tied_weights_come_once() -> None:
    config = GemmaConfig(**SIZES, head_dim=8, tie_word_embeddings=True)
    engine = TorchEngineFactory()(EngineSpec(config, NONE, torch.bfloat16, torch.device("cpu"), 64, ()))
    weights = list(export_weights(load_model(config, dtype=torch.float32, seed=0), NONE, export_dtype=torch.bfloat16))
    engine.update_weights(weights, policy_version=0)
    # the head's fp32 copy follows the embedding
    assert torch.equal(engine.decoder.head, dict(weights)["model.embed_tokens.weight"].float())
    with pytest.raises(RefreshError, match=r"lm_head.weight is tied to model.embed_tokens.weight"):
        engine.update_weights([*weights, ("lm_head.weight", weights[0][1])], policy_version=1)


def with_value(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Stream], Stream]:
    return lambda weights: [(n, change(t.clone()) if n == name else t) for n, t in weights]


def broken(weights: Stream) -> Iterator[tuple[str, Tensor]]:
    yield from weights[:4]
    raise ConnectionError("the learner has gone")


NORM, CODES = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
FAULTS = {
    "missing": (lambda w: w[:-1], r"of \d+ elements were written; missing: lm_head.weight"),
    "empty": (lambda w: [], r"0 of \d+ elements"),
    "unknown": (lambda w: [*w, ("model.extra", torch.zeros(1))], "no tensor named model.extra"),
    "doubled": (lambda w: [*w, w[0]], "model.embed_tokens.weight came twice"),
    "shape": (with_value(NORM, lambda t: t[:-1]), r"model.norm.weight has shape \(31,\), the engine's is \(32,\)"),
    "dtype": (with_value(NORM, lambda t: t.bfloat16()), "model.norm.weight is torch.bfloat16"),
    "float codes": (
        with_value(CODES, lambda t: t.float()),
        "q_proj.weight is torch.float32, the engine's is torch.int8",
    ),
    "nan": (with_value(NORM, lambda t: t.index_fill_(0, torch.tensor([5]), torch.nan)), "model.norm.weight holds NaN"),
    "inf": (
        with_value(NORM, lambda t: t.index_fill_(0, torch.tensor([5]), torch.inf)),
        "model.norm.weight holds NaN or inf",
    ),
    "stream": (broken, "stream of weights failed after 4 tensors: the learner has gone"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_refresh_makes_the_engine_refuse_until_a_good_one(fault: str) -> None:
    change, message = FAULTS[fault]
    engine, good = empty_engine(), stream()
    digest_before = engine.update_weights(good, policy_version=0).digest
    with pytest.raises(RefreshError, match=message):
        engine.update_weights(change(good), policy_version=1)
    assert engine.policy_version == -1
    with pytest.raises(StaleEngineError, match="its last refresh failed"):
        engine.generate([PROMPT], PARAMS, seed=0)
    assert engine.update_weights(good, policy_version=2).digest == digest_before
    assert engine.policy_version == 2
    assert len(engine.generate([PROMPT], PARAMS, seed=0)[0]) == 2


def test_the_version_is_unset_while_weights_are_written() -> None:
    engine, seen = empty_engine(), []
    engine.update_weights(stream(), policy_version=4)

    def watched() -> Iterator[tuple[str, Tensor]]:
        for item in stream():
            seen.append(engine.policy_version)
            yield item

    engine.update_weights(watched(), policy_version=5)
    assert set(seen) == {-1}
    assert engine.policy_version == 5


def as_parameter(tensor: Tensor) -> Tensor:
    return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())


class Renamed(Tensor):
    """A subclass with the memory of a plain tensor."""


PLAIN = {
    "transposed": lambda t: t.t().contiguous().t(),
    "broadcast": lambda t: t[:1].expand_as(t) if bool((t == t[:1]).all()) else t,
    "parameter": as_parameter,
    "subclass": lambda t: t.as_subclass(Renamed),
    "negative view": lambda t: torch._neg_view(-t) if t.is_floating_point() else t,
}


@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("stable", [False, True], ids=["singly", "together"])
def test_other_forms_of_a_plain_tensor_are_read(form: str, stable: bool, device: torch.device) -> None:
    engine, weights = empty_engine(device=device), stream()
    changed = [(n, PLAIN[form](t.to(device)) if t.dim() == 2 or form != "transposed" else t) for n, t in weights]
    sent = StableTensors(changed) if stable else changed
    report = engine.update_weights(sent, policy_version=0)
    assert report.digest == empty_engine(device=device).update_weights(weights, policy_version=0).digest


def test_a_distributed_tensor_is_named() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = [(n, distribute_tensor(t, mesh) if n == NORM else t) for n, t in stream()]
        for sent in (parts, StableTensors(parts)):
            with pytest.raises(RefreshError, match=r"model\.norm\.weight is a DTensor, .*full_tensor\(\)"):
                empty_engine().update_weights(sent, policy_version=0)
    finally:
        torch.distributed.destroy_process_group()


def test_an_interrupted_refresh_leaves_a_refusing_engine() -> None:
    engine = empty_engine()

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield from stream()[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.update_weights(interrupted(), policy_version=0)
    with pytest.raises(StaleEngineError, match="did not complete"):
        engine.generate([PROMPT], PARAMS, seed=0)


def test_a_negative_version_is_refused() -> None:
    with pytest.raises(RefreshError, match="policy_version must be >= 0, got -1"):
        empty_engine().update_weights(stream(), policy_version=-1)


def test_weights_that_give_nan_are_an_error_and_do_not_poison_the_cache() -> None:
    engine = empty_engine(NONE)
    huge = with_value("model.layers.0.self_attn.v_proj.weight", lambda t: t.fill_(3e38))
    engine.update_weights(huge(stream(0, NONE)), policy_version=0)
    with pytest.raises(RuntimeError, match=r"not finite for prompt id 1 .* policy version 0"):
        engine.generate([PROMPT], PARAMS, seed=0)
    engine.update_weights(stream(0, NONE), policy_version=1)
    assert all(c.logprobs.isfinite().all() for c in engine.generate([PROMPT], PARAMS, seed=0)[0])


def test_the_digest_covers_the_models_own_buffers() -> None:
    engine = empty_engine()
    names = [name for name, _ in all_tensors(engine.decoder.model)]
    assert any(name.endswith("inv_freq") for name in names)
    first = engine.update_weights(stream(), policy_version=0).digest
    engine.decoder.model.model.rotary_emb.inv_freq[1] *= 2
    assert engine.update_weights(stream(), policy_version=1).digest != first


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int64]), st.integers(1, 40), st.data())
def test_digests_see_every_word_and_its_place(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = torch.arange(1, size + 1).to(dtype)
    changed = tensor.clone()
    changed[data.draw(st.integers(0, size - 1))] = 0
    shifted = torch.cat([tensor[:1], tensor])[1:]  # a view whose address suits no wide word
    assert tensor_digest(tensor) == tensor_digest(tensor.clone()) == tensor_digest(shifted)
    assert tensor_digest(tensor) != tensor_digest(changed)
    if size > 1:
        assert tensor_digest(tensor) != tensor_digest(tensor.flip(0))


def test_digests_see_the_order_of_large_blocks() -> None:
    x, y = torch.randn(2, 2**16, generator=torch.Generator().manual_seed(0))
    orders = [[x, y, y, x], [y, x, x, y], [x, x, y, y], [x, y, x, y]]  # sums of places 1, 3, 5, 7 would be equal
    assert len({int(tensor_digest(torch.cat(order))) for order in orders}) == 4


def test_digests_see_swapped_rows_and_flipped_signs_in_large_tensors() -> None:
    tensor = torch.randn(1030, 600, generator=torch.Generator().manual_seed(0))  # more than one chunk of words
    swapped = tensor.clone()
    swapped[[3, 1000]] = swapped[[1000, 3]]
    flipped = tensor.clone()
    flipped[0, 1] *= -1  # the top bits of two words
    flipped[7, 3] *= -1
    assert len({digest([("w", t)]) for t in (tensor, swapped, flipped)}) == 3
    assert digest([("a", tensor), ("b", swapped)]) == digest([("b", swapped), ("a", tensor)])
    assert digest([("a", tensor), ("b", swapped)]) != digest([("b", tensor), ("a", swapped)])


def test_a_tensor_that_was_replaced_or_moved_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    held = HeldTensors(model)
    with torch.no_grad():
        model[0].weight.fill_(1)
    assert not held.moved()
    model[1].running_mean = model[1].running_mean.clone()
    model[0].bias.data = model[0].bias.data.clone()
    assert sorted(held.moved()) == ["0.bias", "1.running_mean"]
    del model[0].weight
    assert "0.weight" in held.moved()
