"""Update-aware quantization (UAQ): scale weights down and the norm before them up, leaving the function unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lqrl.quant.transforms.base import InvariantTransform
from lqrl.quant.transforms.structure import norm_sites


@dataclass(frozen=True)
class UpdateAwareScaling(InvariantTransform):
    """UAQ: fold the factor ``s`` into every norm that feeds linear layers: ``W x = (W / s)(s x)``.

    QuRL (arXiv 2602.13953), invariant scaling. Norm gains are multiplied by ``s`` (a gain stored as ``1 + w`` becomes
    ``s (1 + w) - 1``) and the weights of q, k, v and gate, up divided by it; biases, o_proj and down_proj have no part.
    A weight's relative quantization error does not change, an update of it weighs ``s`` times more: under Adam it is
    the same as learning rates per group, see `uaq_equivalent_param_groups`. Sources disagree whether gate and up take
    part; here they do (inferred from the one public implementation). The arithmetic is at least fp32, rounded once to
    the parameter's dtype; undoing is exact when ``s`` is a power of two, else within rounding.

    Attributes:
        s: the paper's default.

    Raises:
        ValueError: when ``s`` is not a positive finite number.
    """

    s: float = 1.5

    def __post_init__(self) -> None:
        _check_factor(self.s)

    def fold_(self, model: nn.Module) -> int:
        """See `InvariantTransform.fold_`."""
        return _rescale_(model, self.s, inverse=False)

    def unfold_(self, model: nn.Module) -> int:
        """See `InvariantTransform.unfold_`."""
        return _rescale_(model, self.s, inverse=True)


def uaq_equivalent_param_groups(
    model: nn.Module, lr: float, s: float, *, weight_decay: float = 0.0, eps: float = 1e-8
) -> list[dict[str, Any]]:
    """Adam(W) groups that train the unfolded model as `UpdateAwareScaling` trains the folded one.

    Adam's step does not depend on the scale of a gradient, so a step of ``lr`` on ``W / s`` is one of ``s lr`` on
    ``W``, and one on the gain ``s g`` is one of ``lr / s`` on ``g``. AdamW's decay is ``lr * weight_decay`` on both
    sides, and ``eps`` scales with the gradient. What remains different is clipping by a global gradient norm, which
    sees the gradients of the folded weights ``s`` times as large. Our derivation: the paper offers no such baseline.

    Args:
        model: not folded.
        lr, weight_decay, eps: what the optimizer of the folded model would be given.
        s: UAQ's factor.

    Returns:
        Groups for the folded linear layers' weights, for the norms before them, and for all other parameters, each
        with its ``lr``, ``weight_decay`` and ``eps``.

    Raises:
        ValueError: as `UpdateAwareScaling`; or for a ``weight_decay`` on gains stored as ``1 + w``, whose decay
            towards 1 has no equivalent.
    """
    _check_factor(s)
    sites = norm_sites(model)
    if weight_decay != 0.0 and any(site.offset for site in sites):
        raise ValueError("gains stored as 1 + w decay towards 1, which no group reproduces; set weight_decay=0")
    linears = [linear.weight for site in sites for linear in site.readers.values()]
    norms = [site.weight for site in sites]
    taken = {id(parameter) for parameter in (*linears, *norms)}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    factors = ((linears, s), (norms, 1 / s), (rest, 1.0))
    return [
        {"params": parameters, "lr": lr * f, "weight_decay": weight_decay / f, "eps": eps / f}
        for parameters, f in factors
    ]


def _check_factor(s: float) -> None:
    if not 0 < s < float("inf"):
        raise ValueError(f"UAQ's factor must be positive and finite, got {s}; 1.5 is the published value")


@torch.no_grad()
def _rescale_(model: nn.Module, s: float, *, inverse: bool) -> int:
    sites = norm_sites(model)  # everything is found and checked before anything is written
    for site in sites:
        _multiply_(site.weight, s, inverse=inverse, offset=site.offset)
        for linear in site.readers.values():
            _multiply_(linear.weight, s, inverse=not inverse, offset=0.0)
    return sum(len(site.readers) for site in sites)


def _multiply_(parameter: Tensor, s: float, *, inverse: bool, offset: float) -> None:
    gain = parameter.to(torch.promote_types(parameter.dtype, torch.float32)) + offset
    parameter.copy_((gain / s if inverse else gain * s) - offset)
