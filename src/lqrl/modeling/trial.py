"""Kernels that are tried once on a GPU before a learner relies on them: one that is wrong there is left out, loudly."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lqrl.quant import triton_use

log = logging.getLogger(__name__)

_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}  # of the largest element


@torch.inference_mode(False)
@torch.enable_grad()
def works(what: str, device: torch.device, attempt: Callable[[], None]) -> bool:
    """Whether ``attempt`` raises nothing; a warning says what it raised, and that ``what`` is done without.

    Args:
        what: for the warning, such as "fused layers".
        device: a GPU.
        attempt: raises where something is wrong.
    """
    try:
        attempt()
    except Exception as error:
        log.warning(
            "%s do not work on %s with torch %s and are left out: %s: %s",
            what,
            torch.cuda.get_device_name(device) if device.type == "cuda" else device,
            torch.__version__,
            type(error).__name__,
            error,
        )
        return False
    return True


def compare(name: str, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Raise unless tensors are near what is wanted of them, as near as their dtype lets one expect.

    Raises:
        RuntimeError: naming what is off.
    """
    for place, (x, y) in enumerate(zip(got, wanted, strict=True)):
        x, y = x.detach(), y.detach()
        error = float((x.float() - y.float()).abs().max() / y.float().abs().max())
        if not error <= _CLOSE[x.dtype]:
            raise RuntimeError(f"result {place} of {name} is off by {error:.1e} of its size in {x.dtype}")


@functools.cache
def kernels_work(device: torch.device) -> bool:
    """Whether Triton serves ``device`` and the learner's kernels give what autograd gives there."""
    return triton_use.serves(device) and works("fused layers of the learner", device, lambda: _try_kernels(device))


def _try_kernels(device: torch.device) -> None:
    from lqrl.quant import triton_gradients, triton_logprobs

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    for dtype in (torch.float32, torch.bfloat16):
        a, b, grad, weight = (draw(5, 64).to(dtype) for _ in range(4))
        wide = [x.float().requires_grad_() for x in (a, b, weight[0])]
        inverse = torch.rsqrt(wide[0].square().mean(1, keepdim=True) + 1e-6)
        wanted = torch.autograd.grad(wide[0] * inverse * wide[2], (wide[0], wide[2]), grad.float())
        d_x, d_weight = triton_gradients.rms_norm_gradient(grad, a, weight[0], inverse.detach(), True)
        assert d_weight is not None
        compare("a norm's gradient", (d_x, d_weight), wanted)
        wanted = torch.autograd.grad(F.silu(wide[0]) * wide[1], wide[:2], grad.float())
        compare("a gated SiLU's gradient", triton_gradients.silu_mul_gradient(grad, a, b), wanted)
        cos, sin = b.cos(), b.sin()
        turned = torch.cat([-a[:, 32:], a[:, :32]], 1).float() * sin.float() + a.float() * cos.float()
        back = torch.cat([(grad * sin)[:, 32:], -(grad * sin)[:, :32]], 1).float() + grad.float() * cos.float()
        got = (triton_gradients.rotate(x[:, None], cos, sin, back=r)[:, 0] for x, r in ((a, False), (grad, True)))
        compare("a rotation", tuple(got), (turned, back))
    logits, targets = draw(3, 5000) * 4, torch.tensor([0, 77, 4999], device=device)
    wide = logits.clone().requires_grad_()
    wanted = (wide / 0.7).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    slope = torch.autograd.grad(wanted, wide, grad[0, :3].float())[0]
    found, partition = triton_logprobs.logprobs(logits, targets, 0.7)
    made = triton_logprobs.slope(logits.clone(), targets, partition, grad[0, :3], 0.7, torch.bfloat16)
    compare("log-probs", (found, made), (wanted, slope))
