"""The README's commands and the examples, run as they stand, on less."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from less import LESS
from lqrl.cli import run

README = Path("README.md").read_text(encoding="utf-8")


def shell_lines() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def lqrl_commands() -> list[list[str]]:
    parts = [part.strip() for line in shell_lines() for part in line.split("&&")]
    return [shlex.split(part)[1:] for part in parts if part.startswith("lqrl ")]


def test_the_first_two_commands_do_all_the_set_up():
    first, second = shell_lines()[:2]
    assert first == "pip install -e . && lqrl fit --config configs/quickstart.yaml"
    assert second == 'pip install -e ".[test]" && pytest'
    assert 'pip install -e ".[test]"' in Path(".ci/run").read_text()


def test_every_command_of_the_readme_runs(tmp_path, monkeypatch):
    root = Path.cwd()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(root / "configs")
    commands = [words for words in lqrl_commands() if "--model.help" not in words]
    assert len(commands) >= 4
    for words in commands:
        run([*words, *LESS])
    assert (tmp_path / "runs" / "quickstart" / "version_0" / "checkpoints" / "last.ckpt").is_file()


def test_the_notebook_code_of_the_readme_runs(tmp_path, monkeypatch):
    code = next(b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "trainer.fit" in b)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(code.replace("iterations_per_epoch=3", "iterations_per_epoch=1"), scope)
    assert scope["module"].iteration == 1


def test_a_reward_and_data_of_ones_own_run_as_the_readme_says(tmp_path, monkeypatch):
    code = next(b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Short" in b)
    (tmp_path / "my_reward.py").write_text(code)
    rows = [{"prompt": f"{i} 2={i + 2}:", "answer": f"{i}+2"} for i in range(1, 9)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = yaml.safe_load(next(b for b in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "my_reward" in b))
    own["data"]["init_args"]["train"]["chat"] = False  # the shipped policy has no chat template
    terms = own["model"]["init_args"]["reward"]["init_args"]["terms"]
    terms[0]["init_args"]["fn"]["init_args"] = {}  # and writes no marker
    config = yaml.safe_load(Path("configs/quickstart.yaml").read_text())
    config["model"]["init_args"] |= own["model"]["init_args"]
    config["data"]["init_args"] |= own["data"]["init_args"] | {"val": None}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "lqrl", "fit", "--config", "own.yaml", *[o for o in LESS if ".val." not in o]],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "runs/quickstart/version_0/rollouts.jsonl").read_text().splitlines()[0])
    assert set(first["terms"]) == {"correct", "short"}


def test_files_that_the_readme_links_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert Path(target).exists(), target


@pytest.mark.parametrize("words", [["examples/own_loop.py", "--iterations", "2"]], ids=lambda w: w[0])
def test_an_example_runs(words, tmp_path):
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "reward" in done.stdout
