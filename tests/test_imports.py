"""Imports run one way, and ``import lqrl`` is light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted((SOURCE / "lqrl").rglob("*.py"))

# A module may import from its own layer and from those above it in this list. The longest matching prefix decides.
LAYERS = (
    ("lqrl", "lqrl.assets", "lqrl.types"),
    (
        "lqrl.quant.scheme",
        "lqrl.quant.numerics",
        "lqrl.algorithms",
        "lqrl.rewards",
    ),
    ("lqrl.quant", "lqrl.modeling", "lqrl.rollouts", "lqrl.data", "lqrl.engines.base", "lqrl.metrics"),
    ("lqrl.engines", "lqrl.learner.weights"),
    ("lqrl.doctor",),
    ("lqrl.learner", "lqrl.data.datamodule"),
    ("lqrl.callbacks",),
    ("lqrl.cli", "lqrl.lightning_cli", "lqrl.value_help", "lqrl.fabric", "lqrl.__main__"),
    ("lqrl.testing",),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    while module not in LAYER_OF:
        module = module.rpartition(".")[0]
    return LAYER_OF[module]


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(nodes: list[ast.AST] | list[ast.stmt], *, deferred: bool) -> Iterator[str]:
    """Absolute names that run when the module does; with ``deferred`` also those inside functions."""
    for node in nodes:
        if is_type_checking(node) or (not deferred and isinstance(node, (ast.FunctionDef, ast.Lambda))):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if (SOURCE / name.replace(".", "/")).with_suffix(".py").exists() else str(node.module)
        else:
            yield from imported(list(ast.iter_child_nodes(node)), deferred=deferred)


def imports_of(path: Path, *, deferred: bool = True) -> set[str]:
    return set(imported(ast.parse(path.read_text(encoding="utf-8")).body, deferred=deferred))


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "lqrl"}


# An __init__ gathers the names of its package; it belongs to no layer, but takes part in cycles.
MODULES = {module_name(path): path for path in FILES if path.name != "__init__.py"}


def test_a_module_imports_no_later_layer():
    against = {
        module: [name for name in ours(imports_of(path)) if layer_of(name) > layer_of(module)]
        for module, path in MODULES.items()
    }
    assert not {module: names for module, names in against.items() if names}


def test_lightning_appears_only_from_the_learner_on():
    early = {m: roots(imports_of(p)) for m, p in MODULES.items() if layer_of(m) < LAYER_OF["lqrl.learner"]}
    assert not [module for module, names in early.items() if names & {"lightning", "pytorch_lightning"}]


def test_heavy_packages_are_imported_inside_the_functions_that_use_them():
    heavy = {"transformers", "datasets", "vllm", "accelerate", "peft", "bitsandbytes", "math_verify"}
    used = {module_name(path): roots(imports_of(path, deferred=False)) & heavy for path in FILES}
    assert not {module: names for module, names in used.items() if names}


def test_only_the_vllm_engine_imports_vllm():
    importers = {m for m, path in MODULES.items() if "vllm" in roots(imports_of(path))}
    assert importers
    assert all(m.startswith("lqrl.engines.vllm.") for m in importers)


def test_the_algorithms_need_torch_alone():
    used = {m: roots(imports_of(path)) for m, path in MODULES.items() if m.startswith("lqrl.algorithms.")}
    assert used
    assert set().union(*used.values()) - set(sys.stdlib_module_names) <= {"torch", "lqrl"}


def packages_of(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def test_modules_import_without_cycles():
    graph = {module_name(p): ours(imports_of(p, deferred=False)) for p in FILES}
    for module, names in graph.items():  # a package runs before what is in it, wherever that is imported from
        graph[module] = names | set().union(*map(packages_of, names)) - packages_of(module) - {module}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for name in graph[module]:
                visit(name, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_import_lqrl_is_light():
    script = (
        "import json, sys, lqrl, torch\n"
        "heavy = ('transformers', 'datasets', 'vllm', 'accelerate', 'math_verify', 'lightning')\n"
        "print(json.dumps([[m for m in heavy if m in sys.modules], torch.cuda.is_initialized()]))"
    )
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == [[], False]


def test_import_of_the_maths_and_the_engine_seam_is_light():
    script = (
        "import json, sys, lqrl.algorithms, lqrl.quant.scheme, lqrl.quant.numerics, lqrl.types, lqrl.engines.base\n"
        "heavy = ('transformers', 'datasets', 'vllm', 'lightning')\n"
        "print(json.dumps([m for m in heavy if m in sys.modules]))"
    )
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == []
