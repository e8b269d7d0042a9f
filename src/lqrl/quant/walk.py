"""Walking a model: a refresh does it several times, and the host must not take longer than the GPU does."""

from __future__ import annotations

from torch import nn


def walk(model: nn.Module, twice: bool = False) -> list[tuple[str, nn.Module]]:
    """``list(model.named_modules(remove_duplicate=not twice))``, without a generator for each level of the tree.

    Args:
        model: any.
        twice: modules that occur twice come twice.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str, dot: str) -> None:
        if not twice:
            if id(module) in seen:
                return
            seen.add(id(module))
        found.append((prefix, module))
        for name, child in module._modules.items():
            if child is not None:
                path = f"{dot}{name}"
                visit(child, path, f"{path}.")

    visit(model, "", "")
    return found
