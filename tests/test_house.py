"""The house rules that a reader relies on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = sorted((ROOT / "src" / "lqrl").rglob("*.py"))
ALL = SOURCE + sorted(p for part in ("tests", "examples", "benchmarks") for p in (ROOT / part).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes and methods whose name, and whose class's name, has no leading underscore."""
    for node in body:
        if isinstance(node, (*Function, ast.ClassDef)) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


def unannotated(node: ast.AST) -> list[str]:
    """What a function leaves open: arguments other than self and cls, and its return."""
    if not isinstance(node, Function):
        return []
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    missing = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
    return missing + (["return"] if node.returns is None else [])


def test_the_source_is_found():
    assert ROOT / "src" / "lqrl" / "types.py" in SOURCE


def test_a_file_has_at_most_400_lines():
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL}
    assert not {name: n for name, n in lines.items() if n > MAX_FILE_LINES}


def test_a_function_has_at_most_60_lines():
    functions = [(path, n) for path in ALL for n in ast.walk(tree_of(path)) if isinstance(n, Function)]
    lines = {f"{name_of(path)}:{f.name}": (f.end_lineno or f.lineno) - f.lineno + 1 for path, f in functions}
    assert not {name: n for name, n in lines.items() if n > MAX_FUNCTION_LINES}


def test_modules_and_public_names_are_documented():
    named = [(path, name, node) for path in SOURCE for name, node in public_definitions(tree_of(path).body)]
    undocumented = [f"{name_of(path)}:{name}" for path, name, node in named if not ast.get_docstring(node)]
    undocumented += [name_of(path) for path in SOURCE if not ast.get_docstring(tree_of(path))]
    assert not undocumented


def test_public_functions_are_annotated():
    named = [(path, name, node) for path in SOURCE for name, node in public_definitions(tree_of(path).body)]
    open_ends = {f"{name_of(path)}:{name}": unannotated(node) for path, name, node in named}
    assert not {name: missing for name, missing in open_ends.items() if missing}


def test_a_file_owns_a_noun():
    assert not [name_of(path) for path in SOURCE if path.stem in ("utils", "util", "helpers", "common", "misc")]


def test_nothing_is_probed_with_hasattr():
    calls = [(path, n) for path in SOURCE for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call)]
    probes = [(path, n) for path, n in calls if isinstance(n.func, ast.Name) and n.func.id == "hasattr"]
    assert not [f"{name_of(path)}:{n.lineno}" for path, n in probes]
