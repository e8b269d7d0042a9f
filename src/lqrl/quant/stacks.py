"""Stacked experts under the names of a checkpoint, one tensor for each expert and projection, and back.

In memory, and in what an engine is sent, the tensors of projection ``p`` are stacked: ``mlp.experts.p`` in full
precision, ``mlp.experts.p_<tensor of the method>`` as codes. Checkpoints of Qwen3-MoE, quantized or not, have
``mlp.experts.<i>.gate_proj.weight``, ``up_proj`` and ``down_proj``; vLLM and transformers stack them when they load.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lqrl.quant.moe import PROJECTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHILDREN = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of an expert; the first two are the halves of ``gate_up_proj``."""
_EXPERT = re.compile(rf"(?P<stack>(?:.+\.)?experts)\.\d+\.(?:{'|'.join(CHILDREN)})")
_ON_DISK = {f"mlp.experts.*.{child}.weight" for child in CHILDREN}


def stack_of(layer: str) -> str | None:
    """The module that stacks the weights of ``layer``, by the name of a checkpoint; ``None`` for other layers.

    ``model.layers.0.mlp.experts.3.up_proj`` is in ``model.layers.0.mlp.experts``.
    """
    match = _EXPERT.fullmatch(layer)
    return match["stack"] if match else None


def named_by_expert(model: PreTrainedModel) -> bool:
    """Whether checkpoints of this architecture have the names of this module's docstring, as transformers says."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    conversions = get_checkpoint_conversion_mapping(model.config.model_type) or []
    return {pattern for conversion in conversions for pattern in conversion.source_patterns} >= _ON_DISK


def unstacked(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Stacked experts, quantized or not, as one tensor for each expert and projection; other tensors pass.

    ``mlp.experts.gate_up_proj_weight_scale`` becomes ``mlp.experts.<i>.gate_proj.weight_scale`` and ``up_proj``, in
    views; a scale that gate and up share comes under both names.
    """
    for name, tensor in weights:
        parent, _, last = name.rpartition(".")
        projection = next((p for p in PROJECTIONS if last == p or last.startswith(f"{p}_weight")), None)
        if projection is None or not parent.endswith("experts"):
            yield name, tensor
            continue
        part = last.removeprefix(projection).lstrip("_") or "weight"
        for e, own in enumerate(tensor):
            if projection == "down_proj":
                yield f"{parent}.{e}.down_proj.{part}", own
                continue
            halves = (own, own) if own.ndim == 1 else own.chunk(2)
            for half, child in zip(halves, CHILDREN[:2], strict=True):
                yield f"{parent}.{e}.{child}.{part}", half


def stacked(experts: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The reverse of `unstacked` for one module.

    Args:
        experts: for each expert its tensors, by projection (``gate_proj``, ``up_proj``, ``down_proj``) and last name.

    Returns:
        ``gate_up_proj_<last name>`` and ``down_proj_<last name>``, expert first.

    Raises:
        ValueError: when gate and up of an expert have scales of their own where one for both is needed.
    """
    stacks: dict[str, list[Tensor]] = {}
    for e, expert in enumerate(experts):
        gate, up = (expert[child] for child in CHILDREN[:2])
        for part in gate:
            stacks.setdefault(f"gate_up_proj_{part}", []).append(_joined(f"expert {e}", part, gate[part], up[part]))
        for part, tensor in expert["down_proj"].items():
            stacks.setdefault(f"down_proj_{part}", []).append(tensor)
    return {name: torch.stack(tensors) for name, tensors in stacks.items()}


def _joined(expert: str, part: str, gate: Tensor, up: Tensor) -> Tensor:
    if gate.ndim > 1:
        return torch.cat([gate, up])
    if not torch.equal(gate, up):
        raise ValueError(
            f"{part} of gate_proj and up_proj differ in {expert} ({gate.tolist()} and {up.tolist()}), which are one "
            "matrix with one scale here"
        )
    return gate
