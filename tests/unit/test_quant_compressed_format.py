"""Schemes in the words of compressed-tensors: its presets, its packing, what it cannot hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lqrl.quant.compressed_format import (
    ACTIVATIONS,
    CACHE,
    checkpoint_format,
    pack_codes,
    parse_quantization_config,
    quantization_config,
    shipped_tensors,
    unpack_codes,
    with_unwritten,
)
from lqrl.quant.methods import linear_method
from lqrl.quant.scheme import PRESETS, TensorFormat

# Where compressed-tensors has a preset of the very same arguments.
THEIR_NAMES = {
    "int8_w8a8": "W8A8",
    "int4_w4a16": "W4A16",
    "fp8_per_channel": "FP8_DYNAMIC",
    "fp8_per_block": "FP8_BLOCK",
    "nvfp4_w4a16": "NVFP4A16",
    "mxfp4_w4a16": "MXFP4A16",
    "mxfp8": "MXFP8",
}


@pytest.mark.parametrize("name", sorted(THEIR_NAMES))
def test_the_config_says_what_their_preset_says(name):
    compressed_tensors = pytest.importorskip("compressed_tensors.quantization")
    settings = quantization_config(PRESETS[name], ["lm_head"])
    (ours,) = compressed_tensors.QuantizationConfig.model_validate(settings).config_groups.values()
    theirs = compressed_tensors.preset_name_to_scheme(THEIR_NAMES[name], ["Linear"])
    for part in ("weights", "input_activations"):
        a, b = getattr(ours, part), getattr(theirs, part)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.model_dump(exclude={"observer", "scale_dtype"}) == b.model_dump(
                exclude={"observer", "scale_dtype"}
            )
            assert a.scale_dtype == b.scale_dtype
    assert ours.format == settings["format"] == checkpoint_format(PRESETS[name])


def test_codes_are_packed_as_by_hand():
    # 8 bits: -128 + 128 = 0, -1 + 128 = 127 = 0x7f, 0 -> 0x80, 127 -> 0xff, the first in the lowest byte.
    assert pack_codes(torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8), 8).tolist() == [[0xFF807F00 - 2**32]]
    # 4 bits: -7 + 8 = 1, 7 + 8 = 15, 0 + 8 = 8; what fills up the int32 is 0.
    assert pack_codes(torch.tensor([[-7, 7, 0]], dtype=torch.int8), 4).tolist() == [[0x8F1]]


@given(st.sampled_from([4, 8]), st.integers(1, 70), st.integers(0, 99))
def test_packing_is_that_of_compressed_tensors_and_reversible(width_bits, columns, seed):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    half = 1 << (width_bits - 1)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-half, half, (3, columns), generator=generator).to(torch.int8)
    packed = pack_codes(codes, width_bits)
    assert torch.equal(packed, helpers.pack_to_int32(codes, width_bits))
    assert torch.equal(unpack_codes(packed, width_bits, columns), codes)


def test_scales_of_other_writers_are_widened_and_shaped():
    method = linear_method(PRESETS["int8_w8a8"])
    like = method.quantize(torch.empty(4, 8, dtype=torch.bfloat16, device="meta"))
    codes, scale = torch.ones(4, 8, dtype=torch.int8), torch.tensor([0.5, 1.0, 1.5, 3.0], dtype=torch.bfloat16)
    shipped = shipped_tensors({"weight": codes, "weight_scale": scale}, TensorFormat("int8", "channel"), like)
    assert shipped["weight_scale"].dtype == torch.float32
    assert shipped["weight_scale"].tolist() == [[0.5], [1.0], [1.5], [3.0]]


@pytest.mark.parametrize("name", ["int4_w4a4", "nf4", "none"])
def test_a_format_that_no_checkpoint_holds_is_refused_with_the_way_out(name):
    with pytest.raises(ValueError, match=rf"'{name}'.*full precision"):
        checkpoint_format(PRESETS[name])


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        ("weights", {"num_bits": 3}, "weights have 3 bits of type int"),
        ("weights", {"symmetric": False}, "weights have zero points"),
        ("weights", {"actorder": "group"}, "weights are reordered"),
        ("weights", {"strategy": "attn_head"}, "weights have strategy attn_head"),
        ("input_activations", {"dynamic": False}, "calibrated scales"),
        ("input_activations", {"dynamic": "local"}, "calibrated scales"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused_with_the_reason(part, changes, reason):
    settings = quantization_config(PRESETS["int8_w8a8"], [])
    settings["config_groups"]["group_0"][part] |= changes
    with pytest.raises(ValueError, match=reason):
        parse_quantization_config(settings, "theirs")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config_groups": []}, r"config_groups is \[\], where an object is needed"),
        ({"config_groups": [{"weights": None}]}, "config_groups is .*, where an object is needed"),
        ({"config_groups": {"group_0": "W8A8"}}, "1 config_groups, where one with its arguments is needed"),
        ({"config_groups": {"group_0": {"weights": "x"}}}, "weights is 'x', where an object is needed"),
        ({"config_groups": {"group_0": {"weights": {}, "input_activations": 8}}}, "input_activations is 8, where an"),
        (
            {"config_groups": {"group_0": {"weights": {"num_bits": [8]}}}},
            r"weights have num_bits \[8\], where a single",
        ),
        (
            {"config_groups": {"group_0": {"weights": {"group_size": {}}}}},
            r"weights have group_size \{\}, where a single",
        ),
        (
            {"config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": 128}}}},
            "weights have blocks of 128",
        ),
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme is 'fp8', where an object is needed"),
        ({"kv_cache_scheme": ["fp8"]}, "kv_cache_scheme is .*, where an object is needed"),
    ],
)
def test_a_config_of_other_types_is_refused_with_the_place(changes, reason):
    with pytest.raises(ValueError, match=reason):
        parse_quantization_config(quantization_config(PRESETS["int8_w8a8"], []) | changes, "theirs")


@pytest.mark.parametrize("key", [ACTIVATIONS, CACHE])
@pytest.mark.parametrize("value", [5, "fp8", [{}], True])
def test_what_lqrl_alone_reads_must_be_an_object(key, value):
    with pytest.raises(ValueError, match=rf"{key} is .*, where an object is needed"):
        with_unwritten(PRESETS["int8_w8a16"], {key: value})


def test_unpacking_takes_the_columns_that_the_width_needs():
    packed = pack_codes(torch.ones(3, 10, dtype=torch.int8), 8)
    assert unpack_codes(packed, 8, 10).shape == (3, 10)
    for width in (4, 8, 13):
        with pytest.raises(ValueError, match=r"weight_packed is torch.int32 \(3, 3\), where .* is needed"):
            unpack_codes(packed, 8, width)
