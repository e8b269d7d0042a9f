"""The exact kernels: right, and the same bits for a row whatever is computed beside it and by which code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lqrl.quant import QuantScheme, exact, exact_native
from lqrl.quant.methods import FullPrecision, linear_method
from lqrl.quant.methods.exact import exact_method
from lqrl.quant.native_build import BuildError
from lqrl.quant.numerics import (
    quantize_fp8_token,
    quantize_int8_token,
    quantize_kv_fp8_token_head,
    quantize_kv_int8_token_head,
    quantize_mxfp8,
)

try:
    exact.check_device("cpu")
except BuildError:
    pytest.skip("no C compiler", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16]
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


@lru_cache
def portable() -> exact_native.Library:
    return exact_native.load(at_most="portable")


@contextmanager
def on(library: exact_native.Library, threads: int = 1) -> Iterator[None]:
    before, count = exact_native._loaded[0], torch.get_num_threads()
    exact_native._loaded[0] = library
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        exact_native._loaded[0] = before
        torch.set_num_threads(count)


def everywhere(run: Callable[[], Tensor]) -> Tensor:
    """The result, after other threads and the portable code gave the same bits."""
    out = run()
    for library, threads in ((exact_native._loaded[0], 2), (portable(), 1)):
        with on(library, threads):
            assert torch.equal(run(), out)
    return out


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 60), n=st.integers(1, 70), k=st.integers(1, 600), seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES), with_bias=st.booleans(),
)  # fmt: skip
def test_a_row_of_a_product_does_not_see_the_others(m, n, k, seed, dtype, with_bias):
    x, weight = randn(m, k, seed=seed, dtype=dtype), randn(n, k, seed=seed + 1, dtype=dtype)
    bias = randn(n, seed=seed + 2, dtype=dtype) if with_bias else None
    packed = exact.pack(weight)
    out = everywhere(lambda: exact.linear(x, packed, bias, torch.float32))
    true = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    # k roundings of sums of at most sum |x w|, each within 2^-24
    bound = (k + 1) * 2**-24 * (x.double().abs() @ weight.double().abs().t() + 4)
    assert ((out - true).abs() <= bound).all()
    for i in (0, m // 2, m - 1):
        assert torch.equal(exact.linear(x[i : i + 1], packed, bias, torch.float32)[0], out[i])
    assert torch.equal(exact.linear(x, packed, bias, torch.bfloat16), out.bfloat16())


def test_a_product_is_a_chain_of_fused_multiply_adds():
    # 1 + 2^-12 squared is 1 + 2^-11 + 2^-24; after -1 the fused sum keeps 2^-24, a rounded product does not.
    x, weight = torch.tensor([[1.0, 1 + 2**-12]]), torch.tensor([[-1.0, 1 + 2**-12]])
    assert exact.linear(x, exact.pack(weight)).item() == 2**-11 + 2**-24
    # In order: (2^24 + 1) rounds to 2^24, then - 2^24 gives 0; from the right it would be 1.
    x, weight = torch.tensor([[2.0**24, 1.0, -(2.0**24)]]), torch.ones(1, 3)
    assert exact.linear(x, exact.pack(weight)).item() == 0


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 2), (3, 1), (5, 5), (30, 1)]),
    width=st.sampled_from([4, 8, 20, 64]), value_width=st.sampled_from([8, 12, 64]),
    window=st.sampled_from([None, 1, 6, 100]), seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_attention_of_a_token_is_the_same_in_a_packed_batch_and_from_a_cache(
    lengths, heads, width, value_width, window, seed, dtype
):
    total, (h, hkv), scaling = sum(lengths), heads, width**-0.5
    q, k = randn(total, h, width, seed=seed, dtype=dtype), randn(total, hkv, width, seed=seed + 1, dtype=dtype)
    v = randn(total, hkv, value_width, seed=seed + 2, dtype=dtype)
    sequences = exact.packed_sequences(lengths)
    out = everywhere(lambda: exact.attention(q, k, v, sequences, scaling, window))
    slot, rest, start = len(lengths), 7, 0
    keys = torch.full((slot, hkv, max(lengths) + rest, width), torch.nan, dtype=dtype)  # a dead key must not be read
    values = torch.full((slot, hkv, max(lengths) + rest, value_width), torch.nan, dtype=dtype)
    for i, n in enumerate(lengths):
        rows = slice(start, start + n)
        keys[i, :, :n], values[i, :, :n] = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        mask = (distance >= 0) & (distance < (window or n))
        full = (t[rows].transpose(0, 1)[None].double() for t in (q, k, v))
        true = F.scaled_dot_product_attention(*full, attn_mask=mask, scale=scaling, enable_gqa=True)[0].transpose(0, 1)
        assert (out[rows] - true).abs().max() < (2e-6 if dtype == torch.float32 else 2e-2)
        start += n
    starts = [sum(lengths[:i]) for i in range(slot)]
    for step in {0, min(lengths) // 2, min(lengths) - 1}:  # all slots decode together
        rows = torch.tensor(starts) + step
        where = torch.stack(
            [torch.arange(slot), torch.ones(slot).long(), torch.arange(slot), torch.full((slot,), step)]
        )
        decoded = exact.attention(q[rows], keys, values, exact.Sequences(where, 1), scaling, window)
        assert torch.equal(decoded, out[rows])


@in_dtypes
@pytest.mark.parametrize("width", [1, 7, 16, 577])
def test_a_norm_is_the_plain_one_rounded_in_its_own_order(dtype, width):
    x, weight = randn(5, 3, width, dtype=dtype) * 3, randn(width, seed=1, dtype=dtype)
    out = everywhere(lambda: exact.rms_norm(x, weight, 1e-6)[0])
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(out.double(), normed * weight.double(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(exact.rms_norm(x[2, 1:2], weight, 1e-6)[0], out[2, 1:2])


@in_dtypes
def test_silu_is_within_rounding_and_does_not_see_the_place_of_an_element(dtype):
    x = torch.cat([torch.linspace(-100, 100, 20001), torch.tensor([0.0, -0.0])]).to(dtype)
    out = everywhere(lambda: exact.silu(x))
    true = x.double() / (1 + (-x.double()).exp())
    live = true.abs() > 1e-35  # exp(86.6) and above: the result is as small as that, or 0
    spacing = torch.finfo(dtype).eps * true.abs()
    assert ((out.double() - true).abs() <= 2 * spacing)[live].all()
    assert torch.equal(exact.silu(x[13:]), out[13:])
    assert torch.equal(exact.silu(x[77:78]), out[77:78])
    extremes = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)  # -inf gives NaN, as in torch
    assert torch.equal(exact.silu(extremes).isnan(), torch.tensor([False, True, True]))


def test_exponentials_are_within_one_unit_in_the_last_place():
    # A row of two logits 0 and x has the sum 1 + exp(x); far below 0 the sum is in float64, so exp(x) shows.
    x = -torch.linspace(0, 86, 40001)
    total = torch.stack([exact.normalizer(torch.stack([torch.zeros_like(x), x], 1), 1.0).log_total])[0].expm1()
    # 1 + e is rounded to fp32 before float64: only the absolute error can be seen here.
    assert (total - x.double().exp()).abs().max() < 2**-23


@pytest.mark.parametrize("vocabulary", [1, 9, 64, 513, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_right_and_rows_apart(vocabulary, temperature):
    logits = randn(6, vocabulary) * 5
    targets = torch.randint(vocabulary, (6,), generator=torch.Generator().manual_seed(1))

    def scores(logits: Tensor, targets: Tensor) -> Tensor:
        return exact.token_logprobs(logits, targets, temperature, exact.normalizer(logits, temperature))

    out = everywhere(lambda: scores(logits, targets))
    true = (logits.double() / temperature).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    assert (out - true).abs().max() < 2e-6
    assert torch.equal(scores(logits[3:4], targets[3:4]), out[3:4])


def test_a_draw_is_the_inverse_of_the_cumulative_distribution():
    logits, uniform = (
        randn(400, 1300) * 2,
        torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    )
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    tokens, rows = exact.sample(logits, uniform, 1.0)
    cumulative = logits.double().softmax(1).cumsum(1)
    below = torch.where(tokens > 0, cumulative.gather(1, (tokens - 1).clamp_min(0)[:, None]).squeeze(1), 0)
    above = cumulative.gather(1, tokens[:, None]).squeeze(1)
    assert ((below - 1e-6 <= uniform) & (uniform <= above + 1e-6)).all()
    assert torch.equal(rows.log_total, exact.normalizer(logits, 1.0).log_total)  # drawing changes no sum
    assert torch.equal(everywhere(lambda: exact.sample(logits, uniform, 1.0)[0]), tokens)
    assert torch.equal(exact.sample(logits[7:9], uniform[7:9], 1.0)[0], tokens[7:9])


def test_a_token_without_weight_is_never_drawn_and_greedy_takes_the_first_of_equals():
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [5, 550]] = 1.0
    assert exact.sample(logits, torch.tensor([0.0], dtype=torch.float64), 1.0)[0].item() == 5
    assert exact.sample(logits, torch.tensor([1 - 2**-53], dtype=torch.float64), 1.0)[0].item() == 550
    assert exact.sample(logits, None, 1.0)[0].item() == 5


def test_rotary_entries_depend_on_their_position_alone():
    frequencies = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    cos, sin = exact.rotary_table(frequencies, 100)
    angle = (torch.arange(100).float()[:, None] * frequencies).double()
    assert torch.equal(cos, angle.cos().float())
    assert torch.equal(sin, angle.sin().float())
    assert torch.equal(exact.rotary_table(frequencies, 30)[0], cos[:30])


def test_what_cannot_be_exact_is_an_error():
    with pytest.raises(NotImplementedError, match="runs on the CPU and on CUDA, not on meta"):
        exact.check_device("meta")
    with pytest.raises(TypeError, match=r"float32 or bfloat16, not torch\.float64"):
        exact.silu(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="does not fit an input"):
        exact.linear(torch.ones(2, 5), exact.pack(torch.ones(3, 4)))


LAYERS = [
    "none", "int8_w8a8", "int4_w4a4", "int8_w8a16", "int4_w4a16", "int4_w4a16_g32", "int3_w3a16_g32", "fp8_per_tensor",
    "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4_w4a16", "nvfp4_w4a16", "nvfp4_w4a4",
]  # fmt: skip


@in_dtypes
@pytest.mark.parametrize("scheme", LAYERS)
def test_a_row_of_a_layer_does_not_see_the_others(scheme: str, dtype: torch.dtype, device: torch.device):
    method = FullPrecision() if scheme == "none" else linear_method(QuantScheme.preset(scheme))
    small = device.type == "cpu"
    for n, k in [(40, 256)] if small else [(40, 256), (4096, 1024), (9000, 1152)]:
        x, bias = randn(70 if small else 1500, k, dtype=dtype).to(device), randn(n, seed=1, dtype=dtype).to(device)
        tensors = method.quantize(randn(n, k, seed=2, dtype=dtype).to(device) * 0.05)
        layer = exact_method(method)
        operands = layer.operands(tensors, dtype)
        out, logits = layer.linear(x, operands, bias), layer.logits(x, operands)
        assert (out.dtype, logits.dtype) == (dtype, torch.float32)
        for rows in (1, 3, 65) if small else (1, 3, 64, 65, 128, 130, 256, 257, 1024):
            start = (len(x) - rows) // 2
            part = x[start : start + rows]
            assert torch.equal(layer.linear(part, operands, bias), out[start : start + rows])
            assert torch.equal(layer.logits(part, operands), logits[start : start + rows])
        assert torch.equal(layer.linear(x.view(2, -1, k), operands, bias).view_as(out), out)
        again = layer.operands(tensors, dtype, operands)  # a refresh writes in place
        assert [a.data_ptr() for a in again] == [a.data_ptr() for a in operands]
        assert torch.equal(layer.linear(x, again, bias), out)
        plain = method.linear(x, method.operands(tensors, dtype), bias).double()
        assert (out.double() - plain).norm() <= (
            1e-2 if dtype == torch.bfloat16 or "fp8" in scheme else 1e-5
        ) * plain.norm()


STAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "temperature": lambda a, b: a / 0.7,
    "rotation": lambda a, b: a.clone().mul_(b).add_(b),
    "rounding": lambda a, b: a.float().bfloat16(),
    "log-prob": lambda a, b: (a.double() - b.double() - b.double()).float(),
    "fp8 codes": lambda a, b: quantize_fp8_token(a)[0].float(),
    "fp8 scales": lambda a, b: quantize_fp8_token(a)[1],
    "int8 codes": lambda a, b: quantize_int8_token(a, 7.0)[0],
    "mxfp8 scales": lambda a, b: quantize_mxfp8(a)[1],
    "cache codes": lambda a, b: quantize_kv_fp8_token_head(a)[0].float(),
    "cache scales": lambda a, b: quantize_kv_int8_token_head(a)[1],
}


@in_dtypes
@pytest.mark.parametrize("name", STAYS)
def test_what_stays_with_torch_does_not_see_the_place_of_a_row(name: str, dtype: torch.dtype, device: torch.device):
    # Reductions here are largest values, which have no order; everything else is one IEEE operation an element.
    for rows, width in ((1, 32), (33, 96), (3001, 32)):
        a, b = (randn(rows, width, seed=seed, dtype=dtype).to(device) * 3 for seed in (0, 1))
        out = STAYS[name](a, b)
        with on(exact_native._loaded[0], threads=2):
            assert torch.equal(STAYS[name](a, b), out)
        assert torch.equal(STAYS[name](a.t().contiguous().t(), b.t().contiguous().t()), out)
        for i in (0, rows // 2, rows - 1):
            assert torch.equal(STAYS[name](a[i : i + 1], b[i : i + 1]), out[i : i + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype):
    frequencies = torch.rand(16)
    wanted = exact.rotary_table(frequencies, 300)
    torch.set_default_dtype(dtype)
    try:
        exact_native.load(at_most="portable")  # its self-test too
        found = exact.rotary_table(frequencies, 300)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(found, wanted, strict=True))


def test_what_does_not_fit_is_refused_before_it_is_read():
    logits, x = torch.randn(4, 8), torch.randn(5, 4, 8)
    for uniform in (torch.rand(4), torch.rand(1, dtype=torch.float64)):
        with pytest.raises(ValueError, match="4 rows are drawn by as many float64 numbers"):
            exact.sample(logits, uniform, 1.0)
    with pytest.raises(ValueError, match=r"weight \(4,\) does not fit"):
        exact.rms_norm(logits, torch.ones(4), 1e-6)
    for k, v in ((x[:, :3], x[:, :3]), (x, x[:4]), (x[..., :6], x)):
        with pytest.raises(ValueError, match="do not fit keys"):
            exact.attention(x, k, v, exact.packed_sequences([5]), 1.0)


def test_without_top_k_and_top_p_every_token_is_kept():
    uniform = torch.tensor([0.1, 0.9], dtype=torch.float64)
    tokens, _, log_mass = exact.sample_truncated(torch.zeros(2, 8192), uniform, 1.0, 0, 1.0)
    assert tokens.tolist() == [819, 7372]
    assert log_mass.abs().max() < 1e-6


def test_of_zeros_of_both_signs_the_first_is_the_more_likely():
    logits, uniform = torch.tensor([[-1.0, -0.0, 0.0]]), torch.zeros(1, dtype=torch.float64)
    assert exact.sample_truncated(logits, uniform, 1.0, 1, 1.0)[0].tolist() == [1]


def test_a_vocabulary_whose_sums_could_overflow_is_refused():
    logits, uniform = torch.zeros(1, 2**18), torch.zeros(1, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="at most 262143 tokens, got 262144"):
        exact.sample_truncated(logits, uniform, 1.0, 0, 0.9)
