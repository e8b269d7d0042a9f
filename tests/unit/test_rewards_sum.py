from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from lqrl.data import Arithmetic, Countdown, JsonLines, PromptDataset, PromptSource, Sort
from lqrl.modeling.sources import load_tokenizer
from lqrl.rewards import (
    ExactAnswer,
    FormatReward,
    MathReward,
    OverlongPenalty,
    RewardError,
    RewardSum,
    RewardTerm,
    TaskReward,
    reference_answer,
)
from lqrl.types import Completion, Prompt


def completion(text: str = "", length: int = 1) -> Completion:
    zeros = torch.zeros(length)
    return Completion(0, 0, torch.zeros(length, dtype=torch.int64), zeros, zeros, "stop", 0, text)


def prompt(answer: str | None = "18", **fields: object) -> Prompt:
    return Prompt(id=77, input_ids=(1,), text="q", answer=answer, fields=fields)


def score(reward, answer: str | None, *texts: str) -> list[float]:
    return list(reward(prompt(answer), [completion(text) for text in texts]))


@dataclass(frozen=True)
class Returns:
    """Returns what it is told to."""

    values: tuple

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list:
        return list(self.values)


@dataclass(frozen=True)
class Raises:
    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list:
        raise KeyError("test_cases")


def test_sum_is_weighted_and_keeps_its_terms() -> None:
    reward = RewardSum(
        [
            RewardTerm(ExactAnswer(), "exact"),
            RewardTerm(OverlongPenalty(max_tokens=10, cache_tokens=4), "overlong", weight=0.5),
        ]
    )
    groups = [[completion("18", 3), completion("18", 8)], [completion("17", 20)]]
    output = reward.score([prompt(), prompt()], groups)
    # overlong: 3 <= 6 gives 0; (6 - 8) / 4 = -.5; beyond 10 gives -1
    assert output.names == ("exact", "overlong")
    assert output.terms.tolist() == [[1, 0], [1, -0.5], [0, -1]]
    assert output.rewards.tolist() == [1, 0.75, -0.5]
    assert output.accuracy.tolist() == [1, 1, 0]
    assert output.rewards.dtype == output.terms.dtype == output.accuracy.dtype == torch.float32


def test_accuracy_is_the_term_that_says_so() -> None:
    terms = [RewardTerm(Returns((0.5,)), "shape"), RewardTerm(Returns((1.0,)), "right", is_accuracy=True)]
    assert RewardSum(terms).score([prompt()], [[completion()]]).accuracy.tolist() == [1.0]


def test_none_becomes_nan_where_it_counts() -> None:
    terms = [RewardTerm(Returns((1.0, None)), "a"), RewardTerm(Returns((None, 1.0)), "b", weight=0.0)]
    output = RewardSum(terms).score([prompt()], [[completion(), completion()]])
    assert output.rewards[0] == 1.0  # the NaN of a term of weight 0 stays in its own column
    assert math.isnan(output.rewards[1])
    assert math.isnan(output.terms[0, 1])
    assert math.isnan(output.accuracy[1])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (Raises(), r"reward 'bad' \(Raises\) on prompt 77 raised KeyError: 'test_cases'"),
        (Returns((1.0,)), r"reward 'bad' \(Returns\) on prompt 77 returned 1 values for 2 completions"),
        (Returns((1.0, math.nan)), r"returned nan for completion 1; return a finite number, or None"),
        (Returns((math.inf, 1.0)), r"returned inf for completion 0"),
        (Returns((1.0, "yes")), r"returned 'yes' for completion 1; return a number or None"),
        (Returns((1.0, 10**400)), r"returned 1"),
        (Returns((1.0, 1e39)), r"returned 1e\+39 for completion 1; return a finite number"),  # infinite in float32
    ],
)
def test_unusable_rewards_are_named(fn, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardSum([RewardTerm(fn, "bad")]).score([prompt()], [[completion(), completion()]])


def test_groups_and_prompts_must_pair_up() -> None:
    with pytest.raises(ValueError, match="1 groups of completions for 2 prompts"):
        RewardSum([RewardTerm(ExactAnswer(), "a")]).score([prompt(), prompt()], [[completion()]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RewardSum([]), "at least one term"),
        (lambda: RewardSum([RewardTerm(ExactAnswer(), "a"), RewardTerm(ExactAnswer(), "a")]), "names must differ"),
        (lambda: RewardSum([RewardTerm(ExactAnswer(), n, is_accuracy=True) for n in "ab"]), "at most one"),
        (lambda: RewardTerm(ExactAnswer(), "a", weight=math.nan), "weight must be finite"),
        (lambda: RewardTerm(ExactAnswer(), ""), "name must not be empty"),
    ],
)
def test_bad_sums_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_task_reward_asks_the_task() -> None:
    fields = {"numbers": (3, 7, 24), "target": 45}
    reward = TaskReward(Countdown())
    assert reward(prompt("45", **fields), [completion("24+3*7"), completion("45")]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("18", 1), (" 18.\n", 1), ("$18$", 1), ("18.0", 1), ("36/2", 1), ("1,8", 0), ("17", 0), ("", 0), ("1/0", 0)],
)
def test_exact_answer_compares_numbers_by_value(text: str, expected: int) -> None:
    assert score(ExactAnswer(), "18", text) == [expected]


def test_exact_answer_compares_words_without_case() -> None:
    assert score(ExactAnswer(), "Paris", " paris. ", "london") == [1, 0]
    assert score(ExactAnswer(normalize=False), "Paris", "paris", "Paris") == [0, 1]


def test_commas_between_thousands_do_not_matter() -> None:
    assert score(ExactAnswer(), "1,234,567", "1234567", "1,234,56") == [1, 0]
    assert score(ExactAnswer(), "12", "1,2") == [0]


def test_answer_after_the_last_marker() -> None:
    assert score(ExactAnswer(after="####"), "18", "#### 17\n#### 18\nbye", "18", "####") == [1, 0, 0]


def test_answer_by_pattern_is_the_last_match() -> None:
    reward = ExactAnswer(pattern=r"<answer>(.*?)</answer>")
    assert score(reward, "18", "<answer>1</answer><answer>18</answer>", "18") == [1, 0]
    assert score(ExactAnswer(pattern=r"\d+"), "18", "17 or 18", "none") == [1, 0]


def test_exact_answer_reads_the_end_only() -> None:
    assert score(ExactAnswer(after="#", max_chars=10), "18", "# 18" + " " * 20, " " * 20 + "# 18") == [0, 1]


def test_missing_reference_answer_says_what_to_set() -> None:
    with pytest.raises(ValueError, match="prompt 77: no reference answer; set answer_field"):
        score(ExactAnswer(), None, "18")


def prompts_of(tmp_path, *lines: str) -> list[Prompt]:
    path = tmp_path / "val.jsonl"
    path.write_text("\n".join(lines))
    tokenizer = load_tokenizer("asset:countdown_policy")
    return PromptDataset(PromptSource(JsonLines(str(path)), answer_field=None), tokenizer).prompts


@dataclass(frozen=True)
class Own:
    """A reward as the README writes one."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        gold = reference_answer(prompt)
        return [float(gold in c.text) for c in completions]


@pytest.mark.parametrize("fn", [Own(), ExactAnswer(), MathReward(), TaskReward(Arithmetic()), TaskReward(Sort())])
def test_a_row_without_its_answer_is_named_and_never_scores_0(tmp_path, fn) -> None:
    prompts = prompts_of(tmp_path, "", '{"prompt": "1 2=3:"}')
    with pytest.raises(RewardError, match=r"val\.jsonl, line 2: .*answer"):
        RewardSum([RewardTerm(fn, "correct")]).score(prompts, [[completion("no number")]])


@pytest.mark.parametrize("columns", ["", ', "numbers": [1, 2]', ', "numbers": [1, 2], "target": null'])
@pytest.mark.parametrize("text", ["1+2", "no expression"])
def test_a_row_without_a_column_of_the_task_is_named_whatever_the_text(tmp_path, columns, text) -> None:
    prompts = prompts_of(tmp_path, f'{{"prompt": "1 2=3:"{columns}}}')
    with pytest.raises(RewardError, match=r"val\.jsonl, line 1: .*needs the column '(target|numbers)'"):
        RewardSum([RewardTerm(TaskReward(Countdown()), "correct")]).score(prompts, [[completion(text)]])


def test_format_reward_wants_the_whole_text() -> None:
    good = "<think>a\nb</think>\n<answer>18</answer>"
    assert score(FormatReward(), None, good + "\n", good + " bye", "18") == [1, 0, 0]
    assert score(FormatReward(pattern=r"\d", full=False), None, "a 1", "a") == [1, 0]
    assert score(FormatReward(pattern=r".*", max_chars=3), None, "abc", "abcd") == [1, 0]


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (16384, 0), (17408, -0.25), (18432, -0.5), (20480, -1), (30000, -1)]
)
def test_overlong_penalty_has_the_worked_values(length: int, penalty: float) -> None:
    # with 20480 and 4096: (16384 - 17408) / 4096 = -.25
    assert OverlongPenalty().penalty(length) == penalty
    assert OverlongPenalty(factor=0.5).penalty(length) == penalty / 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExactAnswer(pattern="("), "not a regular expression"),
        (lambda: ExactAnswer(pattern="a", after="b"), "not both"),
        (lambda: FormatReward(pattern="("), "not a regular expression"),
        (lambda: OverlongPenalty(max_tokens=10, cache_tokens=11), "cache_tokens <= max_tokens"),
        (lambda: OverlongPenalty(factor=-1), "factor must be >= 0"),
    ],
)
def test_bad_options_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
