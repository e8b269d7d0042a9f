"""The packages that lqrl needs or can use: installed, within its declared range, and importable."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

from lqrl.doctor.report import Row, Section, attempt
from lqrl.extras import VLLM_BUILDS, accepted, declared, pip_install

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# What a row can be without lqrl's own metadata, which a source tree that was not installed has not.
_UNDECLARED = ("torch", "lightning", "transformers")
# Extras, and what each is for.
_OPTIONAL = {
    "bitsandbytes": "nf4",
    "peft": "LoRA adapters",
    "datasets": "prompts from the hub",
    "compressed-tensors": "transformers, which reads quantized checkpoints with it",
    "gguf": "transformers, which reads GGUF files with it",
    "tensorboard": "its logger",
    "wandb": "its logger",
}
_VLLM_SECONDS = 120


def required_section() -> Section:
    """Python, and what installing lqrl brings."""
    rows = [Row("python", "ok", f"{platform.python_version()}, {sys.executable}")]
    try:
        texts = [text for text in metadata.requires("lqrl") or () if "extra ==" not in text]
    except metadata.PackageNotFoundError:
        texts = list(_UNDECLARED)
        found = "a source tree without metadata: the versions below are not compared"
        rows.append(Row("lqrl", "missing", found, "pip install -e ."))
    return Section("packages", (*rows, *(attempt(_name_of(text), _required, text) for text in texts)))


def optional_section() -> Section:
    """What the extras bring."""
    return Section("extras", tuple(attempt(name, _optional, use) for name, use in _OPTIONAL.items()))


def vllm_row(name: str) -> Row:
    """vLLM, imported in a process of its own: it changes the process that imports it, and may end it."""
    requirement = _vllm()
    use = "its engine and for serving quantized checkpoints"
    found = _installed(name, requirement, use if requirement.name == name else f"{use}: {requirement.name}")
    if found.status != "ok":
        return found
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_VLLM_SECONDS, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Row(name, "FAILED", f"{found.detail}, import: {said[-1][:160]}", pip_install(requirement, again=True))
    return found


def _vllm() -> Requirement:
    """The build that is installed, else the one for this machine: one installed over the other breaks both."""
    import torch
    from packaging.requirements import Requirement

    from lqrl.engines.vllm.versions import TESTED

    builds = VLLM_BUILDS if torch.cuda.is_available() else VLLM_BUILDS[::-1]
    return Requirement(next((build for build in builds if _version(build)), builds[0]) + TESTED)


def _required(name: str, text: str) -> Row:
    from packaging.requirements import Requirement

    return _imported(name, Requirement(text), "")


def _optional(name: str, use: str) -> Row:
    return _imported(name, declared(name), use)


def _imported(name: str, requirement: Requirement, use: str) -> Row:
    """The package's row after its import, whose failure is that of the package."""
    found = _installed(name, requirement, use)
    if "version" not in found.facts:
        return found

    def test(_: str) -> Row:
        importlib.import_module(name.replace("-", "_"))
        return found

    return attempt(name, test, remedy=pip_install(requirement, again=True))


def _installed(name: str, requirement: Requirement, use: str) -> Row:
    """The package's row as its metadata has it, without an import."""
    wanted = accepted(requirement)
    facts = {"required": wanted}
    what = f", for {use}" if use else ""
    version = _version(requirement.name)
    if version is None:
        return Row(name, "missing", f"not installed{what}", pip_install(requirement), facts)
    facts |= {"version": version, "package": requirement.name}
    if not requirement.specifier.contains(version, prereleases=True):
        return Row(name, "missing", f"{version}, needs {wanted}{what}", pip_install(requirement), facts)
    return Row(name, "ok", version + (f", in the range {wanted}" if wanted else "") + what, "", facts)


def _version(package: str) -> str | None:
    """What is installed of the package, if anything."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _name_of(text: str) -> str:
    """The package that a requirement names, without the package that can parse one."""
    end = next((i for i, character in enumerate(text) if not (character.isalnum() or character in "-_.")), len(text))
    return text[:end]
