"""nf4 is bitsandbytes' format: its codes, its table, its bits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lora_models import built
from torch import nn

from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.learner.scorer import Scorer
from lqrl.modeling.backbone import load_model
from lqrl.quant import AlignedLinear, Lora, QuantizedLinear, QuantScheme, export_weights, prepare_
from lqrl.quant.adapters import adapter_layers
from lqrl.quant.methods.nf4 import NF4_LEVELS, Nf4
from lqrl.testing.models import tiny_config, tiny_moe_config
from lqrl.types import Prompt, SamplingParams

functional = pytest.importorskip("bitsandbytes.functional")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def weight(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(48, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    values[3, 64:128] = 0.0
    values[5, 7] = 100.0
    return values.to(device, dtype)


def test_the_table_is_that_of_bitsandbytes():
    assert torch.equal(torch.tensor(NF4_LEVELS), functional.get_4bit_type("nf4", device="cpu"))


@DTYPES
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_dequantized_weights_have_the_bits_of_bitsandbytes(dtype, out, device):
    w = weight(device, dtype)
    packed, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
    state.dtype = out
    ours = Nf4().quantize(w)
    assert torch.equal(ours["weight_packed"].flatten(), packed.flatten())
    assert torch.equal(Nf4().dequantize(ours, out), functional.dequantize_4bit(packed, state))


def test_a_block_by_hand(device):
    # 64 weights, the largest 2: levels 1 and -1 are +-2, level 7 is 0. 0.33 / 2 = 0.165 is nearest to level 9 (0.1609).
    w = torch.zeros(1, 64, device=device)
    w[0, :4] = torch.tensor([2.0, -2.0, 0.0, 0.33])
    tensors = Nf4().quantize(w)
    assert tensors["weight_scale"].tolist() == [[2.0]]
    assert tensors["weight_packed"][0, :3].tolist() == [15 * 16 + 0, 7 * 16 + 9, 7 * 16 + 7]
    assert Nf4().dequantize(tensors, torch.float32)[0, :4].tolist() == [2.0, -2.0, 0.0, 2 * torch.tensor(NF4_LEVELS)[9]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_has_no_scale(bad, device):
    w = weight(device, torch.float32)
    w[1, 70] = bad
    scale = Nf4().quantize(w)["weight_scale"]
    assert scale.isnan().nonzero().tolist() == [[1, 1]]


def test_a_zero_block_is_zero(device):
    tensors = Nf4().quantize(weight(device, torch.float32))
    assert tensors["weight_scale"][3, 1] == 0
    assert torch.all(Nf4().dequantize(tensors, torch.float32)[3, 64:128] == 0)


def test_a_block_of_two_rows_is_refused():
    with pytest.raises(ValueError, match="multiple of 64 inputs, got 96"):
        Nf4().quantize(torch.zeros(2, 96))


# ------------------------------------------------------------------------------------------------- layers and policies


@DTYPES
def test_the_layers_multiply_what_bitsandbytes_holds(dtype, device):
    plain = nn.Linear(256, 48)
    plain.weight.data = weight(torch.device("cpu"), torch.float32)
    plain = plain.to(device)
    engine = QuantizedLinear(copy.deepcopy(plain).to(dtype), Nf4())
    learner = AlignedLinear(plain, Nf4(), dtype)
    x = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    packed, state = functional.quantize_4bit(plain.weight.detach().to(dtype), blocksize=64, quant_type="nf4")
    expected = F.linear(x, functional.dequantize_4bit(packed, state), plain.bias.to(dtype))
    y = learner(x)
    assert y.device.type == device.type
    assert torch.equal(y, engine(x))
    assert torch.equal(y, expected)
    y.sum().backward()
    assert plain.weight.grad is not None
    assert torch.isfinite(plain.weight.grad).all()


def sampled_and_scored(policy, engine: TorchEngine, device: torch.device) -> torch.Tensor:
    """Differences of the log-probs of sampled tokens, in fp32."""
    completions = engine.generate([Prompt(0, (5, 6, 7))], SamplingParams(n=8, max_tokens=8), seed=0)[0]
    ids = torch.tensor([[5, 6, 7, *c.token_ids.tolist()] for c in completions], device=device)
    sampled = torch.stack([c.logprobs for c in completions]).cpu()
    with torch.no_grad():
        scored = Scorer(policy, 1.0, torch.float32).score(ids, torch.ones_like(ids, dtype=torch.bool))[:, 3:].cpu()
    return (scored - sampled).abs()


@pytest.mark.parametrize("config", [tiny_config("qwen3"), tiny_moe_config()], ids=["dense", "experts"])
def test_the_engine_samples_what_the_learner_scores(config, device):
    scheme = QuantScheme.preset("nf4")
    policy = load_model(config, dtype=torch.float32, seed=0, device=device)
    prepare_(policy, scheme, export_dtype=torch.float32)
    engine: TorchEngine = TorchEngineFactory()(EngineSpec(policy.config, scheme, torch.float32, device, 64, ()))
    for version in range(2):  # the second refresh quantizes weights that have moved
        engine.update_weights(export_weights(policy, scheme, export_dtype=torch.float32), policy_version=version)
        assert sampled_and_scored(policy, engine, device).mean() < 1e-4
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.01)


@pytest.mark.parametrize("refresh", ["adapter", "merge"])
def test_adapters_on_an_nf4_base(refresh, device):
    """QLoRA: layers equal bit for bit, log-probs up to the order of sums, and a gradient for every adapter."""
    pytest.importorskip("peft")
    policy, engine = built("nf4", Lora(r=4, refresh=refresh), torch.float32, device)
    for name, layer in adapter_layers(policy).items():
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1)).to(device)
        assert torch.equal(layer(x), engine.decoder.model.get_submodule(name)(x)), name
    assert sampled_and_scored(policy, engine, device).mean() < 1e-4
    ids = torch.arange(18, device=device).view(2, 9) + 3
    Scorer(policy, 1.0, torch.float32)(ids, torch.ones_like(ids, dtype=torch.bool)).sum().backward()
    for layer in adapter_layers(policy).values():
        assert layer.lora_A.weight.grad.abs().sum() > 0
        assert layer.weight.grad is None


# ------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@DTYPES
def test_the_gpu_has_the_scales_of_the_cpu_and_almost_all_codes(dtype):
    """Its kernel multiplies by an approximate reciprocal: a value on a boundary may fall to the neighboring level."""
    w = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    cpu, cuda = Nf4().quantize(w), {n: t.cpu() for n, t in Nf4().quantize(w.cuda()).items()}
    assert torch.equal(cuda["weight_scale"], cpu["weight_scale"])
    a, b = (torch.stack([t["weight_packed"] >> 4, t["weight_packed"] & 15]).int() for t in (cpu, cuda))
    assert (a - b).abs().max() <= 1
    assert (a != b).float().mean() < 1e-4
    assert torch.equal(
        Nf4().dequantize(cuda, dtype), Nf4().dequantize({n: t.cuda() for n, t in cuda.items()}, dtype).cpu()
    )


@pytest.mark.gpu
def test_a_side_stream_gives_the_same_codes():
    """bitsandbytes quantizes on the default stream: what is computed before and read after must wait."""

    def quantized() -> dict[str, torch.Tensor]:
        moved = w
        for _ in range(50):  # a queue that bitsandbytes would overtake
            moved = moved * 1.01
        return {n: t.clone() for n, t in Nf4().quantize(moved).items()}

    w, stream = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    expected = quantized()
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(stream):
            found = quantized()
        torch.cuda.synchronize()
        assert all(torch.equal(found[n], t) for n, t in expected.items())
