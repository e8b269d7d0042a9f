"""What the documents name exists."""

from __future__ import annotations

import ast
import math
import re
import runpy
from pathlib import Path

import pytest
import torch

from lqrl.types import ClipRange, TrainBatch

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATH = re.compile(r"`((?:src|tests|configs|examples|benchmarks|docs)/[\w./-]+)(?:::(\w+))?`")
LINK = re.compile(r"\]\(((?!https?:)[^)#]+)\)")


def test_every_named_file_and_test_exists():
    missing = []
    for document in DOCUMENTS:
        for name, function in PATH.findall(document.read_text(encoding="utf-8")):
            path = ROOT / name
            if not path.exists():
                missing.append(f"{document.name}: {name}")
            elif function:
                body = ast.parse(path.read_text(encoding="utf-8")).body
                if function not in {n.name for n in body if isinstance(n, ast.FunctionDef)}:
                    missing.append(f"{document.name}: {name}::{function}")
    assert not missing


def test_the_loss_of_the_guide_works(tmp_path: Path):
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert code is not None
    (tmp_path / "guide.py").write_text(code.group(1), encoding="utf-8")
    unclipped_loss = runpy.run_path(str(tmp_path / "guide.py"))["UnclippedLoss"]
    ones = torch.ones(1, 3)
    batch = TrainBatch(
        input_ids=ones.long(),
        attention_mask=ones.bool(),
        loss_mask=torch.tensor([[False, True, True]]),
        advantages=torch.tensor([[5.0, 1.0, -2.0]]),
        rollout_logprobs=-ones,
        rollout_log_mass=0 * ones,
        group_ids=torch.zeros(1, dtype=torch.int64),
        old_logprobs=-ones,
    )
    logprobs = torch.tensor([[7.0, -1.0, -1.0 + math.log(1.5)]], requires_grad=True)
    output = unclipped_loss()(logprobs, batch, denom=torch.tensor(2.0), clip_range=ClipRange())
    output.loss.backward()
    # -(1 * 1 + 1.5 * -2) / 2 = 1, and the gradient of -R A / 2 is itself
    assert output.loss.item() == pytest.approx(1.0)
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -0.5, 1.5])


def test_every_relative_link_leads_somewhere():
    links = {(d, target) for d in DOCUMENTS for target in LINK.findall(d.read_text(encoding="utf-8"))}
    assert not [f"{d.name}: {target}" for d, target in sorted(links) if not (d.parent / target).exists()]


def test_every_shipped_method_has_a_row():
    """Advantages, corrections, losses and samplers: a public class in these files is a method with a source."""
    rows = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    files = ("algorithms/advantages", "algorithms/correction", "algorithms/losses", "data/vade")
    files += tuple(f"quant/transforms/{name}" for name in ("scaling", "smooth", "hadamard"))
    assert not [name for name in files if f"`src/lqrl/{name}.py`" not in rows]


def test_every_logged_name_is_explained():
    explained = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    literal = re.compile(
        r'"((?:acr|adv|clip|correction|kl|mismatch|policy|refresh|rollout|sampler|speed|tbpo|train)/\w+)"'
    )
    logged = {name for p in (ROOT / "src").rglob("*.py") for name in literal.findall(p.read_text(encoding="utf-8"))}
    assert len(logged) > 30
    assert not sorted(name for name in logged if f"`{name}`" not in explained)
