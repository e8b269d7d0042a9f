"""Cures for defects of single vLLM releases: named, bound to versions, installed once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lqrl.engines.vllm.versions import parse_version


@dataclass(frozen=True)
class Patch:
    """A change to vLLM's own code while it runs in this process.

    Attributes:
        name: what logs call it.
        defect: what goes wrong without it.
        platform: vLLM's name of the device type that has the defect; "" is every one.
        first, last: minor releases that have it.
        install: makes the change.
    """

    name: str
    defect: str
    platform: str
    first: tuple[int, int]
    last: tuple[int, int]
    install: Callable[[], None]

    def applies(self, version: str, platform: str) -> bool:
        """Whether this vLLM has the defect."""
        return self.platform in ("", platform) and self.first <= parse_version(version) <= self.last


def _keep_onednn_scales() -> None:
    """Let a oneDNN handler own the scales that it points to; the weight it has copied."""
    import vllm._custom_ops as ops

    create = ops.create_onednn_scaled_mm

    @functools.wraps(create)
    def create_and_keep(weight: Any, weight_scales: Any, *args: Any, **kwargs: Any) -> Any:
        handler = create(weight, weight_scales, *args, **kwargs)
        handler.kept_scales = weight_scales
        return handler

    ops.create_onednn_scaled_mm = create_and_keep


def _load_under_adapters() -> None:
    """Let a layer with room for an adapter load the weights of the layer in it, as later releases do."""
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.model_executor.models.utils import AutoWeightsLoader

    def load_weights(self: Any, weights: Any) -> Any:
        load = getattr(self.base_layer, "load_weights", None)
        return load(weights) if callable(load) else AutoWeightsLoader(self.base_layer).load_weights(weights)

    if "load_weights" not in vars(BaseLayerWithLoRA):
        BaseLayerWithLoRA.load_weights = load_weights


def _draw_from_the_vocabulary() -> None:
    """Keep the tokens that a Triton kernel draws where there are logits, NaN or not."""
    import vllm.v1.worker.gpu.sample.sampler as sampler

    draw: Any = sampler.gumbel_sample

    @functools.wraps(draw)
    def draw_from(logits: Any, *args: Any, **kwargs: Any) -> Any:
        return draw(logits, *args, **kwargs).clamp_(0, logits.shape[-1] - 1)

    sampler.gumbel_sample = draw_from


PATCHES = (
    Patch(
        name="draw-from-the-vocabulary",
        defect="of NaN logits the sampler draws tokens beyond a vocabulary of less than 1024, and the next step looks "
        "up their embeddings: a device-side assert, after which the process cannot use the GPU",
        platform="cuda",
        first=(0, 26),
        last=(0, 32),
        install=_draw_from_the_vocabulary,
    ),
    Patch(
        name="load-under-adapters",
        defect="a layer with room for an adapter finds no parameter of its own for weights that are loaded again",
        platform="",
        first=(0, 26),
        last=(0, 31),
        install=_load_under_adapters,
    ),
    Patch(
        name="onednn-keeps-scales",
        defect="an int8 layer's oneDNN handler points to scales that a reload frees: its outputs become NaN",
        platform="cpu",
        first=(0, 26),
        last=(0, 32),
        install=_keep_onednn_scales,
    ),
)

_installed: set[str] = set()


def install_patches(version: str, platform: str) -> list[str]:
    """Install what this vLLM needs and does not have yet.

    Args:
        version: vLLM's.
        platform: vLLM's device type, such as ``cpu`` or ``cuda``.

    Returns:
        Names of all installed patches.
    """
    for patch in PATCHES:
        if patch.name not in _installed and patch.applies(version, platform):
            patch.install()
            _installed.add(patch.name)
    return sorted(_installed)
