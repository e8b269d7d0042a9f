"""Supervised fine-tuning on the packed forward."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lqrl import assets
from lqrl.learner.sft import SFTDataset, SFTModule
from lqrl.modeling.backbone import load_model

ROWS = [
    {"prompt": "1 2=3:", "solution": "1+2"},
    {"prompt": "10 2 3=60:", "solution": "10*2*3"},
    {"prompt": "5=5:", "solution": "5"},
    {"prompt": "9 4=5:", "solution": "9-4"},
]
POLICY = assets.path("countdown_policy")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture
def module():
    return SFTModule(load_model(str(POLICY), dtype=torch.float32))


def test_a_row_is_prompt_answer_eos_and_only_the_latter_two_are_learned(tokenizer):
    batch = SFTDataset(ROWS, tokenizer)[[2]]
    assert tokenizer.decode(batch.input_ids[0]) == "5=5:5<eos>"
    assert batch.loss_mask.tolist() == [[False] * 4 + [True, True]]
    assert batch.attention_mask.all()


def test_a_batch_is_cut_to_its_longest_row(tokenizer):
    batch = SFTDataset(ROWS, tokenizer)[[0, 2]]
    assert batch.input_ids.shape == (2, len("1 2=3:1+2") + 1)
    assert batch.attention_mask.sum(1).tolist() == [10, 6]
    assert batch.input_ids[1, 6:].tolist() == [0] * 4


def test_logprobs_equal_those_of_transformers(tokenizer, module):
    batch = SFTDataset(ROWS, tokenizer)[[0, 1, 2, 3]]
    plain = AutoModelForCausalLM.from_pretrained(POLICY)
    with torch.no_grad():
        logits = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1]
        packed = module(batch)
    expected = logits.log_softmax(-1).gather(2, batch.input_ids[:, 1:, None]).squeeze(2)[batch.loss_mask[:, 1:]]
    assert packed.shape == (4 + 7 + 2 + 4,)
    torch.testing.assert_close(packed, expected, atol=1e-4, rtol=1e-4)


def test_the_loss_falls_under_a_trainer_and_is_the_same_twice(tokenizer):
    def final_loss() -> float:
        policy = load_model(AutoModelForCausalLM.from_pretrained(POLICY).config, dtype=torch.float32, seed=0)
        module = SFTModule(policy, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=15, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data = SFTDataset(ROWS, tokenizer)
        trainer.fit(module, data.loader(2, seed=0))
        with torch.no_grad():
            return -module(data[[0, 1, 2, 3]]).mean().item()

    loss = final_loss()
    assert loss < 1.0  # a uniform guess over 64 characters has log(64) = 4.16
    assert loss == final_loss()


def test_the_order_depends_on_the_seed_and_on_the_epoch(tokenizer):
    rows = [{"prompt": f"{i}=", "solution": str(i)} for i in range(10, 30)]
    data = SFTDataset(rows, tokenizer)

    def epochs(seed: int) -> list[list[int]]:
        loader = data.loader(20, seed=seed)
        return [next(iter(loader)).input_ids[:, :2].flatten().tolist() for _ in range(2)]

    first = epochs(0)
    assert first == epochs(0)
    assert first[0] != first[1]
    assert first != epochs(1)


@pytest.mark.parametrize("row", [{"prompt": "1="}, {"prompt": "1=", "solution": ""}])
def test_a_row_without_an_answer_is_named(tokenizer, row):
    with pytest.raises(ValueError, match=r"row 1 has no text in \['solution'\]; its fields are"):
        SFTDataset([ROWS[0], row], tokenizer)


def test_no_rows_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="no rows"):
        SFTDataset([], tokenizer)


def test_a_batch_larger_than_the_data_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="batch_size 5 is more than the 4 rows"):
        SFTDataset(ROWS, tokenizer).loader(5, seed=0)
