"""Checks of the kernels between a learner's products against autograd, on any device; see `decode_cases`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from interpreter import mend_interpreter, print_checks
from torch import Tensor
from triton_cases import DTYPES

from lqrl.learner.scorer import Scorer


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
    )
}


def main() -> None:
    warnings.simplefilter("ignore")
    mend_interpreter()
    print_checks(CHECKS)


if __name__ == "__main__":
    main()
