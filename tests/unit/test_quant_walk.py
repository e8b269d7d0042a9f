"""`walk` is torch's `named_modules`, faster."""

from __future__ import annotations

import pytest
from torch import nn

from lqrl.quant.walk import walk


def model() -> nn.Module:
    shared = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    root = nn.Module()
    root.first, root.second = shared, nn.ModuleList([shared, nn.Module(), shared[0]])
    root.register_module("absent", None)
    root.second[1].inner = nn.Dropout()
    return root


@pytest.mark.parametrize("twice", [False, True])
def test_it_gives_what_torch_gives(twice):
    root = model()
    wanted = list(root.named_modules(remove_duplicate=not twice))
    assert [(name, id(module)) for name, module in walk(root, twice)] == [(n, id(m)) for n, m in wanted]
    assert ("second.0.1" in dict(walk(root, twice))) == twice
