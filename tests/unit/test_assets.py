"""The shipped starting policy."""

from __future__ import annotations

import pytest
import torch

from lqrl import assets
from lqrl.data.tasks import Countdown


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets.path("countdown_policy"))


def test_an_unknown_asset_is_named_with_those_that_ship():
    with pytest.raises(FileNotFoundError, match=r"'sorting_policy'; there are: countdown_policy"):
        assets.path("sorting_policy")


def test_resolve_replaces_asset_names_and_nothing_else():
    assert assets.resolve("asset:countdown_policy") == str(assets.path("countdown_policy"))
    assert assets.resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_the_weights_take_at_most_500_kilobytes():
    assert (assets.path("countdown_policy") / "model.safetensors").stat().st_size <= 500_000


def test_a_character_is_a_token_and_comes_back(tokenizer):
    text = "3 7 24=45:3*7+24"
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer) == 64
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_capitals_are_lowered_and_unknown_characters_raise(tokenizer):
    assert tokenizer("What is 3?")["input_ids"] == tokenizer("what is 3?")["input_ids"]
    with pytest.raises(Exception, match="Missing"):
        tokenizer("3 $ 7")


def test_special_tokens_are_those_of_the_model(tokenizer):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(assets.path("countdown_policy"))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


def test_the_policy_starts_where_reinforcement_learning_has_room(tokenizer):
    """Measured over 1024 problems x 8: .30. Here 128 x 4 samples; one standard error of the mean is about .03."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets.path("countdown_policy"))
    task = Countdown(size=400, split="validation")
    rows = [row for row in task if len(row["prompt"]) == 10][:128]  # one length: no padding
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt")["input_ids"]
    output = model.generate(inputs, do_sample=True, top_k=0, num_return_sequences=4, max_new_tokens=20)
    texts = tokenizer.batch_decode(output[:, 10:], skip_special_tokens=True)
    solved = torch.tensor([task.check(rows[i // 4], text) for i, text in enumerate(texts)], dtype=torch.float32)
    assert 0.2 <= solved.mean() <= 0.42
