"""What the command line says when it says no: one sentence, with what to set instead."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("--model.scheme=int7", ["unknown quantization scheme 'int7'", "int8_w8a8"]),
        ("--model.scheme=int8_w8a9", ["'int8_w8a9' (did you mean int8_w8a8?)", "+lm_head", "+kv_int8"]),
        ("--model.scheme=int4_w4a16", ["q_proj has 64 inputs", "down_proj has 160 inputs", "; take int4_w4a16_g32"]),
        ("--model.max_grad_norm=-1", ["max_grad_norm must be above 0, got -1", "null does not clip"]),
        ("--model.max_grad_norm=0", ["max_grad_norm must be above 0, got 0"]),
        ("--model.max_staleness=-1", ["max_staleness must be at least 0, got -1"]),
        ("--model.token_budget=-5", ["token_budget must be at least 1, got -5"]),
        ("--model.num_minibatches=65", ["num_minibatches is 65, but an iteration has 64 rows", "set it to 64 at most"]),
        ("--model.aligned=maybe", ["model.aligned: must be true or false, got maybe"]),
        ("--model.backward=none", ["model.backward: must be high_precision or dequantized, got none"]),
        ("--model.engine.sleep_level=3", ["model.engine.sleep_level: must be 0 or 1, got 3"]),
        ("--model.sampling.stop_token_ids=3", ["sampling.stop_token_ids: must be a list, such as [a, b], got 3"]),
        ("--trainer.callbacks=lqrl.callbacks.HFExprt", ["no attribute 'HFExprt'; did you mean HFExport?"]),
        (
            "--trainer.callbacks=lqrl.callbacks.EngineRefresh",
            ["VADESampler learns", "add lqrl.callbacks.SamplerFeedback"],
        ),
        ("--model.val_samples=abc", ["model.val_samples", "int", "abc", "--model.help lqrl.learner.PolicyModule"]),
        ("--model.max_grad_nrom=1", ["'max_grad_nrom' is not accepted", "did you mean max_grad_norm?"]),
        ("--data.init_args.train.templte=x", ["--train.templte=x", "did you mean template?"]),
        (
            "--data.init_args.train.init_args.limit=1",
            ["--train.init_args.limit=1", "PromptSource has rows, prompt_field"],
        ),
        ("--trainer.maxepochs=1", ["--trainer.maxepochs", "did you mean --trainer.max_epochs?"]),
        ("--model.loss=lqrl.algorithms.PPOLoss", ["model.loss", "no attribute 'PPOLoss'"]),
        (
            "--model=nowhere.Module",
            ["No module named 'nowhere': it is not installed, and no nowhere.py is in"],
        ),
        ("--model.optimizer=nowhere.Adam", ["model.optimizer: No module named 'nowhere': it is not installed"]),
        ("--model.optimizer=torch.optim.AdamWW", ["model.optimizer: module 'torch.optim' has no", "mean AdamW?"]),
        ("--model.loss=lqrl.algorithms.GSPO", ["no attribute 'GSPO'; did you mean GSPOLoss?"]),
        (
            "--model.loss=lqrl.algorithms.GRPO",
            ["to a subclass of PolicyLoss; there is ClippedLoss, GSPO"],
        ),
        ("--model.loss=lqrl.algoritms.GSPOLoss", ["no attribute 'algoritms'; did you mean algorithms?"]),
        ("--model.engine=lqrl.engines.TorchEngin", ["no attribute 'TorchEngin'; did you mean TorchEngineFactory?"]),
        ("--data=lqrl.data.PromptData", ["no attribute 'PromptData'; did you mean PromptDataModule?"]),
        ("--config=missing.yaml", ["File does not exist", "missing.yaml"]),
        ("--data.train.rows.split=test", ["data.train.rows.split: must be train or validation, got test"]),
        ("--data.train.max_prompt_tokens=0", ["PromptSource.max_prompt_tokens must be at least 1, got 0"]),
        (
            "--model.engine.kv_cache_tokens=10",
            ["model.init_args.engine.init_args.kv_cache_tokens is 10", "max_tokens is 16): set it to ", " at least"],
        ),
        ("--model.lora.r=0", ["Lora: r and alpha must be positive"]),
        ("--model.loss=lqrl.algorithms.GSPOLoss", ["ACR widens", "acr: false"]),
        ("--model.scheme.skip=[a]", ["required: name", "set --model.scheme.name"]),
        ("--model.sampling.max_tokens=1000", ["model.init_args.sampling.max_tokens", "max_position_embeddings"]),
        ("--data.sampler.decay=3", ["data.sampler", "'decay' is not accepted", "--data.sampler.help lqrl.data.VADE"]),
    ],
)
def test_the_last_line_of_an_error_says_what_is_wrong_without_a_dump(lqrl, option, parts):
    done = lqrl("fit", option)
    assert done.failed
    assert [part for part in parts if part not in done.last] == []
    assert "Namespace" not in done.err
    assert "NestedArg" not in done.err
    assert "[--trainer" not in done.err


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["urls=[http://127.0.0.1:9]"], ["no vLLM server answers at http://127.0.0.1:9", "or correct urls"]),
        (
            ["urls=[http://127.0.0.1:9]", "partial.limit_s=9", "partial.max_lag=2"],
            ["max_staleness is 0; set", "max_staleness: 2"],
        ),
    ],
)
def test_an_engine_that_cannot_be_had_ends_with_a_sentence(lqrl, options, parts):
    engine = "--model.engine=lqrl.engines.vllm.VLLMServerEngineFactory"
    done = lqrl("fit", engine, "--model.engine.attempts=1", *[f"--model.engine.{option}" for option in options])
    assert done.failed
    assert [part for part in parts if part not in done.last] == []
    assert "LQRL_TRACEBACK=1 shows where" in done.err  # in the place of one


def test_what_was_refused_inside_a_value_is_the_only_error(lqrl):
    done = lqrl("fit", "--model.scheme.name=nf4", "--model.scheme.skip=abc")
    errors = done.err[done.err.index("error:") :].strip().splitlines()
    assert len(errors) == 1
    assert "model.scheme.skip: must be a list, such as [a, b], got abc" in errors[0]


def test_a_word_without_its_value_is_named(lqrl):
    assert "after --model.val_samples" in lqrl("fit", "--model.val_samples").last


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("accumulate_grad_batches=2", "model.init_args.token_budget"),
        ("gradient_clip_val=1.0", "model.init_args.max_grad_norm"),
        ("gradient_clip_algorithm=value", "model.init_args.max_grad_norm"),
        ("overfit_batches=1", "data.init_args.train.limit"),
        ("barebones=true", "trainer.logger"),
        ("sync_batchnorm=true", "leave it out"),
        ("precision=bf16-mixed", "model.init_args.dtype"),
    ],
)
def test_an_option_of_the_trainer_that_cannot_be_followed_names_ours(lqrl, option, instead):
    done = lqrl("fit", f"--trainer.{option}")
    assert done.failed
    assert f"trainer.{option.split('=')[0]}" in done.last or "precision is" in done.last
    assert instead in done.last
