"""Scales and packed codes as other writers have them: taken where they say the same, refused by name elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quant_checkpoint import bits, engine_of, saved
from torch import Tensor

from lqrl.modeling.backbone import load_model
from lqrl.quant.checkpoint import load_cache_scales_, load_quantized
from lqrl.quant.checkpoint_reader import full_precision_config
from lqrl.quant.kv import SCALE_NAMES, prepare_kv_

LAYER = "model.layers.0.mlp.up_proj"


def rewritten(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def cache_scales(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def changed(tensors: dict[str, Tensor]) -> None:
        tensors |= {n: change(t) for n, t in tensors.items() if n.rpartition(".")[2] in SCALE_NAMES}

    return changed


@pytest.mark.parametrize(
    "change",
    [lambda t: t.bfloat16() * 3, lambda t: t.reshape(()) * 3, lambda t: t.reshape(1, 1).half() * 3],
    ids=["bf16", "no dimension", "two dimensions"],
)
def test_an_engine_is_given_cache_scales_as_it_holds_them(change, tmp_path):
    saved("fp8_per_channel+kv_fp8_static", tmp_path)
    rewritten(tmp_path, cache_scales(change))
    scheme, tensors = load_quantized(tmp_path)
    sent = dict(tensors)
    scales = {name: t for name, t in sent.items() if name.rpartition(".")[2] in SCALE_NAMES}
    assert len(scales) == 2
    assert all((t.dtype, t.tolist()) == (torch.float32, [3.0]) for t in scales.values())
    served = engine_of(full_precision_config(tmp_path), scheme, torch.bfloat16)
    served.update_weights(iter(sent.items()), policy_version=0)
    masters = load_model(tmp_path, dtype=torch.float32)
    prepare_kv_(masters, scheme)
    assert load_cache_scales_(masters, tmp_path)
    assert all(masters.get_buffer(name).tolist() == [3.0] for name in scales)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), [1.0, 1.0], []])
def test_a_cache_scale_that_is_not_one_positive_number_is_refused_by_name(value, tmp_path):
    saved("fp8_per_channel+kv_fp8_static", tmp_path)
    rewritten(tmp_path, cache_scales(lambda _: torch.tensor(value)))
    masters = load_model(tmp_path, dtype=torch.float32)  # which has none
    scheme, tensors = load_quantized(tmp_path)
    prepare_kv_(masters, scheme)
    for use in (lambda: dict(tensors), lambda: load_cache_scales_(masters, tmp_path)):
        with pytest.raises(ValueError, match=r"self_attn\.[kv]_scale in .* not one positive finite scale of a layer"):
            use()


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("fp8_per_block", "weight_scale"),
        ("int4_w4a16_g32", "weight_scale"),
        ("int8_w8a8", "weight_scale"),
        ("mxfp8", "weight_scale"),
        ("nvfp4_w4a16", "weight_scale"),
    ],
)
@pytest.mark.parametrize("change", [lambda t: t.T, lambda t: t.reshape(-1, 2), lambda t: t[None]])
def test_scales_of_another_shape_are_refused_by_name(name, last, change, tmp_path):
    """As many numbers in another order would be other weights."""
    saved(name, tmp_path)

    def changed(tensors: dict[str, Tensor]) -> None:
        scale = tensors[f"{LAYER}.{last}"]
        shaped = change(scale.view(torch.uint8) if scale.element_size() == 1 else scale).contiguous()
        tensors[f"{LAYER}.{last}"] = shaped.view(scale.dtype)
        assert shaped.shape != scale.shape

    rewritten(tmp_path, changed)
    with pytest.raises(ValueError, match=rf"{LAYER} in .* does not fit: its {last} is .* is needed"):
        dict(load_quantized(tmp_path)[1])


@pytest.mark.parametrize(
    ("name", "last", "shape"),
    [
        ("int8_w8a8", "weight_scale", (-1,)),
        ("fp8_per_channel", "weight_scale", (-1,)),
        ("fp8_per_tensor", "weight_scale", ()),
        ("nvfp4_w4a16", "weight_global_scale", ()),
    ],
)
def test_a_dimension_of_one_may_be_left_out(name, last, shape, tmp_path):
    saved(name, tmp_path)
    before = dict(load_quantized(tmp_path)[1])
    stored = load_file(tmp_path / "model.safetensors")[f"{LAYER}.{last}"]
    assert stored.reshape(shape).ndim == stored.ndim - 1
    rewritten(tmp_path, lambda t: t.update({f"{LAYER}.{last}": stored.reshape(shape)}))
    after = dict(load_quantized(tmp_path)[1])
    assert all(torch.equal(bits(after[n]), bits(t)) for n, t in before.items())


@pytest.mark.parametrize("with_shape", [True, False])
@pytest.mark.parametrize("name", ["int8_w8a16", "int4_w4a16_g32"])
@pytest.mark.parametrize("change", [lambda t: torch.cat([t, t], 1), lambda t: t[:, :-1], lambda t: t.flatten()])
def test_codes_of_another_width_are_not_cut(name, change, with_shape, tmp_path):
    saved(name, tmp_path)

    def changed(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.weight_packed"] = change(tensors[f"{LAYER}.weight_packed"])
        if not with_shape:
            del tensors[f"{LAYER}.weight_shape"]

    rewritten(tmp_path, changed)
    with pytest.raises(ValueError, match=rf"{LAYER} in .* does not fit: its weight_packed is .* needed"):
        dict(load_quantized(tmp_path)[1])
