"""`MuonAdamW`: orthogonal steps for a model's weight matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

EMBEDDINGS = ("*embed_tokens*", "*lm_head*")
"""Input embedding and output head, whose rows are tokens."""

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Odd polynomial ``a x + b x^3 + c x^5`` that takes singular values in (0, 1] near 1 in five rounds (Jordan, 2024)."""


class MuonAdamW(torch.optim.Optimizer):
    """Muon on weight matrices, AdamW on embeddings, head, norms and biases, with one learning rate.

    Muon (Jordan, 2024) steps along the momentum of a matrix with all its singular values set to about 1. Here that step
    is multiplied by ``0.2 * sqrt(max(rows, columns))``, which gives it the root mean square of AdamW's (Moonlight,
    arXiv 2502.16982): learning rate and decay mean the same on both sides. A matrix steps as under ``torch.optim.Muon``
    with ``adjust_lr_fn="match_rms_adamw"``, which takes nothing but matrices.

    Experts that are stacked in one parameter ``[E, rows, columns]`` are ``E`` matrices; the gate and up that
    transformers keeps as one are one. Memory: 12 bytes for an element of a matrix with its gradient, 16 elsewhere.

    Args:
        params: named float32 parameters, as ``named_parameters()`` gives them; or groups of them.
        lr, weight_decay: of both.
        momentum: of Muon, with Nesterov's look ahead.
        newton_schulz_steps: rounds of the iteration that finds the orthogonal factor, in bf16.
        betas, eps: of AdamW.
        adamw_names: fnmatch patterns of parameters that AdamW takes although they are matrices.

    Raises:
        ValueError: for a value out of range, parameters without names, or of another dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        momentum: float = 0.95,
        newton_schulz_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_names: tuple[str, ...] = EMBEDDINGS,
    ) -> None:
        if lr < 0 or weight_decay < 0 or eps < 0 or newton_schulz_steps < 1:
            raise ValueError(
                "MuonAdamW needs lr, weight_decay, eps >= 0 and newton_schulz_steps >= 1; got "
                f"lr={lr}, weight_decay={weight_decay}, eps={eps}, newton_schulz_steps={newton_schulz_steps}"
            )
        if not all(0 <= beta < 1 for beta in (momentum, *betas)):
            raise ValueError(f"MuonAdamW needs momentum and betas in [0, 1), got {momentum} and {tuple(betas)}")
        self.adamw_names, self.newton_schulz_steps = tuple(adamw_names), newton_schulz_steps
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": tuple(betas), "eps": eps}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add named parameters; see the class for what they must be."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if "param_names" not in group:
            raise ValueError(
                "MuonAdamW tells embeddings from matrices by name: give it named_parameters() instead of parameters()"
            )
        odd = {p.dtype for p in group["params"]} - {torch.float32}
        if odd:
            raise ValueError(
                f"MuonAdamW is for float32 parameters, these are {', '.join(sorted(map(str, odd)))}: set master_dtype: "
                "float32, or use lqrl.learner.KahanAdamW"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            others = []
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is None:
                    continue
                if self.is_matrix(name, parameter):
                    self._step_matrix(parameter, group)
                else:
                    others.append(parameter)
            self._step_others(others, group)
        return loss

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Whether Muon takes this parameter."""
        return parameter.ndim in (2, 3) and not any(fnmatchcase(name, pattern) for pattern in self.adamw_names)

    def _step_matrix(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        direction = orthogonal_factor(gradient.lerp(state["momentum"], group["momentum"]), self.newton_schulz_steps)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"] * scale)

    def _step_others(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        adamw(
            list(parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonal_factor(matrix: Tensor, steps: int = 5) -> Tensor:
    """About ``U V^T`` of ``U S V^T``: singular values between .7 and 1.2 after five steps, unless they are tiny.

    Args:
        matrix: ``[..., rows, columns]``, finite.
        steps: rounds of the Newton-Schulz iteration.

    Returns:
        bf16 of the same shape; zeros for a matrix of zeros.
    """
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).bfloat16()  # products are then of the smaller side
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
