"""The README's commands and the examples, run as they stand, on less."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lqrl.cli import run

README = Path("README.md").read_text(encoding="utf-8")
LESS = [
    "--trainer.max_epochs=1",
    "--trainer.num_sanity_val_steps=0",
    "--data.init_args.iterations_per_epoch=1",
    "--data.init_args.prompts_per_iteration=8",
    "--data.init_args.train.limit=64",
    "--data.init_args.val.limit=8",
]


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
    commands = lqrl_commands()
    assert len(commands) >= 4
    for words in commands:
        less = LESS if "--ckpt_path" not in words else [o for o in LESS if "max_epochs" not in o]
        run([*words, *(["--trainer.max_epochs=2"] if "--ckpt_path" in words else []), *less])
    assert (tmp_path / "runs" / "quickstart" / "version_0" / "checkpoints" / "last.ckpt").is_file()


def test_files_that_the_readme_links_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert Path(target).exists(), target


@pytest.mark.parametrize("words", [["examples/own_loop.py", "--iterations", "2"]], ids=lambda w: w[0])
def test_an_example_runs(words, tmp_path):
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "reward" in done.stdout
