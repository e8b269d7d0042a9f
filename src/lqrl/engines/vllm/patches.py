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
        platform: vLLM's name of the device type that has the defect.
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
        return platform == self.platform and self.first <= parse_version(version) <= self.last


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


PATCHES = (
    Patch(
        name="onednn-keeps-scales",
        defect="an int8 layer's oneDNN handler points to scales that a reload frees: its outputs become NaN",
        platform="cpu",
        first=(0, 32),
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
