from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from quant_families import FAMILIES, LAYERS, LINEARS_PER_LAYER, tiny_model, tokens
from torch import Tensor, nn

from lqrl.quant.export import export_weights
from lqrl.quant.linear import AlignedLinear, QuantizedLinear
from lqrl.quant.numerics import quantize_int8_channel
from lqrl.quant.prepare import convert_, pack_, prepare_
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.targets import target_modules

INT8 = QuantScheme.preset("int8_w8a8")
IDENTITY = QuantScheme.preset("none")
DTYPES = [torch.float32, torch.bfloat16]


def load(engine: nn.Module, weights: dict[str, Tensor]) -> None:
    """Write every tensor in place; each of the engine's own must be there once."""
    own = dict(engine.named_parameters()) | {n: b for n, b in engine.named_buffers() if n in engine.state_dict()}
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, tensor in weights.items():
            assert (own[name].dtype, own[name].shape) == (tensor.dtype, tensor.shape), name
            own[name].copy_(tensor)
    pack_(engine)


def cast_parameters_(model: nn.Module, dtype: torch.dtype, but: Sequence[str] = ()) -> None:
    """Not model.to(dtype), which would also round the rotary frequencies."""
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] not in but:
            parameter.data = parameter.data.to(dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_learner_and_engine_hold_equal_codes_and_compute_equal_logits(family, dtype):
    learner, engine = tiny_model(family, seed=0), tiny_model(family, seed=1)
    names = prepare_(learner, INT8, export_dtype=dtype)
    cast_parameters_(engine, dtype)
    assert convert_(engine, INT8) == names
    load(engine, dict(export_weights(learner, INT8, export_dtype=dtype)))

    inputs: dict[str, Tensor] = {}
    for name in names:
        layer = learner.get_submodule(name)
        layer.register_forward_hook(lambda _m, args, _y, n=name: inputs.__setitem__(n, args[0]))
    with torch.no_grad():
        # Norms and embeddings of the learner compute in the engine's dtype; the quantized layers' masters stay fp32.
        cast_parameters_(learner, dtype, but=names)
        logits = learner(input_ids=tokens()).logits
        for name in names:
            ours, theirs = learner.get_submodule(name), engine.get_submodule(name)
            for shipped, tensor in ours.quantized_weight().items():
                assert torch.equal(tensor, theirs.get_buffer(shipped))
            assert inputs[name].dtype == dtype
            assert torch.equal(ours(inputs[name]), theirs(inputs[name]))
        assert torch.equal(logits, engine(input_ids=tokens()).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_prepare_changes_no_name_and_no_parameter(family):
    model = tiny_model(family)
    before = list(model.named_parameters())
    assert len(prepare_(model, INT8, export_dtype=torch.bfloat16)) == LAYERS * LINEARS_PER_LAYER
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(model.named_parameters(), before, strict=True))


def test_every_parameter_of_a_prepared_model_gets_a_gradient():
    model = tiny_model("qwen2")
    prepare_(model, INT8, export_dtype=torch.bfloat16)
    model(input_ids=tokens()).logits.logsumexp(-1).sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # Softmax does not see a constant added to all keys of a query, so only rounding reaches the k biases.
    assert [n for n in missing if not n.endswith("k_proj.bias")] == []


def test_int8_logits_are_near_the_full_precision_ones_and_not_equal():
    plain, learner = tiny_model("llama"), tiny_model("llama")
    prepare_(learner, INT8, export_dtype=torch.float32)
    with torch.no_grad():
        expected, actual = plain(input_ids=tokens()).logits, learner(input_ids=tokens()).logits
    relative = ((actual - expected).norm() / expected.norm()).item()
    assert 1e-4 < relative < 5e-2


def test_the_identity_scheme_swaps_nothing_and_exports_the_state_dict():
    model = tiny_model("qwen2")
    assert prepare_(model, IDENTITY, export_dtype=torch.bfloat16) == []
    assert convert_(model, IDENTITY) == []
    assert not any(isinstance(m, (AlignedLinear, QuantizedLinear)) for m in model.modules())
    exported = dict(export_weights(model, IDENTITY, export_dtype=torch.bfloat16))
    assert list(exported) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(exported[name], tensor.bfloat16())


def test_a_prepared_model_can_be_exported_in_full_precision():
    model = tiny_model("qwen2")
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    prepare_(model, INT8, export_dtype=torch.bfloat16)
    exported = dict(export_weights(model, IDENTITY, export_dtype=torch.float32))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[n], expected[n]) for n in expected)


def test_a_plain_and_a_prepared_model_export_the_same():
    plain, prepared = tiny_model("qwen2"), tiny_model("qwen2")
    prepare_(prepared, INT8, export_dtype=torch.bfloat16)
    a = list(export_weights(plain, INT8, export_dtype=torch.bfloat16))
    b = list(export_weights(prepared, INT8, export_dtype=torch.bfloat16))
    assert [n for n, _ in a] == [n for n, _ in b]
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(a, b, strict=True))


def test_quantized_layers_export_codes_of_the_rounded_weight_scale_and_bias():
    model = tiny_model("qwen2")
    name = "model.layers.1.self_attn.k_proj"
    linear = model.get_submodule(name)
    exported = dict(export_weights(model, INT8, export_dtype=torch.bfloat16))
    codes, scale = quantize_int8_channel(linear.weight.detach().bfloat16())
    assert torch.equal(exported[f"{name}.weight"], codes)
    assert torch.equal(exported[f"{name}.weight_scale"], scale)
    assert torch.equal(exported[f"{name}.bias"], linear.bias.detach().bfloat16())
    assert not torch.equal(codes, quantize_int8_channel(linear.weight.detach())[0])


def test_the_export_hands_out_the_codes_of_the_forward_and_quantizes_nothing_itself():
    model = tiny_model("llama")
    names = prepare_(model, INT8, export_dtype=torch.bfloat16)
    with torch.no_grad():
        model(input_ids=tokens())
    used = {name: model.get_submodule(name).quantized_weight()["weight"] for name in names}
    exported = dict(export_weights(model, INT8, export_dtype=torch.bfloat16))
    assert all(exported[f"{name}.weight"] is codes for name, codes in used.items())


def test_the_export_follows_an_optimizer_step():
    model = tiny_model("llama")
    prepare_(model, INT8, export_dtype=torch.float32)
    before = dict(export_weights(model, INT8, export_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=tokens()).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    after = dict(export_weights(model, INT8, export_dtype=torch.float32))
    fresh = dict(export_weights(model, IDENTITY, export_dtype=torch.float32))
    for name in target_modules(model, INT8):
        assert torch.equal(after[f"{name}.weight"], quantize_int8_channel(fresh[f"{name}.weight"])[0])
        assert not torch.equal(after[f"{name}.weight"], before[f"{name}.weight"])


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_come_once_under_the_embedding(tied):
    names = [n for n, _ in export_weights(tiny_model("qwen3", tied=tied), INT8, export_dtype=torch.bfloat16)]
    assert len(names) == len(set(names))
    assert names[0] == "model.embed_tokens.weight"
    assert ("lm_head.weight" in names) is not tied


def test_a_tied_head_that_comes_before_the_embedding_is_exported_under_the_embedding():
    class HeadFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.proj, self.embed = nn.Linear(4, 6, bias=False), nn.Linear(4, 4), nn.Embedding(6, 4)
            self.head.weight = self.embed.weight

        def get_input_embeddings(self):
            return self.embed

        def get_output_embeddings(self):
            return self.head

    names = [n for n, _ in export_weights(HeadFirst(), INT8, export_dtype=torch.float32)]
    assert names == ["embed.weight", "proj.weight", "proj.weight_scale", "proj.bias"]


def test_persistent_buffers_are_exported_and_others_are_not():
    model = nn.ModuleDict({"proj": nn.Linear(4, 4, bias=False), "norm": nn.BatchNorm1d(4)})
    model["norm"].register_buffer("scratch", torch.ones(2), persistent=False)
    exported = dict(export_weights(model, INT8, export_dtype=torch.bfloat16))
    assert exported["norm.running_var"].dtype == torch.bfloat16
    assert exported["norm.num_batches_tracked"].dtype == torch.int64
    assert "norm.scratch" not in exported


@pytest.mark.parametrize("scheme", [INT8, IDENTITY])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"],
)
def test_nan_or_inf_is_refused_by_name(scheme, bad, name):
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = bad
    with pytest.raises(ValueError, match=f"{name} holds NaN or inf"):
        list(export_weights(model, scheme, export_dtype=torch.bfloat16))


def test_a_value_beyond_the_export_dtype_is_refused():
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] = 1e5  # fp16 ends at 65504
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight holds NaN or inf"):
        list(export_weights(model, INT8, export_dtype=torch.float16))


def test_another_export_dtype_than_prepared_is_refused():
    model = tiny_model("llama")
    prepare_(model, INT8, export_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="prepared for another format or export dtype"):
        list(export_weights(model, INT8, export_dtype=torch.float32))


def test_swapping_twice_is_refused():
    learner, engine = tiny_model("llama"), tiny_model("llama")
    prepare_(learner, INT8, export_dtype=torch.bfloat16)
    convert_(engine, INT8)
    with pytest.raises(ValueError, match="already a AlignedLinear"):
        prepare_(learner, INT8, export_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="already a QuantizedLinear"):
        convert_(engine, INT8)


def test_an_engines_model_cannot_be_exported():
    engine = tiny_model("llama")
    convert_(engine, INT8)
    for scheme in (INT8, IDENTITY):
        with pytest.raises(ValueError, match="holds low-bit codes"):
            list(export_weights(engine, scheme, export_dtype=torch.bfloat16))


def test_a_skip_pattern_keeps_the_layer_plain_on_both_sides():
    scheme = dataclasses.replace(INT8, skip=("*.down_proj",))
    learner, engine = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    prepare_(learner, scheme, export_dtype=torch.float32)
    convert_(engine, scheme)
    load(engine, dict(export_weights(learner, scheme, export_dtype=torch.float32)))
    assert type(engine.get_submodule("model.layers.0.mlp.down_proj")) is nn.Linear
    with torch.no_grad():
        assert torch.equal(learner(input_ids=tokens()).logits, engine(input_ids=tokens()).logits)


def test_convert_quantizes_the_models_own_weights():
    learner, engine = tiny_model("qwen3"), tiny_model("qwen3")
    prepare_(learner, INT8, export_dtype=torch.float32)
    convert_(engine, INT8)
    with torch.no_grad():
        assert torch.equal(learner(input_ids=tokens()).logits, engine(input_ids=tokens()).logits)
