"""Which vLLM this engine has been run with, and finding it."""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType

from lqrl.engines.base import EngineUnavailableError
from lqrl.extras import pip_install

FIRST, LAST = (0, 26), (0, 32)
"""Minor releases that the tests ran with: 0.26 on an H100, 0.32 on a CPU. The ends are tested."""
TESTED = f">={FIRST[0]}.{FIRST[1]},<{LAST[0]}.{LAST[1] + 1}"
"""The same as pip takes it."""


def _install() -> str:
    from packaging.requirements import Requirement

    return pip_install(Requirement(f"vllm{TESTED}"))


def import_vllm(*, allow_untested: bool = False) -> ModuleType:
    """The installed vLLM.

    Args:
        allow_untested: take a release outside of `FIRST` to `LAST`.

    Raises:
        ImportError: when there is none.
        EngineUnavailableError: see `check_version`.
    """
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        raise ImportError(
            f"the vLLM engine needs vLLM, which cannot be imported ({error}): {_install()}, or take "
            "lqrl.engines.TorchEngineFactory"
        ) from error
    if not allow_untested:
        check_version(vllm.__version__)
    return vllm


def device_type() -> str:
    """What the installed vLLM runs on, ``cpu`` or ``cuda``; empty when it finds no such device."""
    return import_module("vllm.platforms").current_platform.device_type


def parse_version(version: str) -> tuple[int, int]:
    """Major and minor number of ``0.26.0``, ``0.32.1.dev7+g12ab`` and the like.

    Raises:
        EngineUnavailableError: when there are none.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise EngineUnavailableError(
            f"vLLM calls its version {version!r}, which names no release; install one from PyPI"
        )
    return int(found[1]), int(found[2])


def check_version(version: str) -> None:
    """Refuse a release that nobody has tried.

    A refresh relies on how vLLM reloads weights, which changes between releases without notice.

    Raises:
        EngineUnavailableError: outside of `FIRST` to `LAST`.
    """
    if not FIRST <= parse_version(version) <= LAST:
        first, last = (".".join(map(str, v)) for v in (FIRST, LAST))
        raise EngineUnavailableError(
            f"this engine is tested with vLLM {first} to {last}, found {version}; {_install()}, "
            "or set allow_untested_version: true and run tests/integration/test_vllm_*.py"
        )
