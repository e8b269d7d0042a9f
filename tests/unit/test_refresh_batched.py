"""A refresh whose layers are quantized, checked and written together is the refresh that takes them one by one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from engine_models import SIZES
from interpreter import needs_triton
from torch import Tensor, nn
from transformers import GemmaConfig, Qwen2Config

from lqrl.engines import transaction
from lqrl.engines.base import EngineSpec, RefreshError, StaleEngineError
from lqrl.engines.digest import digest
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.engines.transaction import all_tensors, loadable_tensors, write_weights_
from lqrl.learner.noise import RolloutNoise
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.quant import triton_use
from lqrl.quant.export import export_weights
from lqrl.quant.finite_checks import FiniteChecks
from lqrl.quant.linear import AlignedLinear, quantize_layers
from lqrl.quant.methods import linear_method
from lqrl.quant.prepare import prepare_
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.stream import StableTensors
from lqrl.types import Prompt, SamplingParams

CONFIG = Qwen2Config(**{**SIZES, "num_hidden_layers": 1})
DTYPE = torch.bfloat16
INT8, FP8 = QuantScheme.preset("int8_w8a8"), QuantScheme.preset("fp8_per_channel")
TENSOR = QuantScheme.preset("fp8_per_tensor")
ROWWISE = pytest.mark.parametrize("scheme", [INT8, FP8], ids=lambda s: s.name)
Stream = list[tuple[str, Tensor]]


def learner(scheme: QuantScheme, device: torch.device, seed: int = 0) -> nn.Module:
    model = load_model(CONFIG, dtype=torch.float32, seed=seed)
    nn.Module.to(model, device)
    prepare_(model, scheme, export_dtype=DTYPE)
    return model


def aligned_layers(model: nn.Module) -> list[AlignedLinear]:
    return [module for module in model.modules() if isinstance(module, AlignedLinear)]


def exported(scheme: QuantScheme, device: torch.device, seed: int = 0) -> Stream:
    model = learner(scheme, device, seed)
    return [(name, tensor.clone()) for name, tensor in export_weights(model, scheme, export_dtype=DTYPE)]


def new_engine(scheme: QuantScheme, device: torch.device) -> TorchEngine:
    return TorchEngineFactory()(EngineSpec(CONFIG, scheme, DTYPE, device, 64, ()))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


# ------------------------------------------------------------------ the engine's side


@pytest.mark.parametrize("limit", [2**30, 5000, 1], ids=["one batch", "some", "each alone"])
@ROWWISE
def test_batches_write_what_single_copies_write(scheme, limit, device, monkeypatch):
    monkeypatch.setattr(transaction, "_BATCH_BYTES", limit)
    together, single = (new_engine(scheme, device).decoder.model for _ in range(2))
    for model in (together, single):  # whose memory held anything
        write_weights_(model, exported(scheme, device, 2))
    for seed in (0, 1, 1):
        weights = exported(scheme, device, seed)
        assert write_weights_(together, StableTensors(weights)) == write_weights_(single, weights)
        held, wanted = (loadable_tensors(model)[0] for model in (together, single))
        assert all(torch.equal(bits(held[name]), bits(wanted[name])) for name in wanted)


@ROWWISE
def test_a_refresh_from_a_prepared_learner_has_the_digest_of_its_tensors_sent_singly(scheme, device):
    model, engine, other = learner(scheme, device), new_engine(scheme, device), new_engine(scheme, device)
    for version in range(2):
        stream = export_weights(model, scheme, export_dtype=DTYPE)
        assert isinstance(stream, StableTensors)
        batched = engine.update_weights(stream, policy_version=version)
        fresh = learner(scheme, device)
        fresh.load_state_dict(model.state_dict())
        singly = other.update_weights(
            iter(list(export_weights(fresh, scheme, export_dtype=DTYPE))), policy_version=version
        )
        assert batched.digest == singly.digest
        if version > 0:  # before, their memory held anything
            assert 0 < batched.elements_changed_fraction == singly.elements_changed_fraction
            assert 0 < batched.codes_changed_fraction == singly.codes_changed_fraction
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
    a, b = (e.generate([Prompt(1, (1, 2, 3))], SamplingParams(n=2, max_tokens=4), seed=0)[0] for e in (engine, other))
    assert all(torch.equal(x.logprobs, y.logprobs) for x, y in zip(a, b, strict=True))


def replaced(at: int, change: Callable[[Tensor], Tensor]) -> Callable[[Stream], Stream]:
    return lambda w: [(n, change(t.clone()) if i == at else t) for i, (n, t) in enumerate(w)]


HOST_FAULTS: dict[str, tuple[Callable[[Stream], Stream], str]] = {
    "missing": (lambda w: w[:3] + w[4:], r"of \d+ elements were written; missing: {name}$"),
    "empty": (lambda w: [], r"0 of \d+ elements"),
    "doubled": (lambda w: [*w, w[3]], "{name} came twice"),
    "unknown": (lambda w: [*w, ("model.extra", torch.zeros(1))], "no tensor named model.extra"),
    "shape": (replaced(3, lambda t: t[:1]), r"{name} has shape \(1,.*\), the engine's is \("),
    "dtype": (replaced(3, lambda t: t.double()), r"{name} is torch\.float64, the engine's is"),
    "meta": (replaced(3, lambda t: t.to("meta")), "{name} is on the meta device"),
}


@pytest.mark.parametrize("fault", HOST_FAULTS)
def test_a_fault_that_the_host_sees_is_raised_before_a_batch_is_written(fault, device):
    change, message = HOST_FAULTS[fault]
    engine, good, other = new_engine(INT8, device), exported(INT8, device), exported(INT8, device, 1)
    before = engine.update_weights(StableTensors(good), policy_version=0).digest
    with pytest.raises(RefreshError, match=message.replace("{name}", re.escape(good[3][0]))):
        engine.update_weights(StableTensors(change(other)), policy_version=1)
    assert digest(all_tensors(engine.decoder.model)) == before
    with pytest.raises(StaleEngineError, match="its last refresh failed"):
        engine.generate([Prompt(1, (1, 2))], SamplingParams(max_tokens=2), seed=0)
    assert engine.update_weights(StableTensors(good), policy_version=2).digest == before


def test_a_number_in_a_batch_that_is_not_finite_is_named_wherever_it_is(device):
    engine, good, other = new_engine(FP8, device), exported(FP8, device), exported(FP8, device, 1)
    before = engine.update_weights(StableTensors(good), policy_version=0).digest
    for at, (name, tensor) in enumerate(other):
        for value in (torch.nan, torch.inf) if tensor.dtype != torch.float8_e4m3fn else (torch.nan,):
            broken = tensor.clone()
            broken.view(-1)[-1:] = torch.tensor([value]).to(tensor.dtype)
            faulty = [*other[:at], (name, broken), *other[at + 1 :]]
            with pytest.raises(RefreshError, match=f"{re.escape(name)} holds NaN or inf"):
                engine.update_weights(StableTensors(faulty), policy_version=1)
            assert engine.policy_version == -1
    assert engine.update_weights(StableTensors(good), policy_version=2).digest == before


def test_a_stream_that_fails_in_a_batch_leaves_a_refusing_engine():
    engine, good = new_engine(INT8, torch.device("cpu")), exported(INT8, torch.device("cpu"))

    def failing():
        yield from good[:4]
        raise ConnectionError("the sender is gone")

    with pytest.raises(RefreshError, match="failed after 4 tensors: the sender is gone"):
        engine.update_weights(StableTensors(failing()), policy_version=0)
    assert engine.policy_version == -1


def test_a_stage_drops_the_promise():
    weights = export_weights(learner(INT8, torch.device("cpu")), INT8, export_dtype=DTYPE)
    assert isinstance(weights, StableTensors)
    assert not isinstance(RolloutNoise(10)(weights, policy_version=1), StableTensors)


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_found_as_torch_finds_them(tied):
    model = load_model(GemmaConfig(**SIZES, head_dim=8, tie_word_embeddings=tied), dtype=torch.float32, seed=0)
    named = dict(all_tensors(model))
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {n: id(t) for n, t in named.items()} == {n: id(t) for n, t in wanted.items()}
    targets, aliases = loadable_tensors(model)
    state = model.state_dict(keep_vars=True)
    assert [*targets, *aliases] == [n for n in state if n not in aliases] + [*aliases]
    assert all(targets[n].data_ptr() == state[n].data_ptr() for n in targets)
    assert aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


# ------------------------------------------------------------------ the learner's side


def layers(scheme: QuantScheme, device: torch.device, dtype: torch.dtype) -> list[AlignedLinear]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for n, k in ((24, 32), (40, 48), (16, 32), (8, 32), (1, 48)):
        linear = nn.Linear(k, n, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(n, k, generator=generator))
        made.append(AlignedLinear(linear.to(device, dtype), linear_method(scheme), DTYPE))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
@pytest.mark.parametrize("scheme", [INT8, FP8, TENSOR, QuantScheme.preset("int4_w4a16_g32")], ids=lambda s: s.name)
def test_layers_quantized_together_hold_the_codes_of_each_alone(scheme, dtype, device):
    scheme_layers, alone = ([m for m in layers(scheme, device, dtype) if m.in_features % 32 == 0] for _ in range(2))
    quantize_layers(scheme_layers)
    for layer, other in zip(scheme_layers, alone, strict=True):
        wanted = other.method.quantize(other.weight.detach().to(DTYPE))
        got = layer.quantized_weight()
        assert {n: (t.shape, t.dtype) for n, t in got.items()} == {n: (t.shape, t.dtype) for n, t in wanted.items()}
        assert all(torch.equal(bits(got[n]), bits(wanted[n])) for n in wanted)
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1)).to(device, DTYPE)
        assert torch.equal(layer(x), other(x))


@ROWWISE
def test_only_stale_codes_are_made_anew(scheme, device):
    made = layers(scheme, device, torch.float32)
    quantize_layers(made)
    before = [layer.quantized_weight()["weight"] for layer in made]
    copies = [t.clone() for t in before]
    with torch.no_grad():
        made[2].weight.neg_()
    quantize_layers(made)
    after = [layer.quantized_weight()["weight"] for layer in made]
    assert [a is b for a, b in zip(after, before, strict=True)] == [True, True, False, True, True]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, copies, strict=True)), "held by the last export"
    assert torch.equal(after[2].float(), -copies[2].float())


@pytest.mark.gpu
@ROWWISE
def test_layers_of_one_width_come_from_one_launch(scheme):
    if not triton_use.available():
        pytest.skip("needs triton")
    made = layers(scheme, torch.device("cuda"), torch.float32)
    quantize_layers(made)
    first, _, third, fourth, _ = (layer.quantized_weight()["weight"].untyped_storage().data_ptr() for layer in made)
    assert first == third == fourth


@pytest.mark.gpu
@ROWWISE
def test_a_forward_after_a_step_quantizes_all_layers_at_once(scheme):
    if not triton_use.available():
        pytest.skip("needs triton")
    model = load_model(Qwen2Config(**{**SIZES, "num_hidden_layers": 3}), dtype=DTYPE, seed=0).cuda()
    prepare_(model, scheme, export_dtype=DTYPE)
    ids = torch.arange(24, device="cuda").view(2, 12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
        expected = [layer.quantized_weight() for layer in aligned_layers(model)]
        for layer in aligned_layers(model):
            layer.invalidate()
        Scorer(model, 1.0, DTYPE).score(ids, torch.ones_like(ids))
    made = [layer.quantized_weight() for layer in aligned_layers(model)]
    for got, wanted in zip(made, expected, strict=True):
        assert all(torch.equal(bits(got[name]), bits(wanted[name])) for name in wanted)
    width = made[0]["weight"].shape[1]
    assert len({m["weight"].untyped_storage().data_ptr() for m in made if m["weight"].shape[1] == width}) == 1


@needs_triton
@pytest.mark.parametrize("limit", [1, 60, 100, 119, 10**6])
def test_what_repeats_from_layer_to_layer_lies_in_one_buffer(monkeypatch, limit):
    from lqrl.quant import triton_row_batch

    monkeypatch.setattr(triton_row_batch, "_BUFFER", limit * 10)
    rows = [8, 4, 4, 8, 18, 18] * 3  # 60 a layer, of which query, key, value and gate, up are multiplied as one
    made = triton_row_batch._storage([torch.empty(n, 10) for n in rows], torch.int8)
    assert [codes.shape for codes, _ in made] == [(n, 10) for n in rows]
    assert all(scale.shape == (n, 1) for (_, scale), n in zip(made, rows, strict=True))
    places = [codes.untyped_storage().data_ptr() for codes, _ in made]
    buffers = len(dict.fromkeys(places))
    assert buffers == {1: len(rows), 60: 3, 100: 3, 119: 3, 10**6: 1}[limit]
    if limit > 1:
        assert all(len(set(places[layer : layer + 6])) == 1 for layer in range(0, len(rows), 6))


@needs_triton
@pytest.mark.parametrize(
    ("rows", "period"),
    [([4, 1, 1, 8, 8] * 36, 5), ([4, 1, 1, 8, 8] * 36 + [151], 5), ([4, 1, 1, 8, 8], 5), ([3] * 7, 1), ([3], 1)],
)
def test_what_repeats_is_found_beside_an_output_head(rows, period):
    from lqrl.quant import triton_row_batch

    assert triton_row_batch._period(rows) == period


def test_siblings_that_share_a_scale_are_left_to_their_next_use(device):
    a, b = layers(TENSOR, device, torch.float32)[2:4]
    with torch.no_grad():
        b.weight.mul_(4)
    for layer in (a, b):
        layer.share_scale([a, b])
    quantize_layers([a, b])
    assert torch.equal(a.quantized_weight()["weight_scale"], b.quantized_weight()["weight_scale"])


def test_an_export_lays_out_no_operands():
    model = learner(INT8, torch.device("cpu"))
    list(export_weights(model, INT8, export_dtype=DTYPE))
    aligned = aligned_layers(model)
    assert aligned
    assert not [layer for layer in aligned if "operands" in vars(layer._quantized())]


# ------------------------------------------------------------------ what is not finite


def noted(tensors: Stream) -> FiniteChecks:
    checks = FiniteChecks()
    for name, tensor in tensors:
        checks.note(name, name, tensor)
    return checks


def clean(device: torch.device) -> Stream:
    large = torch.ones(2**20 + 1)
    named = [("fp32", torch.ones(3)), ("bf16", torch.ones(2, 2).bfloat16()), ("large", large), ("empty", large[:0])]
    named += [("large bf16", large.bfloat16()), ("other fp32", torch.full((4,), -3e38)), ("fp16", torch.ones(1).half())]
    named += [
        ("codes", torch.ones(5).to(torch.float8_e4m3fn)),
        ("a.weight_scale", torch.ones(5).to(torch.float8_e4m3fn)),
    ]
    named += [("b.weight_scale", torch.ones(5, dtype=torch.uint8)), ("int8", torch.ones(5, dtype=torch.int8))]
    return [(name, tensor.to(device)) for name, tensor in named]


def test_finite_tensors_pass(device):
    noted(clean(device)).refuse()
    FiniteChecks().refuse()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_tensor_that_is_not_finite_is_named(value, device):
    names = []
    for at, (name, tensor) in enumerate(clean(device)):
        if not tensor.is_floating_point() or not tensor.numel() or tensor.dtype == torch.float8_e4m3fn:
            continue
        names.append(name)
        for later in (False, True):
            tensors = clean(device)
            tensors[at][1].view(-1)[-1] = value
            if later:  # whatever comes after it is broken too
                for _, other in tensors[at + 1 :]:
                    if other.is_floating_point() and other.dtype != torch.float8_e4m3fn:
                        other.fill_(torch.nan)
            with pytest.raises(ValueError, match=f"^{name} holds NaN or inf"):
                noted(tensors).refuse()
    assert len(names) == 6


@pytest.mark.parametrize(("name", "byte"), [("a.weight_scale", 0x7F), ("b.weight_scale", 0xFF)])
def test_scales_in_bytes_are_looked_at(name, byte, device):
    tensors = clean(device)
    dict(tensors)[name].view(torch.uint8)[2] = byte
    with pytest.raises(ValueError, match=f"^{name} holds NaN or inf"):
        noted(tensors).refuse()


def test_codes_in_fp8_are_not_read(device):
    tensors = clean(device)
    dict(tensors)["codes"].view(torch.uint8)[2] = 0x7F
    noted(tensors).refuse()
