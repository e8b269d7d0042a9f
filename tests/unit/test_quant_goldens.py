"""Our quantizers against compressed-tensors and torchao: bit for bit where the rules agree, counted where they do not.

Matrices are bf16-rounded, as exported weights are. Each test records how many codes and scales it compared and how many
were equal (`record_property`, so `--junitxml` lists them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lqrl.quant import numerics as q

STDS = (1e-3, 0.02, 1.0, 40.0)
SEEDS = range(6)
E4M3_MAX_MANTISSA = 0x600000  # of 448 = 1.75 * 2**8


def matrices(rows: int = 128, columns: int = 512) -> Iterator[Tensor]:
    """fp32 tensors of bf16 values: normal, with a few outliers, a zero row, and 256 zeros that start a row."""
    for seed in SEEDS:
        for std in STDS:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(rows, columns, generator=generator) * std
            x[torch.rand(rows, columns, generator=generator) < 1e-3] *= 20
            x[seed] = 0.0
            x[-1, :256] = 0.0
            yield x.bfloat16().float()


class Score:
    """Elements compared and equal, bit for bit."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self.record = record
        self.compared = 0
        self.equal = 0

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert ours.numel()
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
        self.compared += ours.numel()
        self.equal += int((ours.contiguous().view(integer) == theirs.contiguous().view(integer)).sum())

    @property
    def share(self) -> float:
        """Equal over compared; recorded."""
        self.record("compared", self.compared)
        self.record("equal", self.equal)
        return self.equal / self.compared


@pytest.fixture
def score(record_property) -> Score:
    return Score(record_property)


@pytest.fixture
def scales_score() -> Score:
    return Score(lambda name, value: None)


# compressed-tensors


def arguments(**options):
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="needs compressed-tensors")
    return quantization.QuantizationArgs(symmetric=True, **options)


def peer_scale(groups: Tensor, args, global_scale: Tensor | None = None) -> Tensor:
    """compressed-tensors' scale of each row of ``groups`` ``[..., size]``."""
    from compressed_tensors.quantization.utils import calculate_qparams

    return calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=global_scale)[0]


def peer_codes(x: Tensor, scale: Tensor, args, dtype: torch.dtype | None, global_scale: Tensor | None = None) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import quantize

    return quantize(x, scale, None, args, dtype=dtype, global_scale=global_scale)  # pyright: ignore[reportArgumentType]


def peer_values(codes: Tensor, scale: Tensor, args, global_scale: Tensor | None = None) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    return dequantize(codes, scale, None, args, dtype=torch.float32, global_scale=global_scale)


def test_int8_channel_means_the_same_values_as_in_compressed_tensors(score):
    args = arguments(num_bits=8, type="int", strategy="channel")
    for x in matrices():
        codes, scale = q.quantize_int8_channel(x)
        score.add(q.dequantize(codes, scale), peer_values(codes, scale, args))
    assert score.share == 1.0


def test_int8_channel_codes_differ_from_compressed_tensors_by_the_rounding_of_the_reciprocal(score):
    # Given our scale: x * (127 / amax) against x / (amax / 127). Its own scale is amax / 127.5.
    args = arguments(num_bits=8, type="int", strategy="channel")
    for x in matrices():
        codes, scale = q.quantize_int8_channel(x)
        theirs = peer_codes(x, scale, args, torch.int8)
        score.add(codes, theirs)
        assert (codes.int() - theirs.int()).abs().max().item() <= 1
        used = x.abs().amax(-1) > 0
        ratio = scale.squeeze(-1)[used] / peer_scale(x, args)[used]
        torch.testing.assert_close(ratio, torch.full_like(ratio, 127.5 / 127))
    assert 0.999 < score.share < 1.0


def test_fp8_channel_equals_compressed_tensors(score):
    args = arguments(num_bits=8, type="float", strategy="channel")
    for x in matrices():
        codes, scale = q.quantize_fp8_channel(x)
        theirs = peer_scale(x, args).unsqueeze(-1)
        kept = theirs.squeeze(-1) > q.FP8_SCALE_FLOOR  # below, and in zero rows, we have vLLM's floor
        score.add(scale[kept], theirs[kept])
        score.add(codes, peer_codes(x, scale, args, torch.float8_e4m3fn))
        score.add(q.dequantize(codes, scale), peer_values(codes, scale, args))
    assert score.share == 1.0


def test_fp8_token_equals_compressed_tensors(score):
    from_values = pytest.importorskip("compressed_tensors.quantization.utils").compute_dynamic_scales_and_zp
    args = arguments(num_bits=8, type="float", strategy="token", dynamic=True)
    for x in matrices():
        x = x.view(4, 32, -1)
        codes, scale = q.quantize_fp8_token(x)
        theirs, _ = from_values(x, args, torch.nn.Module())
        kept = theirs.squeeze(-1) > q.FP8_SCALE_FLOOR
        kept &= x.abs().amax(-1) > 0  # a zero token has the machine epsilon there, the floor here
        score.add(scale[kept], theirs[kept])
        score.add(codes, peer_codes(x, scale, args, torch.float8_e4m3fn))
    assert score.share == 1.0


def test_fp8_group_equals_compressed_tensors(score):
    from_values = pytest.importorskip("compressed_tensors.quantization.utils").compute_dynamic_scales_and_zp
    args = arguments(num_bits=8, type="float", strategy="group", group_size=128, dynamic=True)
    for x in matrices():
        codes, scale = q.quantize_fp8_group(x)
        theirs, _ = from_values(x, args, torch.nn.Module())
        used = x.view(128, -1, 128).abs().amax(-1) > 0
        score.add(scale[used], theirs[used])
        score.add(codes, peer_codes(x, scale, args, torch.float8_e4m3fn))
        score.add(q.dequantize_fp8_group(codes, scale), peer_values(codes, scale, args))
    assert score.share == 1.0


def test_fp8_tensor_has_the_scale_of_compressed_tensors_and_the_codes_of_a_reciprocal(score, scales_score):
    # compressed-tensors divides by the scale; vLLM's per-tensor kernel, which we follow, multiplies by 1 / scale.
    args = arguments(num_bits=8, type="float", strategy="tensor")
    for x in matrices():
        codes, scale = q.quantize_fp8_tensor(x)
        scales_score.add(scale, peer_scale(x.flatten(), args))
        score.add(codes, peer_codes(x, scale, args, torch.float8_e4m3fn))
        assert torch.equal(q.dequantize(codes, scale), peer_values(codes, scale, args))
    assert scales_score.share == 1.0
    assert 0.998 < score.share < 1.0


def test_fp8_block_has_the_scales_of_compressed_tensors_and_the_codes_of_a_reciprocal(score, scales_score):
    # As per tensor, with vLLM's per-block function; its floor of 1e-4 under the amax is above no block here but zeros.
    args = arguments(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    for x in matrices(256, 384):
        codes, scale = q.quantize_fp8_block(x)
        blocks = x.view(2, 128, 3, 128).transpose(1, 2).flatten(2)
        scales_score.add(scale, peer_scale(blocks, args))
        score.add(codes, peer_codes(x, scale, args, torch.float8_e4m3fn))
        assert torch.equal(q.dequantize_fp8_block(codes, scale), peer_values(codes, scale, args))
    assert scales_score.share == 1.0
    assert 0.998 < score.share < 1.0


def test_fp8_block_pads_ragged_edges_as_compressed_tensors_does():
    args = arguments(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    codes, scale = q.quantize_fp8_block(x)
    assert scale.shape == (2, 3)
    assert torch.equal(q.dequantize_fp8_block(codes, scale), peer_values(codes, scale, args))


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_int4_codes_packing_and_values_equal_compressed_tensors_given_our_scale(score, group_size, scale_dtype):
    # Its own scale is amax / 7.5, so the scale is ours.
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    args = arguments(num_bits=4, type="int", strategy="group", group_size=group_size)
    for x in matrices():
        codes, scale = q.quantize_int4_group(x, group_size, scale_dtype)
        score.add(codes, peer_codes(x, scale, args, torch.int8))
        packed = q.pack_int4(codes)
        score.add(packed, helpers.pack_to_int32(codes, 4))
        score.add(q.unpack_int4(packed), helpers.unpack_from_int32(packed, 4, codes.shape))
        score.add(q.dequantize_int4_group(codes, scale), peer_values(codes, scale, args))
    assert score.share == 1.0


def test_int4_packing_of_minus_8_equals_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-8, 8, (64, 256), dtype=torch.int8)
    assert torch.equal(q.pack_int4(codes), helpers.pack_to_int32(codes, 4))
    assert torch.equal(q.unpack_int4(q.pack_int4(codes)), codes)


def test_nvfp4_equals_compressed_tensors(score):
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    from compressed_tensors.quantization.utils import generate_gparam

    args = arguments(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
    for x in matrices():
        codes, scale, global_scale = q.quantize_nvfp4(x)
        score.add(global_scale, generate_gparam(x.amin(), x.amax()))
        theirs = peer_scale(x.view(128, -1, 16), args, global_scale)
        score.add(scale, theirs.to(torch.float8_e4m3fn))
        packed = helpers.pack_fp4_to_uint8(peer_codes(x, theirs, args, None, global_scale))
        score.add(q.pack_fp4(codes), packed)
        unpacked = helpers.unpack_fp4_from_uint8(packed, *x.shape, dtype=torch.float32)
        score.add(q.dequantize_nvfp4(codes, scale, global_scale), peer_values(unpacked, theirs, args, global_scale))
    assert score.share == 1.0


def test_mxfp4_equals_compressed_tensors(score):
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    from compressed_tensors.compressors.mx_utils import compress_mx_scale

    args = arguments(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    for x in matrices():
        codes, scale = q.quantize_mxfp4(x)
        theirs = peer_scale(x.view(128, -1, 32), args)
        score.add(scale, compress_mx_scale(theirs, torch.uint8))
        packed = helpers.pack_fp4_to_uint8(peer_codes(x, theirs, args, None))
        score.add(q.pack_fp4(codes), packed)
        unpacked = helpers.unpack_fp4_from_uint8(packed, *x.shape, dtype=torch.float32)
        score.add(q.dequantize_mxfp4(codes, scale), peer_values(unpacked, theirs, args))
    assert score.share == 1.0


def test_mxfp8_differs_from_compressed_tensors_only_where_the_amax_is_exactly_representable(score):
    # Both round the exponent up above 1.75 * 2**E; compressed-tensors does at 1.75 * 2**E itself, which 448 can hold.
    from_scale = pytest.importorskip("compressed_tensors.compressors.mx_utils").compress_mx_scale
    args = arguments(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    for x in matrices():
        codes, scale = q.quantize_mxfp8(x)
        theirs = peer_scale(x.view(128, -1, 32), args)
        amax = x.view(128, -1, 32).abs().amax(-1)
        exact = (amax.view(torch.int32) & 0x7FFFFF) == E4M3_MAX_MANTISSA
        assert torch.equal(from_scale(theirs, torch.uint8).int() - scale.int(), exact.int())
        score.add(codes, peer_codes(x, theirs, args, torch.float8_e4m3fn))
        given_ours = peer_codes(x, q.decode_e8m0(scale), args, torch.float8_e4m3fn)
        assert torch.equal(codes.view(torch.uint8), given_ours.view(torch.uint8))
    assert 0.98 < score.share < 1.0


# torchao


@pytest.fixture
def torchao_floats():
    return pytest.importorskip("torchao.quantization.quant_primitives", reason="needs torchao")


@pytest.fixture
def torchao_mx():
    return pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")


def test_fp8_channel_equals_torchao(score, torchao_floats):
    for x in matrices():
        codes, scale = q.quantize_fp8_channel(x)
        theirs = torchao_floats._choose_scale_float8(x, [1, x.shape[1]])
        kept = theirs.squeeze(-1) > q.FP8_SCALE_FLOOR
        score.add(scale[kept], theirs[kept])
        score.add(codes, torchao_floats._quantize_affine_float8(x, scale))
        score.add(q.dequantize(codes, scale), torchao_floats._dequantize_affine_float8(codes, scale))
    assert score.share == 1.0


def test_fp8_block_scales_equal_torchao(score, torchao_floats):
    for x in matrices(256, 384):
        _, scale = q.quantize_fp8_block(x)
        score.add(scale, torchao_floats._choose_scale_float8(x, [128, 128]))
    assert score.share == 1.0


def test_e2m1_and_its_packing_equal_torchao(score):
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels", reason="needs torchao")
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat([edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1), torch.tensor([0.0, 1e-42])])
    x = torch.cat([x, torch.linspace(0, 9, 200_001), torch.randn(300_000) * 3])
    x = torch.cat([x, -x])
    codes = q.cast_e2m1(x)
    score.add(codes, kernels.f32_to_f4_unpacked(x))
    score.add(q.decode_e2m1(codes), kernels.f4_unpacked_to_f32(codes))
    score.add(q.pack_fp4(codes), kernels.pack_uint4(codes))
    score.add(q.unpack_fp4(q.pack_fp4(codes)), kernels.unpack_uint4(kernels.pack_uint4(codes)))
    assert score.share == 1.0


MODES = {"floor": "FLOOR", "even": "EVEN", "ceil": "RCEIL"}
rules = pytest.mark.parametrize("rule", list(MODES))


@rules
def test_mxfp8_equals_torchao(score, torchao_mx, rule):
    mode = torchao_mx.ScaleCalculationMode[MODES[rule]]
    for x in matrices():
        codes, scale = q.quantize_mxfp8(x, rule)
        theirs, their_codes = torchao_mx.to_mx(x, torch.float8_e4m3fn, 32, mode)
        score.add(scale, theirs.view(torch.uint8))
        score.add(codes, their_codes)
        values = torchao_mx.to_dtype(their_codes, theirs, torch.float8_e4m3fn, 32, torch.float32)
        score.add(q.dequantize_mxfp8(codes, scale), values)
    assert score.share == 1.0


@rules
def test_mxfp4_equals_torchao(score, torchao_mx, rule):
    mode = torchao_mx.ScaleCalculationMode[MODES[rule]]
    for x in matrices():
        codes, scale = q.quantize_mxfp4(x, rule)
        theirs, packed = torchao_mx.to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
        score.add(scale, theirs.view(torch.uint8))
        score.add(q.pack_fp4(codes), packed)
    assert score.share == 1.0


def test_nvfp4_differs_from_torchao_by_its_reciprocals(score, scales_score):
    # torchao's global scale is the inverse, divides the block scales where we multiply, and its codes are
    # x * ((1 / global) / scale); block scales are floored at 2**-6, ours at 0.125 in place of 0.
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="needs torchao")
    for x in matrices():
        codes, scale, global_scale = q.quantize_nvfp4(x)
        inverse = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
        torch.testing.assert_close(inverse, 1 / global_scale[0])
        theirs, packed = nvfp4.nvfp4_quantize(x, 16, inverse)
        used = x.view(128, -1, 16).abs().amax(-1) > 0
        scales_score.add(scale[used], theirs[used])
        score.add(q.pack_fp4(codes), packed)
    assert scales_score.share > 0.998
    assert 0.99 < score.share < 1.0
