"""Code in the documents runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from less import LESS
from lqrl.cli import run

ROOT = Path(__file__).parents[1]
EXPORT = Path("runs/quickstart/version_0/hf-int8_w8a8")


def block(document: str, language: str, word: str) -> str:
    """The one block of code in ``docs/<document>.md`` that holds ``word``."""
    text = (ROOT / "docs" / f"{document}.md").read_text(encoding="utf-8")
    (code,) = [b for b in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if word in b]
    return code


def test_the_divergence_of_the_exact_guide_is_none(capsys):
    exec(block("exact", "python", "first_divergence"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "None"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with the low-bit export that the command of the formats guide leaves."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "configs").symlink_to(ROOT / "configs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = shlex.split(block("formats", "bash", "callbacks.quantized"))
        assert words[0] == "lqrl"
        run([*words[1:], *LESS])
    return folder


def test_an_engine_serves_the_low_bit_export_as_the_guide_says(exported, monkeypatch, capsys):
    assert (exported / EXPORT / "config.json").is_file()
    monkeypatch.chdir(exported)
    scope: dict[str, object] = {}
    exec(block("formats", "python", "load_quantized"), scope)
    lines = [line for line in capsys.readouterr().out.splitlines() if "differs by" in line]
    assert len(lines) == 4
    assert all(float(re.search(r"differs by (\S+) at most", line)[1]) < 1e-5 for line in lines)
    assert isinstance(scope["completions"], list)
    assert all(bool(torch.isfinite(c.logprobs).all()) for c in scope["completions"])


def test_the_callback_of_the_formats_guide_exports_codes(exported, tmp_path, monkeypatch):
    (callback,) = yaml.safe_load(block("formats", "yaml", "quantized: true"))["trainer"]["callbacks"]
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    callbacks = config["trainer"]["callbacks"]
    (place,) = [i for i, c in enumerate(callbacks) if c["class_path"] == callback["class_path"]]
    callbacks[place] = callback
    (tmp_path / "low_bit.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run(["fit", "--config", "low_bit.yaml", *LESS])
    names = {path.name for path in EXPORT.iterdir()}
    assert names == {path.name for path in (exported / EXPORT).iterdir()} >= {"config.json", "model.safetensors"}
