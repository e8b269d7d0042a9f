"""Checks of the kernels between a learner's products against autograd, on any device; see `decode_cases`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from decode_cases import streams
from interpreter import mend_interpreter, print_checks
from torch import Tensor
from triton_cases import DTYPES, same

from lqrl.learner.scorer import Scorer
from lqrl.quant.methods.base import TokenCodes


def draw(device: torch.device, *shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(got: Tensor, wanted: Tensor, where: str) -> None:
    """Off by rounding alone: ``wanted`` is in fp64."""
    assert got.shape == wanted.shape, where
    unit = 2.0**-7 if got.dtype == torch.bfloat16 else 2e-6
    error = (got.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)
    assert error <= unit, (where, float(error))


def outcome(policy, lengths: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Log-probs of random tokens in rows of these lengths, and the gradients of their sum."""
    device, ends = policy.device, torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(policy.config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    policy.zero_grad()
    logprobs = Scorer(policy, 1.0, dtype).score(ids.to(device), (torch.arange(max(lengths)) < ends).to(device))
    logprobs.sum().backward()
    return {"logprobs": logprobs.detach()} | {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


def check_rms_norm_gradient(device: torch.device) -> None:
    from lqrl.quant.triton_gradients import rms_norm_gradient

    shapes = [(1, 16), (5, 40), (37, 64)] if device.type == "cpu" else [(1, 128), (3000, 128), (777, 4096), (65, 8192)]
    for dtype in DTYPES:
        for rows, width in shapes:
            x, grad = (draw(device, rows, width, dtype=dtype, seed=s) for s in (1, 2))
            weight = draw(device, width, dtype=dtype, seed=3)
            wide = [t.double().requires_grad_() for t in (x, weight)]
            inverse = torch.rsqrt(wide[0].square().mean(1, keepdim=True) + 1e-6)
            wanted = torch.autograd.grad(wide[0] * inverse * wide[1], wide, grad.double())
            got = rms_norm_gradient(grad, x, weight, inverse.detach().float(), True)
            again = rms_norm_gradient(grad, x, weight, inverse.detach().float(), True)
            for a, b, c, name in zip(got, again, wanted, ("x", "weight"), strict=True):
                assert a is not None
                assert b is not None
                close(a, c, f"{name} {dtype} {rows} {width}")
                assert torch.equal(a, b), f"{name} {dtype} {rows} {width}"
            assert rms_norm_gradient(grad, x, weight, inverse.detach().float(), False)[1] is None


def check_silu_mul_gradient(device: torch.device) -> None:
    from lqrl.quant.triton_gradients import silu_mul_gradient

    for dtype in DTYPES:
        for rows, width in [(3, 16), (2, 1030), (0, 8)]:
            gate, up, grad = (draw(device, rows, width, dtype=dtype, seed=s) * 3 for s in (1, 2, 3))
            wide = [t.double().requires_grad_() for t in (gate, up)]
            wanted = torch.autograd.grad(F.silu(wide[0]) * wide[1], wide, grad.double())
            for a, b in zip(silu_mul_gradient(grad, gate, up), wanted, strict=True):
                if rows:
                    close(a, b, f"{dtype} {rows} {width}")


def check_rotate(device: torch.device) -> None:
    """Forward the bits of transformers' own code; backward autograd's gradient of it."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    from lqrl.quant.triton_gradients import rotate

    for dtype in DTYPES:
        for tokens, heads, width in [(5, 3, 16), (2, 1, 10), (7, 40, 64)]:
            x = draw(device, tokens, heads, width + 6, dtype=dtype, seed=1)[..., :width]
            grad = draw(device, tokens, heads, width, dtype=dtype, seed=2)
            angles = draw(device, tokens, width, dtype=torch.float32, seed=3) * 9  # both halves of their own
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

            def turned(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
                heads_first = x.transpose(0, 1)[None]
                return apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])[0][0].transpose(0, 1)

            where = f"{dtype} {tokens} {heads} {width}"
            assert torch.equal(rotate(x, cos, sin), turned(x)), where
            wide = x.double().requires_grad_()
            wanted = torch.autograd.grad(turned(wide, cos.double(), sin.double()), wide, grad.double())[0]
            close(rotate(grad, cos, sin, back=True), wanted, where)


def check_logprobs(device: torch.device) -> None:
    """Log-probs and the gradient of logits as autograd has them in fp64."""
    from lqrl.quant import triton_logprobs as t

    vocabularies = (5, 5000) if device.type == "cpu" else (5, 4096, 151936)
    for vocabulary in vocabularies:
        for temperature in (1.0, 0.7):
            logits = draw(device, 6, vocabulary, dtype=torch.float32, seed=vocabulary) * 8
            logits[1, 1:] = -torch.inf
            logits[2, : vocabulary // 2] = -torch.inf
            targets = torch.tensor([0, 0, vocabulary - 1, 3, 4, 1], device=device)
            grad = draw(device, 6, dtype=torch.float32, seed=1)
            wide = logits.double().requires_grad_()
            tempered = wide / temperature
            wanted = tempered.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
            true = torch.autograd.grad(wanted, wide, grad.double())[0]
            where = f"{vocabulary} {temperature}"
            got, partition = t.logprobs(logits, targets, temperature)
            torch.testing.assert_close(got.double(), wanted.detach(), rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(partition.double(), tempered.detach().logsumexp(1), rtol=2e-6, atol=2e-6)
            assert torch.equal(got, t.logprobs(logits, targets, temperature)[0]), where
            for dtype in DTYPES:
                close(t.slope(logits.clone(), targets, partition, grad, temperature, dtype), true, f"{where} {dtype}")
            logits[0, vocabulary - 1], logits[3, 0] = torch.nan, torch.inf
            odd = t.logprobs(logits, targets, temperature)[0].isnan()
            assert odd.tolist() == [True, False, False, True, False, False], where
            assert t.logprobs(logits[:0], targets[:0], temperature)[0].shape == (0,)


def check_layers(device: torch.device) -> None:
    """Log-probs and gradients of a decoder with fused layers, against those of transformers' layers."""
    from transformers import Qwen3Config

    from lqrl.modeling import fused
    from lqrl.modeling.backbone import load_model
    from lqrl.quant import triton_use

    config = Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    policy = load_model(config, dtype=torch.float32, device=device, seed=0)
    lengths = [9, 4, 7]
    plain = outcome(policy, lengths, torch.float32)
    assert fused.fuse_layers_(policy) == 2 * 6 + 1
    usual = fused.use_triton, triton_use.serves
    fused.use_triton = triton_use.serves = lambda *_: True  # which on the CPU is the interpreter's business alone
    try:
        found = outcome(policy, lengths, torch.float32)
    finally:
        fused.use_triton, triton_use.serves = usual
    assert found.keys() == plain.keys()
    for name, wanted in plain.items():
        error = (found[name] - wanted).abs().max() / wanted.abs().max()
        assert error <= 2e-5, (name, float(error))


def check_kept_rows(device: torch.device) -> None:
    """What a learner keeps, and its codes: the bits of the norm or gated SiLU alone, and of a quantizer after it."""
    from lqrl.quant import triton_exact_rows, triton_quantize
    from lqrl.quant import triton_norm_quantize as t

    shapes = [(5, 40), (9, 24)]
    if device.type == "cuda":
        shapes = [(m, width) for width in (1024, 4096, 5120, 100) for m in (8, 257)]
    quantizers: list[tuple[TokenCodes, Callable[[Tensor], tuple[Tensor, Tensor]]]] = [
        ("int8", lambda x: triton_quantize.quantize_int8_rows(x, 127.0, 0.0)),
        ("fp8_e4m3", triton_quantize.quantize_fp8_rows),
    ]
    for dtype in DTYPES:
        for m, width in shapes:
            x, _, weight = streams(device, m, width, dtype)
            for kind, quantize in quantizers:
                where = f"{kind} {dtype} {m} {width}"
                out, inverse, coded = t.rms_norm_kept(x[None], weight, 1e-6, kind)
                assert out.shape == (1, m, width)
                normed = triton_exact_rows.rms_norm(x[None].contiguous(), weight, 1e-6)
                same((out, inverse, *coded), (*normed, *quantize(normed[0][0])), where)
        for m, width, held in [(5, 96, 4), (5, 2500, 4), (5, 9728, 1)]:
            gate, up, _ = streams(device, m, width, dtype)
            gated = triton_exact_rows.silu_mul(gate, up)
            for a, b in ((gate, up), torch.cat([gate, up], 1).split(width, 1)):
                for kind, quantize in quantizers:
                    out, coded = t.silu_mul_kept(a, b, kind, held)
                    same((out, *coded), (gated, *quantize(gated)), f"{kind} {dtype} {m} {width}")


def check_products_apart(device: torch.device) -> None:
    """Several layers' outputs from one launch: the bits of a launch each, each a matrix of its own."""
    from lqrl.quant import triton_scaled as t
    from lqrl.quant.triton_tiles import Tile

    small = device.type == "cpu"
    k, unit = (64, 16) if small else (1024, 256)
    tiles = [Tile(16, unit, 32 if small else 128, 4, 3), Tile(32, 16, 32, 4, 3, tall=True)]
    if not small:
        tiles = [Tile(128, 256, 128, 8, 3, tma=True), Tile(64, 64, 128, 4, 3), Tile(16, 64, 128, 4, 3, tall=True)]
    for parts in ((2, 1, 1), (3, 3), (1, 2)):
        for m in (1, 37) if small else (8, 300, 5000):
            widths = [unit * part for part in parts]
            generator = torch.Generator().manual_seed(m)
            codes, weight = (
                torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator).to(device)
                for n in (m, sum(widths))
            )
            token, scale = (torch.rand(n, 1, generator=generator).to(device) + 0.1 for n in (m, sum(widths)))
            for tile in tiles:
                for bias in (None, scale[:, 0] * 99):
                    got = t.gemm_apart(codes, weight, scale, token, bias, widths, torch.bfloat16, tile)
                    assert all(out.is_contiguous() for out in got)
                    biases = [None] * len(widths) if bias is None else bias.split(widths)
                    each = zip(weight.split(widths), scale.split(widths), biases, strict=True)
                    wanted = [t.gemm(codes, w, s, token, b, torch.bfloat16, tile) for w, s, b in each]
                    same(got, wanted, f"{widths} {m} {tile}")
    assert not t.parts_fit([unit, unit + 8], tiles[0])
    assert not t.parts_fit([unit, unit], Tile(16, unit, 32, 4, 3, splits=2))


def check_aligned_layers(device: torch.device) -> None:
    """Aligned decoders with codes from norms and SiLU: the bits of quantizers of their own, launches saved."""
    from transformers import Qwen2Config

    from lqrl.modeling import fused
    from lqrl.modeling.backbone import load_model
    from lqrl.modeling.recompute import recompute_layers_
    from lqrl.quant import QuantScheme, prepare_, shared_input, triton_int8
    from lqrl.quant.triton_tiles import Tile

    config = Qwen2Config(  # biases of query, key and value alone
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    lengths = [5, 4]
    with ExitStack() as patches:
        patches.enter_context(patch.object(triton_int8, "TILES", [(2**31, 0, Tile(16, 16, 32, 4, 2))]))
        if device.type == "cpu":
            patches.enter_context(as_on_a_gpu())
        for name in ("int8_w8a8", "fp8_per_channel"):
            policy = load_model(config, dtype=torch.bfloat16, device=device, seed=0)
            prepare_(policy, QuantScheme.preset(name), export_dtype=torch.bfloat16)
            fused.fuse_layers_(policy)
            with torch.no_grad():
                for key, parameter in policy.named_parameters():
                    parameter.add_(0.1 if key.endswith("bias") else 0)
            with counted(fused, shared_input) as counts:
                found = outcome(policy, lengths, torch.bfloat16)
            assert counts["quantized"] == 0, counts
            assert counts["carried"] == 3, counts
            assert counts["apart"] == (2 if name == "int8_w8a8" else 0), counts
            with patch.object(fused, "shared_codes", lambda *_: None):  # no codes travel, layers quantize together
                alone = outcome(policy, lengths, torch.bfloat16)
                with patch.object(shared_input, "shared_codes", lambda *_: None):  # each layer quantizes
                    plain = outcome(policy, lengths, torch.bfloat16)
            alike(found, alone, name, device.type == "cpu")
            alike(found, plain, name, False)
            recompute_layers_(policy.train())
            again = outcome(policy, lengths, torch.bfloat16)
            alike(again, found, f"{name}, recomputed", device.type == "cpu")


def alike(found: dict[str, Tensor], wanted: dict[str, Tensor], where: str, bits: bool) -> None:
    """Log-probs of the same bits, and so the gradients or near them: on a GPU those of attention are added as it comes.

    The gradient of an input that layers share is rounded fewer times than theirs alone.
    """
    assert found.keys() == wanted.keys(), where
    assert torch.equal(found["logprobs"], wanted["logprobs"]), where
    for key, true in wanted.items():
        if key.endswith("k_proj.bias") and not bits:
            continue  # softmax does not see it: rounding is all there is
        error = (found[key].float() - true.float()).abs().max() / true.float().abs().max()
        assert error <= (0 if bits else 4e-2), (where, key, float(error))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Send a CPU's tensors to the kernels, which is the interpreter's business alone."""
    from lqrl.modeling import fused
    from lqrl.quant import kernels, rows, triton_use
    from lqrl.quant.methods import integer

    with ExitStack() as patches:
        for module in (fused, kernels, rows, integer):
            patches.enter_context(patch.object(module, "use_triton", lambda *_: True))
        patches.enter_context(patch.object(triton_use, "serves", lambda *_: True))
        patches.enter_context(patch.dict(kernels._chosen, {"cpu": kernels.TorchBackend()}))
        yield


@contextmanager
def counted(*modules: Any) -> Iterator[dict[str, int]]:
    """How often codes are carried, tokens are quantized in `products`, and layers multiplied at once."""
    from lqrl.quant import triton_int8

    counts = {"carried": 0, "quantized": 0, "apart": 0}

    def counting(key: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            got = function(*args)
            counts[key] += got is not None or key == "carried"
            return got

        return call

    fused, shared_input = modules
    places = [(fused, "carry", "carried"), (triton_int8, "apart", "apart")]
    places += [(shared_input, f"quantize_{kind}_token", "quantized") for kind in ("int8", "fp8")]
    with ExitStack() as patches:
        for module, name, key in places:
            patches.enter_context(patch.object(module, name, counting(key, getattr(module, name))))
        yield counts


def check_trial(device: torch.device) -> None:
    """What a run tries before it relies on these kernels."""
    from lqrl.modeling import trial

    trial._try_kernels(device)


CHECKS: dict[str, Callable[[torch.device], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_rms_norm_gradient,
        check_silu_mul_gradient,
        check_rotate,
        check_logprobs,
        check_trial,
        check_layers,
        check_kept_rows,
        check_products_apart,
        check_aligned_layers,
    )
}


def main() -> None:
    warnings.simplefilter("ignore")
    mend_interpreter()
    print_checks(CHECKS)


if __name__ == "__main__":
    main()
