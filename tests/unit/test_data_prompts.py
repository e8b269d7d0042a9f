from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lqrl.data import Countdown, HubDataset, JsonLines, PromptDataset, PromptSource, UniformBudget
from lqrl.data.prompts import prompt_id
from lqrl.testing.tokenizer import character_tokenizer


def write(path: Path, *rows: dict | str) -> JsonLines:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return JsonLines(str(path))


def test_rows_of_a_file_become_prompts(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"prompt": "1+1", "answer": 2, "level": 3}, "", {"prompt": "2+2", "answer": "4"})
    first, second = PromptDataset(PromptSource(rows), character_tokenizer())
    assert (first.text, first.answer, dict(first.fields)) == ("1+1", "2", {"level": 3})
    # '1' is the 18th printable character (code 49, 49 - 32 = 17), after 4 special tokens and the line break
    assert first.input_ids == (22, 16, 22)
    assert second.answer == "4"


def test_tokenizer_adds_bos_to_plain_prompts_unless_told_not_to(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"prompt": "1", "answer": "2"})
    tokenizer = character_tokenizer(bos=True, chat=True)
    assert PromptDataset(PromptSource(rows), tokenizer)[0].input_ids == (2, 22)
    assert PromptDataset(PromptSource(rows, add_special_tokens=False), tokenizer)[0].input_ids == (22,)
    assert PromptDataset(PromptSource(rows, chat=True), tokenizer)[0].input_ids[0] != 2


def test_chat_template_gets_system_prompt_and_generation_prompt(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"q": "1+1?"})
    source = PromptSource(rows, prompt_field="q", answer_field=None, chat=True, system_prompt="Be brief.")
    prompt = PromptDataset(source, character_tokenizer(chat=True))[0]
    assert prompt.text == "<system>Be brief.\n<user>1+1?\n<assistant>"
    assert prompt.answer is None


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "hi"}], "answer": "x"})
    assert (
        PromptDataset(PromptSource(rows, chat=True), character_tokenizer(chat=True))[0].text == "<user>hi\n<assistant>"
    )


def test_template_is_filled_from_the_columns(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"a": 3, "b": 4, "answer": "7"})
    assert PromptDataset(PromptSource(rows, template="{a}+{b}="), character_tokenizer())[0].text == "3+4="


def test_answer_after_the_last_marker(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"question": "q", "answer": "9 #### eggs\n#### 18"})
    source = PromptSource(rows, prompt_field="question", answer_after="####")
    assert PromptDataset(source, character_tokenizer())[0].answer == "18"


def test_a_task_is_a_source() -> None:
    dataset = PromptDataset(PromptSource(Countdown(size=4)), character_tokenizer())
    assert dataset[0].text == "9 7 18=45:"
    assert dataset[0].fields["numbers"] == (9, 7, 18)
    assert len(dataset) == 4


def test_ids_are_stable_and_63_bits() -> None:
    assert prompt_id("a", 0) == 4007838831366158568
    assert prompt_id("a", 0) != prompt_id("a", 1) != prompt_id("b", 1)
    dataset = PromptDataset(PromptSource(Countdown(size=50)), character_tokenizer())
    assert all(0 <= i < 2**63 for i in dataset.ids)


def test_ids_do_not_change_when_other_rows_are_dropped(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"prompt": "long prompt", "answer": "1"}, {"prompt": "ok", "answer": "1"})
    source = PromptSource(rows, max_prompt_tokens=5, overlong="drop")
    dropped = PromptDataset(source, character_tokenizer())
    everything = PromptDataset(PromptSource(rows), character_tokenizer())
    assert dropped.dropped == 1
    assert dropped.ids == everything.ids[1:]


def test_dropped_rows_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = write(tmp_path / "a.jsonl", {"prompt": "long prompt", "answer": "1"}, {"prompt": "ok", "answer": "1"})
    PromptDataset(PromptSource(rows, overlong="drop"), character_tokenizer(), max_prompt_tokens=5)
    assert "dropped 1 of 2 rows, longer than 5 tokens" in caplog.text


def test_digest_sees_the_text_behind_equal_ids(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        rows = write(tmp_path / "a.jsonl", {"prompt": text, "answer": "1"})
        return PromptDataset(PromptSource(rows), character_tokenizer()).digest()

    assert digest("one") == digest("one")
    assert digest("one") != digest("two")


GOOD = {"prompt": "p", "answer": "a"}


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], {}, r"data\.jsonl is empty"),
        ([GOOD, "{'prompt': 1}"], {}, r"data\.jsonl, line 2: not JSON"),
        ([GOOD, "[1]"], {}, r"line 2: a list instead of an object"),
        ([GOOD, "", {"answer": "a"}], {}, r"line 3: no column 'prompt'; set prompt_field to one of \['answer'\]"),
        ([{"prompt": "p"}], {}, r"line 1: no column 'answer'; set answer_field"),
        ([{"prompt": "p", "answer": None}], {}, r"line 1: no column 'answer'"),
        ([{"prompt": "p", "answer": " "}], {}, r"line 1: the answer is empty"),
        ([{"prompt": " ", "answer": "a"}], {}, r"line 1: the prompt is empty"),
        ([{"prompt": 3, "answer": "a"}], {}, r"line 1: the prompt is a int; write it as a string"),
        ([{"prompt": [], "answer": "a"}], {}, r"line 1: the prompt is a list; set chat: true"),
        ([GOOD], {"template": "{x}"}, r"line 1: template names column 'x'"),
        ([GOOD], {"answer_after": "####"}, r"line 1: the answer does not contain '####'"),
        ([{**GOOD, "prompt": "12345"}], {"max_prompt_tokens": 4}, r"line 1: the prompt has 5 tokens, more than"),
        ([{**GOOD, "prompt": "12345"}], {"max_prompt_tokens": 4, "overlong": "drop"}, "none of 1 rows is left"),
        ([GOOD], {"chat": True}, "no chat template"),
    ],
)
def test_unusable_rows_are_named(tmp_path: Path, lines: list, options: dict, message: str) -> None:
    rows = write(tmp_path / "data.jsonl", *lines)
    with pytest.raises(ValueError, match=message):
        PromptDataset(PromptSource(rows, **options), character_tokenizer())


def test_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"no/such\.jsonl does not exist"):
        PromptDataset(PromptSource(JsonLines("no/such.jsonl")), character_tokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system_prompt": "x"}, "need chat: true"),
        ({"answer_field": None, "answer_after": "#"}, "needs answer_field"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"overlong": "cut"}, "overlong"),
        ({"limit": 0}, "limit"),
    ],
)
def test_contradicting_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptSource(Countdown(size=1), **options)


def test_hub_datasets_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install 'datasets>=4', or"):
        len(HubDataset("openai/gsm8k", "main"))


def test_hub_dataset_reads_a_local_dataset(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
    source = PromptSource(HubDataset(str(tmp_path)), prompt_field="question", answer_after="####")
    prompt = PromptDataset(source, character_tokenizer())[0]
    assert (prompt.text, prompt.answer) == ("q", "1")


def test_uniform_budget_gives_all_the_same() -> None:
    assert UniformBudget(3)([10, 20], None) == [3, 3]
    with pytest.raises(ValueError, match="group_size must be at least 1"):
        UniformBudget(0)
