"""Code in the documents runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from less import LESS
from lqrl.callbacks import SamplerFeedback
from lqrl.cli import run

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
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


@pytest.mark.parametrize("cache", ["", "+kv_int8", "+kv_fp8_static"])
def test_an_engine_serves_the_low_bit_export_as_the_guide_says(exported, tmp_path, monkeypatch, capsys, cache):
    folder, code = exported, block("formats", "python", "load_quantized")
    if cache:
        folder, code = tmp_path, code.replace(EXPORT.name, f"{EXPORT.name}{cache}")
        monkeypatch.chdir(folder)
        words = ["--trainer.callbacks+=lqrl.callbacks.HFExport", "--trainer.callbacks.quantized=true"]
        run(["fit", "--config", QUICKSTART, *words, f"--model.init_args.scheme=int8_w8a8{cache}", *LESS])
    assert (folder / EXPORT.with_name(f"{EXPORT.name}{cache}") / "config.json").is_file()
    monkeypatch.chdir(folder)
    capsys.readouterr()
    scope: dict[str, object] = {}
    exec(code, scope)
    lines = [line for line in capsys.readouterr().out.splitlines() if "differs by" in line]
    assert len(lines) == 4
    assert all(float(re.search(r"differs by (\S+) at most", line)[1]) < 1e-5 for line in lines)
    assert isinstance(scope["completions"], list)
    assert all(bool(torch.isfinite(c.logprobs).all()) for c in scope["completions"])


def test_the_callback_of_the_formats_guide_exports_codes(exported, tmp_path, monkeypatch):
    (tmp_path / "low_bit.yaml").write_text(block("formats", "yaml", "quantized: true"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    cli = run(["fit", "--config", QUICKSTART, "--config", "low_bit.yaml", *LESS])
    names = {path.name for path in EXPORT.iterdir()}
    assert names == {path.name for path in (exported / EXPORT).iterdir()} >= {"config.json", "model.safetensors"}
    assert any(isinstance(callback, SamplerFeedback) for callback in cli.trainer.callbacks)  # the recipe's others stay


def test_the_noise_of_the_formats_guide_runs_as_a_second_file(tmp_path, monkeypatch):
    (tmp_path / "noise.yaml").write_text(block("formats", "yaml", "RolloutNoise"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="total_iterations is 300 and the run ends after 1 iterations"):
        cli = run(["fit", "--config", QUICKSTART, "--config", "noise.yaml", *LESS])
    assert float(cli.trainer.callback_metrics["refresh/noise_sigma"]) == 0  # of the first stage
    assert (tmp_path / "runs/quickstart/version_0/hf/model.safetensors").is_file()
