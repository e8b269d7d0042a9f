"""Products of a few rows on Hopper: the cuts, the compiled code, and on a GPU the bits."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lqrl.quant import exact, fp8_gemm, hopper_gemm, hopper_source, kernels
from lqrl.quant.cuda_driver import OutOfDeviceMemory
from lqrl.quant.hopper_cuts import MOST_ROWS, cut_for, microseconds
from lqrl.quant.hopper_source import Cut, Kind

KINDS: tuple[Kind, ...] = ("bf16", "e4m3", "int8")
CUTS = [
    Cut(groups, rows, splits, 3)
    for groups, rows, splits in product((1, 2, 3), (16, 32, 64, 128, 256), (1, 2, 4))
    if rows // splits % 16 == 0
]


def hopper() -> torch.device:
    if not torch.cuda.is_available() or not hopper_gemm.serves(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    return torch.device("cuda")


@pytest.mark.parametrize("wrong", [(0, 64, 1), (4, 64, 1), (1, 48, 1), (1, 64, 3), (1, 32, 4), (2, 16, 2)])
def test_cuts_that_the_kernel_does_not_know_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="Cut"):
        Cut(*wrong, 4)


@given(st.sampled_from(KINDS), st.integers(1, 400), st.integers(1, 4000), st.integers(1, 2000))
def test_a_chosen_cut_is_one_that_runs(kind: Kind, m: int, n: int, k: int) -> None:
    cut = cut_for(kind, m, 8 * n, 16 * k)
    if m > MOST_ROWS:
        assert cut is None
    if cut is None:
        return
    steps = -(-16 * k * (2 if kind == "bf16" else 1) // hopper_source.STEP_BYTES)
    assert 2 <= cut.stages <= steps // cut.splits
    assert cut.shared_bytes <= 227 * 1024
    assert kind != "e4m3" or cut.splits == 1, "splits would change the bits of e4m3"


def test_measured_choices() -> None:
    assert cut_for("int8", 256, 24576, 4096) == Cut(3, 256, 1, 4), "128 blocks fill the card"
    assert cut_for("bf16", 256, 4096, 12288) == Cut(1, 256, 2, 5), "so do 64 pairs"
    assert cut_for("bf16", 256, 6144, 4096) is None, "96 blocks do not, and cuBLAS is faster"
    assert cut_for("e4m3", 256, 51200, 5120) is None
    assert cut_for("e4m3", 64, 4096, 4096) == Cut(1, 64, 1, 12)
    fast, slow = (microseconds("int8", Cut(1, 64, splits, 6), 64, 1024, 3072) for splits in (4, 1))
    assert fast < slow, "sixteen blocks leave most of the card idle"


def test_off_the_gpu_it_is_a_linear_layer() -> None:
    x, weight = torch.randn(4, 32), torch.randn(8, 32)
    assert torch.equal(hopper_gemm.plain_linear(x, weight), F.linear(x, weight))
    assert not hopper_gemm.serves(torch.device("cpu"))
    assert hopper_gemm.cut_of(x.bfloat16(), weight.bfloat16()) is None


@pytest.mark.parametrize(("kind", "gated"), [*((kind, False) for kind in KINDS), ("bf16", True)])
def test_the_code_waits_for_no_instruction_and_keeps_sums_in_registers(kind: Kind, gated: bool) -> None:
    for cut in CUTS:
        try:
            code, said = hopper_source.machine_code(kind, cut, gated, ("--ptxas-options=-v",))
        except hopper_source.CompilerMissing as error:
            pytest.skip(str(error))
        assert code.startswith(b"\x7fELF")
        assert "wgmma" not in said, f"{cut}: {said}"  # warnings of ptxas about instructions one after the other
        spilled = re.search(r"(\d+) bytes spill stores", said)
        assert spilled is not None
        assert int(spilled[1]) <= 32, f"{cut}: {said}"


def operands(kind: Kind, m: int, n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(m + n + k)
    x, w = (torch.randn(rows, k, device=device, generator=generator) for rows in (m, n))
    token, weight = (torch.rand(rows, 1, device=device, generator=generator) + 0.5 for rows in (m, n))
    if kind == "bf16":
        return x.bfloat16(), w.bfloat16(), token, weight
    if kind == "e4m3":
        return x.mul(50).to(torch.float8_e4m3fn), w.mul(50).to(torch.float8_e4m3fn), token, weight
    return x.mul(40).to(torch.int8), w.mul(40).to(torch.int8), token, weight


def reference(kind: Kind, x: Tensor, w: Tensor, token: Tensor, weight: Tensor) -> Tensor:
    """The library's product, padded to what it takes."""
    if kind == "bf16":
        return F.linear(x, w)
    if kind == "e4m3":
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x, w.t(), token, weight.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True
        )
    acc = kernels.TorchBackend().mm(x, w, len(w))
    return acc.float().mul_(weight.view(1, -1)).mul_(token).bfloat16()


SHAPES = [(256, 768, 1024), (37, 272, 1040), (1, 4096, 512), (100, 1024, 4096), (250, 208, 272)]
CHAINS = [(256, 768, 1024), (37, 272, 1040)]
"""For which cuBLAS adds up along K, too."""


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuts_have_the_bits_of_one_chain_of_sums(kind: Kind, shape: tuple[int, int, int]) -> None:
    device = hopper()
    x, w, token, weight = operands(kind, *shape, device)
    scales = () if kind == "bf16" else (token, weight)
    library, chain = reference(kind, x, w, token, weight), hopper_gemm.linear(x, w, CUTS[0], *scales)
    if kind == "int8" or shape in CHAINS:
        assert torch.equal(chain, library)
    true = x.double() @ w.double().t()
    if scales:
        true = true * weight.view(1, -1).double() * token.double()
    for cut in CUTS:
        if -(-shape[2] * x.itemsize // hopper_source.STEP_BYTES) < cut.splits:
            with pytest.raises(ValueError, match="too few"):
                hopper_gemm.linear(x, w, cut, *scales)
            continue
        got = hopper_gemm.linear(x, w, cut, *scales)
        if kind == "int8" or cut.splits == 1:
            assert torch.equal(got, chain), cut
        else:  # another order of the sums; tensor cores keep few bits of e4m3's
            error = float((got.double() - true).norm() / true.norm())
            assert error < (4e-3 if kind == "e4m3" else 2.5e-3), (cut, error)
        assert torch.equal(got, hopper_gemm.linear(x, w, cut, *scales)), f"{cut}: two runs differ"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_graph_it_waits_for_what_makes_its_input(kind: Kind) -> None:
    device = hopper()
    x, w, token, weight = operands(kind, 64, 4096, 4096, device)
    scales = () if kind == "bf16" else (token, weight)
    source, moving = x.clone(), torch.zeros_like(x)
    spread = torch.empty(1 << 26, device=device)
    cut = hopper_gemm.cut_of(x, w)
    assert cut is not None
    hopper_gemm.linear(x, w, cut, *scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), hopper_gemm.early_products():
        outs = []
        for _ in range(4):
            moving.copy_(torch.zeros_like(x))
            spread.fill_(1.0)  # long enough for a product that does not wait to read zeros
            moving.copy_(source)
            outs.append(hopper_gemm.linear(moving, w, cut, *scales))
    for seed in range(5):
        source.copy_(operands(kind, 64, 4096, 4096 + 16 * seed, device)[0][:, :4096])
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            assert torch.equal(out, hopper_gemm.linear(source, w, cut, *scales))


@pytest.mark.gpu
def test_a_graph_of_others_may_write_a_weight_right_before_its_product() -> None:
    device = hopper()
    x, w, *_ = operands("bf16", 64, 4096, 4096, device)
    held, spread = torch.zeros_like(w), torch.empty(2**26, device=device)
    cut = hopper_gemm.cut_of(x, held)
    assert cut is not None
    hopper_gemm.linear(x, held, cut)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spread.fill_(1.0)
        held.copy_(w)
        out = hopper_gemm.linear(x, held, cut)
    for _ in range(5):
        held.zero_()
        graph.replay()
        assert torch.equal(out, hopper_gemm.linear(x, w, cut))


def test_operands_that_do_not_fit_are_refused() -> None:
    x, w, cut = torch.ones(4, 64).bfloat16(), torch.ones(16, 64).bfloat16(), Cut(1, 16, 1, 2)
    for operands, reason in (
        ((x, torch.ones(16, 128).bfloat16()), r"\[4, 64\] and \[16, 128\]"),
        ((x, w.to(torch.int8)), "must both be bf16, e4m3 or int8"),
        ((x.float(), w.float()), "must both be bf16, e4m3 or int8"),
        ((x, w.t().contiguous().t()), "contiguous"),
        ((x[:, :60].contiguous(), w[:, :60].contiguous()), "pieces of 16 bytes"),
        ((x, w[:12]), "pieces of 16 bytes"),
    ):
        with pytest.raises(ValueError, match=reason):
            hopper_gemm.linear(*operands, cut)
    codes = torch.ones(4, 64).to(torch.int8), torch.ones(16, 64).to(torch.int8)
    with pytest.raises(ValueError, match=r"need 4 and 16 scales on cpu, bf16 none: got \[\(\[3\], 'cpu'\), None\]"):
        hopper_gemm.linear(*codes, cut, torch.ones(3))
    with pytest.raises(ValueError, match="bf16 none"):
        hopper_gemm.linear(x, w, cut, torch.ones(4), torch.ones(16))


@pytest.mark.gpu
def test_a_cut_that_does_not_compile_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    device = hopper()
    x, w, *_ = operands("bf16", 48, 1024, 1024, device)

    def refuse(*_: object) -> bytes:
        raise hopper_source.CompilerMissing("refused")

    with monkeypatch.context() as patch:
        patch.setattr(hopper_gemm, "_code", refuse)
        patch.setattr(hopper_gemm, "_functions", {})
        patch.setattr(hopper_gemm, "_refused", set())
        assert all(torch.equal(hopper_gemm.plain_linear(x, w), F.linear(x, w)) for _ in range(2))
    assert caplog.text.count(": refused") == 1
    assert hopper_gemm.cut_of(x, w) is not None


@pytest.mark.gpu
def test_a_lack_of_memory_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    device = hopper()

    def full(*_: object) -> int:
        raise OutOfDeviceMemory("no room for a module")

    hopper_gemm._obstacle.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(hopper_gemm, "_function", full)
        assert not hopper_gemm.serves(device)
    assert hopper_gemm.serves(device)


@pytest.mark.gpu
def test_formats_take_it_and_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = hopper()
    for m in (1, 8, 64, 100, 256):
        x, w, token, weight = operands("e4m3", m, 1024, 2048, device)
        assert hopper_gemm.cut_of(x, w) is not None
        wanted = reference("e4m3", x, w, token, weight)
        got = fp8_gemm.row_scaled(x, token, w, weight, torch.bfloat16)
        assert m == 1 or torch.equal(got, wanted)
        x, w, token, weight = operands("int8", m, 1024, 2048, device)
        bias = torch.randn(1024, device=device)
        got = kernels.int8_coded_linear(x, token, w, weight, bias, torch.bfloat16)
        assert torch.equal(got, reference("int8", x, w, token, weight) + bias.bfloat16())
    monkeypatch.setattr(hopper_gemm, "cut_of", lambda x, w: None)
    assert torch.equal(got, kernels.int8_coded_linear(x, token, w, weight, bias, torch.bfloat16))


@pytest.mark.gpu
def test_gated_products_have_the_bits_of_their_steps() -> None:
    device = hopper()
    for m, n, k in ((256, 768, 1024), (37, 272, 1040), (100, 1536, 512)):
        x, w, *_ = operands("bf16", m, n, k, device)
        for cut in CUTS:
            gate, up = hopper_gemm.linear(x, w, cut).split(n // 2, -1)
            assert torch.equal(hopper_gemm.linear(x, w, cut, gated=True), exact.silu_mul(gate, up)), (cut, m, n, k)
    assert hopper_gemm.gated_linear(x, w) is not None
    assert hopper_gemm.gated_linear(x[:8], w) is None


@pytest.mark.gpu
def test_silu_has_the_bits_of_the_triton_kernel_for_every_gate() -> None:
    device = hopper()
    gates = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.bfloat16)
    gates = gates[gates.isfinite()]
    gates = F.pad(gates, (0, -len(gates) % 64)).view(-1, 64)  # rows of an identity give them back as they are
    eye = torch.eye(64, device=device, dtype=torch.bfloat16)
    ups = torch.full_like(gates, 1.5)
    for rows, up in zip(gates.split(256), ups.split(256), strict=True):
        x = torch.cat([rows, up], 1).contiguous()
        w = torch.zeros(128, 128, device=device, dtype=torch.bfloat16)
        w[:64, :64], w[64:, 64:] = eye, eye
        got = hopper_gemm.linear(x, w, Cut(1, 64, 1, 2), gated=True)
        assert torch.equal(got, exact.silu_mul(rows.contiguous(), up.contiguous()))


@pytest.mark.gpu
def test_another_thread_has_a_context() -> None:
    device = hopper()
    x, w, *_ = operands("bf16", 64, 1024, 1024, device)
    wanted = hopper_gemm.plain_linear(x, w)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(hopper_gemm.plain_linear, x, w).result(), wanted)


def test_a_missing_library_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13"')

    monkeypatch.setattr(hopper_source, "_nvrtc", lambda: SimpleNamespace(nvrtcCreateProgram=fails))
    with pytest.raises(hopper_source.CompilerMissing, match="pip install nvidia-cuda-nvrtc"):
        hopper_source.machine_code("bf16", CUTS[0])


def test_compiling_leaves_shared_bytes_alone() -> None:
    try:
        hopper_source.machine_code("bf16", CUTS[0])
    except hopper_source.CompilerMissing as error:
        pytest.skip(str(error))
    assert bytes([32]) == b" "
    assert bytes([32])[0] == 32
