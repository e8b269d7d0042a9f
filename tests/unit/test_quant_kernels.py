"""The int8 linear layer: every backend gives the exact integer product and the same bits after it."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lqrl.quant import kernels, native
from lqrl.quant.numerics import quantize_int8_channel, quantize_int8_token

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
DTYPES = [torch.float32, torch.bfloat16]


@lru_cache
def native_kernels() -> dict[str, kernels.Int8Backend]:
    """One backend for each instruction set this CPU has; "native" is the one that is chosen."""
    try:
        loaded = {"native": native.load()}
        loaded |= {kernel.instructions: kernel for kernel in (native.load(at_most=level) for level in native.LEVELS)}
    except native.BuildError:
        return {}
    del loaded[loaded["native"].instructions]
    return {name: kernels.NativeBackend(kernel) for name, kernel in loaded.items()}


def backends(device: str) -> dict[str, kernels.Int8Backend]:
    common = {"float": kernels.FloatBackend(), "torch": kernels.TorchBackend()}
    return common | (native_kernels() if device == "cpu" else {})


needs_compiler = pytest.mark.skipif(not native_kernels(), reason="no C compiler")
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


@pytest.fixture
def fresh_choice(monkeypatch):
    """No backend chosen yet, no override, as in a new process."""
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.delenv(kernels.BACKEND_VARIABLE, raising=False)


def codes(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator).to(device)


def bits(x: Tensor) -> Tensor:
    """The bit patterns, NaN as one pattern; unlike ==, these tell 0 from -0."""
    x = torch.where(x.isnan(), torch.nan, x)
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def layer(n: int, k: int, device: str = "cpu", seed: int = 1) -> tuple[Tensor, Tensor]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    weight_codes, scale = quantize_int8_channel(weight)
    return weight_codes.to(device), scale.to(device)


@on_devices
@settings(max_examples=25, deadline=None)
@given(m=st.integers(1, 100), k=st.integers(1, 2100), n=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_products_are_exact(device, m, k, n, seed):
    x, w = codes(m, k, seed=seed, device=device), codes(n, k, seed=seed + 1, device=device)
    exact = (x.cpu().double() @ w.cpu().double().t()).to(torch.int32)  # sums below 2**53 are exact
    for name, backend in backends(device).items():
        acc = backend.mm(x, backend.pack(w), n)
        assert acc.dtype == torch.int32
        assert torch.equal(acc.cpu(), exact), name


@on_devices
@pytest.mark.parametrize("k", [1040, 4096])
def test_products_are_exact_when_all_codes_are_extreme(device, k):
    # 1040 * 127 * 127 = 16_774_160 < 2**24 is the last K that one fp32 sum can hold; 4096 * 127 * 127 = 66_064_384.
    x, w = torch.full((3, k), 127, dtype=torch.int8, device=device), codes(8, k, device=device).fill_(-127)
    for name, backend in backends(device).items():
        assert torch.equal(
            backend.mm(x, backend.pack(w), 8).cpu(), torch.full((3, 8), -k * 16129, dtype=torch.int32)
        ), name


@on_devices
def test_the_code_minus_128_is_exact(device):
    # -128 * -128 * 2048 = 2**25; a sign trick or an int16 sum would lose it.
    x = torch.full((2, 2048), -128, dtype=torch.int8, device=device)
    for name, backend in backends(device).items():
        acc = backend.mm(x, backend.pack(x), 2)
        assert torch.equal(acc.cpu(), torch.full((2, 2), 2**25, dtype=torch.int32)), name


@on_devices
@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 40),
    k=st.integers(1, 1100),
    n=st.integers(1, 80),
    seed=st.integers(0, 2**31),
    magnitude=st.sampled_from([1e-42, 1e-37, 1e-6, 1.0, 1e4, 1e38]),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
)
def test_outputs_have_the_same_bits_in_every_backend(device, m, k, n, seed, magnitude, dtype, with_bias):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(m, k, generator=generator).clamp(-3, 3) * magnitude).to(dtype).to(device)
    weight_codes, scale = layer(n, k, device, seed)
    bias = torch.randn(n, generator=generator).to(dtype).to(device) if with_bias else None

    x_codes, token_scale = quantize_int8_token(x)
    acc = (x_codes.cpu().double() @ weight_codes.cpu().double().t()).float().to(device)  # |acc| < 2**53: rounded once
    expected = ((acc * scale.t()) * token_scale).to(dtype)
    expected = expected if bias is None else expected + bias
    for name, backend in backends(device).items():
        out = backend.linear(x, backend.pack(weight_codes), scale, bias)
        assert out.dtype == dtype
        assert torch.equal(bits(out), bits(expected)), name


@on_devices
def test_worked_numbers(device):
    # Token [1, -2, 0.5]: amax 2, scale 2/127; codes round(63.5) = 64 (half to even), -127, round(31.75) = 32.
    # Weight codes [10, 20, -30] with scale 0.5: acc = 640 - 2540 - 960 = -2860;
    # out = (-2860 * 0.5) * (2/127) = -22.519685; with bias 1: -21.519685.
    x = torch.tensor([[1.0, -2.0, 0.5]], device=device)
    w = torch.tensor([[10, 20, -30]], dtype=torch.int8, device=device)
    scale, bias = torch.tensor([[0.5]], device=device), torch.ones(1, device=device)
    for name, backend in backends(device).items():
        out = backend.linear(x, backend.pack(w), scale, bias)
        assert out.item() == pytest.approx(-21.519685, abs=2e-6), name


@on_devices
@in_dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_token_with_nan_or_inf_gives_nan_and_spares_the_others(device, dtype, bad):
    w, scale = layer(20, 33, device)
    clean = torch.randn(7, 33, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    x = clean.clone()
    x[3, 32] = bad
    others = [0, 1, 2, 4, 5, 6]
    for name, backend in backends(device).items():
        packed = backend.pack(w)
        out = backend.linear(x, packed, scale, torch.ones(20, dtype=dtype, device=device))
        reference = backend.linear(clean, packed, scale, torch.ones(20, dtype=dtype, device=device))
        assert out[3].isnan().all(), name
        assert torch.equal(bits(out[others]), bits(reference[others])), name


@on_devices
@in_dtypes
def test_a_zero_token_gives_the_bias(device, dtype):
    w, scale = layer(20, 33, device)
    bias = torch.arange(20, dtype=dtype, device=device)
    for name, backend in backends(device).items():
        packed = backend.pack(w)
        for zero in (0.0, -0.0):
            x = torch.full((2, 33), zero, dtype=dtype, device=device)
            assert torch.equal(bits(backend.linear(x, packed, scale, None)), bits(torch.zeros_like(bias).expand(2, 20)))
            assert torch.equal(backend.linear(x, packed, scale, bias), bias.expand(2, 20)), name


@on_devices
def test_a_token_is_the_same_alone_and_in_any_batch(device):
    w, scale = layer(50, 300, device)
    x = torch.randn(67, 300, generator=torch.Generator().manual_seed(3)).to(device)
    for name, backend in backends(device).items():
        packed = backend.pack(w)
        batch = backend.linear(x, packed, scale, None)
        alone = torch.cat([backend.linear(row, packed, scale, None) for row in x.split(1)])
        assert torch.equal(bits(batch), bits(alone)), name


@on_devices
def test_repack_writes_the_new_codes_into_the_same_storage(device):
    old, new = codes(21, 35, seed=1, device=device), codes(21, 35, seed=2, device=device)
    x = codes(4, 35, seed=3, device=device)
    for name, backend in backends(device).items():
        packed = backend.pack(old)
        address = packed.data_ptr()
        backend.repack_(packed, new)
        assert packed.data_ptr() == address
        assert torch.equal(backend.mm(x, packed, 21), backend.mm(x, backend.pack(new), 21)), name


@on_devices
def test_a_packed_weight_of_another_shape_is_refused(device):
    x, w = codes(4, 64, device=device), codes(32, 64, device=device)
    for backend in backends(device).values():
        with pytest.raises(ValueError, match="int8_pack"):
            backend.mm(x[:, :40], backend.pack(w), 32)
        with pytest.raises(ValueError, match="int8_pack"):
            backend.mm(x, backend.pack(w), 64)
        with pytest.raises(ValueError, match="int8_pack"):
            backend.repack_(backend.pack(w), w[:, :40])


@on_devices
def test_linear_takes_any_leading_shape_and_stride(device):
    w, scale = layer(24, 40, device)
    packed = kernels.int8_pack(w)
    x = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(4)).to(device).transpose(1, 2)  # [3, 5, 40]
    out = kernels.int8_linear(x, packed, scale)
    assert out.shape == (3, 5, 24)
    assert torch.equal(out.reshape(15, 24), kernels.int8_linear(x.reshape(15, 40).contiguous(), packed, scale))
    assert kernels.int8_linear(x[:0], packed, scale).shape == (0, 5, 24)
    assert kernels.int8_linear(x[0, 0], packed, scale).shape == (24,)


@on_devices
def test_mm_of_the_chosen_backend_is_exact(device):
    x, w = codes(5, 70, seed=1, device=device), codes(9, 70, seed=2, device=device)
    exact = (x.double() @ w.double().t()).to(torch.int32)
    packed = kernels.int8_pack(w)
    assert torch.equal(kernels.int8_mm(x, packed, 9), exact)
    kernels.int8_repack_(packed, -w)
    assert torch.equal(kernels.int8_mm(x, packed, 9), -exact)


def test_linear_makes_no_graph_and_works_in_inference_mode():
    w, scale = layer(24, 40)
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(5))
    for backend in backends("cpu").values():
        packed = backend.pack(w)
        out = backend.linear(x.clone().requires_grad_(), packed, scale, torch.zeros(24, requires_grad=True))
        assert not out.requires_grad
        with torch.inference_mode():
            assert torch.equal(backend.linear(x, packed, scale, None), out)


def test_autocast_does_not_round_the_products():
    w, scale = layer(24, 512)
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(6))
    for name, backend in backends("cpu").items():
        plain = backend.linear(x, backend.pack(w), scale, None)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(backend.linear(x, backend.pack(w), scale, None), plain), name


def test_wrong_dtypes_and_shapes_are_refused():
    w, scale = layer(8, 16)
    packed, x = kernels.int8_pack(w), torch.randn(2, 16)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        kernels.int8_linear(x.half(), packed, scale)
    codes, token_scale = torch.ones(2, 16, dtype=torch.int8), torch.ones(2, 1)
    with pytest.raises(TypeError, match="float32 or bfloat16, not"):
        kernels.int8_coded_linear(codes, token_scale, packed, scale, None, torch.float16)
    with pytest.raises(TypeError, match="weight_scale must be float32"):
        kernels.int8_linear(x, packed, scale.bfloat16())
    with pytest.raises(ValueError, match=r"\[N, 1\]"):
        kernels.int8_linear(x, packed, torch.ones(8, 2))
    with pytest.raises(ValueError, match="bias has 7 elements for 8"):
        kernels.int8_linear(x, packed, scale, torch.zeros(7))
    with pytest.raises(TypeError, match="int8"):
        kernels.int8_pack(w.float())
    with pytest.raises(ValueError, match="int32 accumulator"):
        kernels.int8_pack(torch.zeros(1, 131_072, dtype=torch.int8))


@needs_compiler
@pytest.mark.parametrize(
    "shape", [(1, 700, 60_000), (40, 600, 1800), (90, 1300, 700), (200, 500, 900), (2000, 130, 190)]
)
def test_any_split_over_threads_gives_the_same_bits(shape):
    m, k, n = shape  # 16 to 90 million products: several threads of 4 to 16 million
    w, scale = layer(n, k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(7))
    before = torch.get_num_threads()
    results = []
    try:
        for backend in native_kernels().values():
            packed = backend.pack(w)
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(bits(backend.linear(x, packed, scale, None)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@needs_compiler
def test_concurrent_calls_do_not_disturb_each_other():
    backend = native_kernels()["native"]
    jobs = []
    for seed in range(4):
        w, scale = layer(48 + seed, 64 + seed, seed=seed)
        x = torch.randn(9, 64 + seed, generator=torch.Generator().manual_seed(seed))
        jobs.append((x, backend.pack(w), scale, backend.linear(x, backend.pack(w), scale, None)))
    wrong: list[int] = []

    def repeat(index: int) -> None:
        x, packed, scale, expected = jobs[index]
        wrong.extend(index for _ in range(200) if not torch.equal(backend.linear(x, packed, scale, None), expected))

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_override_chooses_and_is_logged_once(fresh_choice, monkeypatch, caplog):
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "float")
    with caplog.at_level(logging.INFO, logger="lqrl.quant.kernels"):
        assert kernels.int8_backend("cpu") == "float"
        assert kernels.int8_backend("cpu") == "float"
    assert caplog.messages == ["int8 backend on cpu: float (LQRL_INT8_BACKEND is set)"]


def test_an_unknown_override_is_an_error(fresh_choice, monkeypatch):
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "cutlass")
    with pytest.raises(ValueError, match="'cutlass': choose one of native, torch, float"):
        kernels.int8_backend("cpu")


def test_the_native_kernel_is_for_the_cpu(fresh_choice, monkeypatch):
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "native")
    with pytest.raises(ValueError, match="CPU only"):
        kernels.int8_backend("cuda")


@needs_compiler
def test_the_cpu_gets_the_native_kernel(fresh_choice):
    assert kernels.int8_backend("cpu") == "native"


def test_cuda_gets_the_tensor_cores(fresh_choice):
    assert kernels.int8_backend("cuda") == "torch"


def test_without_a_compiler_the_fallback_is_said_aloud(fresh_choice, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="no C compiler on PATH"):
        assert kernels.int8_backend("cpu") == ("torch" if torch.cpu._is_vnni_supported() else "float")


def test_a_failed_build_is_an_error_when_native_was_asked_for(fresh_choice, monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no space left" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "native")
    with pytest.raises(native.BuildError, match="no space left"):
        kernels.int8_backend("cpu")
    assert list((tmp_path / "cache" / "lqrl").iterdir()) == []  # no half-made library stays


@needs_compiler
def test_the_library_is_built_once_and_rebuilt_when_damaged(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    builders = [threading.Thread(target=native.load) for _ in range(2)]
    for thread in builders:
        thread.start()
    for thread in builders:
        thread.join()
    (library,) = (tmp_path / "lqrl").iterdir()
    made = library.stat().st_mtime_ns
    assert native.load().path == library
    assert library.stat().st_mtime_ns == made

    whole = library.read_bytes()
    # Loading the last of these would kill the process. Each has a folder: a loaded library must not change.
    for place, damaged in enumerate((b"not a library", b"", whole[: len(whole) // 2])):
        folder = tmp_path / str(place) / "lqrl"
        folder.mkdir(parents=True, mode=0o700)
        (folder / library.name).write_bytes(damaged)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
        assert native.load().path.read_bytes() == whole


def test_a_cache_that_others_can_write_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / "lqrl"
    (tmp_path / "lqrl").chmod(0o777)
    assert native.cache_folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-such-place")
    assert native.cache_folder() is None


@needs_compiler
def test_a_kernel_with_wrong_results_is_refused(fresh_choice, monkeypatch, tmp_path):
    source = native.SOURCE.read_text()
    wrong = tmp_path / "int8_linear.c"
    wrong.write_text(source.replace("* info->scale[c]) * token_scale", "* info->scale[c]) * (token_scale * 1.001f)"))
    assert wrong.read_text() != source
    monkeypatch.setattr(native, "SOURCE", Path(wrong))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "native")
    with pytest.raises(native.SelfTestError, match="LQRL_INT8_BACKEND=float"):
        kernels.int8_backend("cpu")
