"""What an unknown option below a class's own is told."""

from __future__ import annotations

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
