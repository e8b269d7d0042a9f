"""What an unknown option below a class's own is told."""

from __future__ import annotations

import sys

import pytest

from lqrl import parse_errors
from lqrl.data import PromptDataModule
from lqrl.learner.sft import SFTModule


@pytest.mark.parametrize(
    ("path", "owner", "advice"),
    [
        ("train.templte", PromptDataModule, "; did you mean template?"),
        ("trian.template", PromptDataModule, "; did you mean train?"),
        ("train.zzz", PromptDataModule, "; PromptSource has rows, "),
        ("train", PromptDataModule, ""),
        ("optimizer.zzz", SFTModule, ""),  # its annotations name what is imported for type checkers alone
        ("zzz", SFTModule, "; SFTModule has policy, optimizer, lr_scheduler"),
    ],
)
def test_the_nearest_name_is_given_or_what_there_is(path, owner, advice):
    said = parse_errors._below(path.split("."), owner)
    assert said.startswith(advice) if advice else not said


@pytest.mark.parametrize(
    ("package", "command"),
    [("bitsandbytes", "pip install 'bitsandbytes>=0.48'"), ("vllm", "in an environment of its own (docs/vllm.md)")],
)
def test_a_package_that_lqrl_can_use_is_named_with_its_version(monkeypatch, package, command):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    reason = f"expects a function or a callable class: No module named '{package}'. Got value: {package}.X"
    message = f'Parser key "model.optimizer": Type typing.Callable[[int], str] {reason}'
    said = parse_errors.sentence(message)
    assert said.startswith(f"model.optimizer: {package} is not installed: pip install '{package}>=")
    assert said.endswith(command)


def test_a_missing_module_of_a_package_that_is_there_stays_what_it_is():
    message = "Parser key \"model\": No module named 'lqrl.nowhere'"
    assert parse_errors.sentence(message) == "model: No module named 'lqrl.nowhere'"
