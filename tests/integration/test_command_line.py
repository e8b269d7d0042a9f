"""What a user meets on the command line: where files go, what errors say, what an interrupted run leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lqrl import cli

QUICKSTART = Path("configs/quickstart.yaml").resolve()
LESS = [
    "--trainer.max_epochs=1",
    "--trainer.num_sanity_val_steps=0",
    "--data.init_args.iterations_per_epoch=2",
    "--data.init_args.prompts_per_iteration=8",
    "--data.init_args.train.limit=32",
    "--data.init_args.val.limit=4",
]
FAILING = ["--data.train.rows=lqrl.data.JsonLines", "--data.train.rows.path=missing.jsonl"]


class Outcome:
    """Of one command: its exit status, what it printed last, and what it left."""

    def __init__(self, status: object, folder: Path, out: str, err: str) -> None:
        self.failed, self.out = status not in (0, None), out
        self.err = err + (status if isinstance(status, str) else "")  # SystemExit prints a string to stderr
        self.last = self.err.strip().splitlines()[-1] if self.err.strip() else ""
        self.files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture
def lqrl(tmp_path, monkeypatch, capsys):
    """``lqrl(command, option, ...)`` on the quickstart, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(command: str, *options: str, before: tuple[str, ...] = ("--config", str(QUICKSTART), *LESS)) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["lqrl", command, *before, *options])
        status: object = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code
        return Outcome(status, tmp_path, *capsys.readouterr())

    return call


def test_a_dry_run_trains_and_writes_nothing(lqrl):
    done = lqrl("fit", "--trainer.fast_dev_run=true")
    assert not done.failed
    assert "version 1: val/pass@1" in done.out  # one iteration, one validation
    assert "nothing was written" in done.out
    assert "config.yaml" not in done.out
    assert done.files == []


def test_without_a_logger_the_files_go_to_the_root_folder_and_every_file_that_is_named_exists(lqrl, tmp_path):
    done = lqrl("fit", "--trainer.logger=false")
    assert {path.split("/")[0] for path in done.files} == {"runs"}
    assert {"runs/config.yaml", "runs/hf/model.safetensors", "runs/rollouts.jsonl"} <= set(done.files)
    words = done.out.splitlines()[-1].split()
    assert words[:2] == ["lqrl", "fit"]
    assert all((tmp_path / word).exists() for word in words if word.startswith("runs"))
    assert yaml.safe_load((tmp_path / "runs" / "config.yaml").read_text())["trainer"]["default_root_dir"] == "runs"


def test_a_root_folder_of_ones_own_holds_everything(lqrl):
    done = lqrl("fit", "--trainer.logger=false", "--trainer.default_root_dir=here/there")
    assert all(path.startswith("here") for path in done.files)
    assert "here/there/hf/model.safetensors" in done.files


@pytest.mark.parametrize(
    "options",
    [
        FAILING,
        ["--trainer.precision=bf16-mixed"],
        ["--model.scheme=nf4"],
        ["--model.sampling.max_tokens=1000"],  # found by the engine, in the first iteration
        ["--ckpt_path=missing.ckpt"],
    ],
)
def test_a_start_that_fails_leaves_no_folder(lqrl, options):
    done = lqrl("fit", *options)
    assert done.failed
    assert done.files == []


def test_a_validation_that_fails_leaves_no_folder_and_one_that_works_leaves_its_config(lqrl):
    failing = lqrl("validate", "--data.val.rows=lqrl.data.JsonLines", "--data.val.rows.path=missing.jsonl")
    assert failing.failed
    assert failing.files == []
    assert "runs/quickstart/version_0/config.yaml" in lqrl("validate").files


def test_a_failed_start_leaves_what_was_there_before(lqrl, tmp_path):
    folder = tmp_path / "runs" / "quickstart"
    folder.mkdir(parents=True)
    assert lqrl("fit", *FAILING).files == ["runs", "runs/quickstart"]
    (folder / "note.txt").write_text("mine")
    assert lqrl("fit", *FAILING).files == ["runs", "runs/quickstart", "runs/quickstart/note.txt"]


def test_the_last_lines_say_before_and_after_only_when_there_were_two_validations(lqrl):
    once = lqrl("fit").out
    assert "val/pass@1: 0." in once
    assert "at version 2" in once
    assert "before" not in once
    twice = lqrl("fit", "--trainer.num_sanity_val_steps=-1").out
    assert "before (version 0)" in twice
    assert "after (version 2)" in twice


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
        ("--model=nowhere.Module", ["No module named 'nowhere'"]),
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


def test_a_run_that_learned_nothing_says_so_at_its_end(lqrl):
    one_token = ["--model.sampling.max_tokens=1", "--trainer.limit_val_batches=0"]  # no answer has only one
    with pytest.warns(UserWarning, match=r"nothing was learned: none of the 2 iterations .* \(train/rows 0\)"):
        assert not lqrl("fit", *one_token).failed


def test_a_word_without_its_value_is_named(lqrl):
    assert "after --model.val_samples" in lqrl("fit", "--model.val_samples").last


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("--model.scheme.help", ["int4_w4a16_g32", "+kv_fp8", "scheme.skip"]),
        ("--model.init_args.scheme.help=nf4", ["nf4 per group64", "scheme.weight"]),
        (
            "--model.scheme.help",
            ["scheme.weight.dtype (Literal['int8', 'int4'", "'block'], required", "'e8m0'], default"],
        ),
        ("--model.sampling.help", ["sampling.max_tokens (int, default 16)"]),
        ("--model.lora.help", ["lora.r (int, default 16)", "refresh"]),
        ("--data.train.help", ["train.answer_field", "train.rows (RowSource, required)"]),
    ],
)
def test_the_options_of_a_value_are_listed(lqrl, word, parts):
    done = lqrl("fit", word, before=())
    assert not done.failed
    assert [part for part in parts if part not in done.out] == []


def test_the_help_of_a_class_by_path_is_still_jsonargparses(lqrl):
    assert "--engine.max_num_seqs" in lqrl("fit", "--model.engine.help=lqrl.engines.TorchEngineFactory").out


def test_a_preset_without_some_layers_runs_as_the_error_of_the_whole_preset_says(lqrl):
    pytest.importorskip("bitsandbytes")
    refused = lqrl("fit", "--model.scheme=nf4").last
    assert "--model.init_args.scheme.name nf4 --model.init_args.scheme.skip '[\"*.down_proj\"]'" in refused
    options = ["--model.init_args.scheme.name=nf4", '--model.init_args.scheme.skip=["*.down_proj"]']
    assert not lqrl("fit", *options, "--trainer.fast_dev_run=true").failed


def test_help_lists_the_doctor(lqrl):
    text = lqrl("--help", before=()).out
    assert "{fit,validate,doctor}" in text
    assert "\n    doctor  " in text


def test_a_reader_that_goes_away_is_no_error_of_the_doctor():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "lqrl", "doctor", "--json"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "BrokenPipeError" not in done.stderr


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


def test_options_that_switch_callbacks_off_do(lqrl):
    options = ["--trainer.enable_progress_bar=false", "--trainer.enable_checkpointing=false"]
    done = lqrl("fit", *options)
    assert not done.failed
    assert "0/2" not in done.out
    assert "runs/quickstart/version_0/hf/model.safetensors" in done.files
    assert not [path for path in done.files if path.endswith(".ckpt")]


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        (["--trainer.max_steps=1"], 1),
        (["--trainer.limit_train_batches=0.5"], 1),  # a whole number may be read as a fraction after many parses
        (["--trainer.max_steps=2", "--model.init_args.num_minibatches=2"], 1),  # it counts optimizer steps
    ],
)
def test_ways_to_shorten_a_run_do_what_the_docs_say(lqrl, tmp_path, options, iterations):
    lqrl("fit", *options)
    lines = (tmp_path / "runs/quickstart/version_0/rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["iteration"] for line in lines} == set(range(iterations))


SLOW = """
import time
from dataclasses import dataclass
from lqrl.rewards import RewardFn


@dataclass(frozen=True)
class Slow(RewardFn):
    def __call__(self, prompt, completions):
        print("scoring", flush=True)
        time.sleep(0.5)
        return [0.0] * len(completions)
"""


@pytest.fixture
def listening() -> Iterator[None]:
    """A process that a shell started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_ctrl_c_in_the_first_iteration_says_what_to_do_next_and_says_it_last(tmp_path, signals):
    (tmp_path / "slow.py").write_text(SLOW)
    terms = "--model.reward.terms=[{class_path: lqrl.rewards.RewardTerm, init_args: {name: correct, fn: slow.Slow}}]"
    words = ["--config", str(QUICKSTART), *LESS, terms]
    run = subprocess.Popen(
        [sys.executable, "-m", "lqrl", "fit", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "LQRL_TRACEBACK": ""},
    )  # fmt: skip
    assert run.stdout is not None
    lines = iter(run.stdout.readline, "")
    next(line for line in lines if "scoring" in line)
    run.send_signal(signals[0])
    for number in signals[1:]:
        next(line for line in lines if "Once more stops at once" in line)
        run.send_signal(number)
    text = "".join(lines)
    assert run.wait(timeout=120) == 128 + signals[0]
    folder = "runs/quickstart/version_0"
    last = text.rstrip().splitlines()[-1]
    assert "weights_only" not in text
    if len(signals) == 1:
        assert last == f"  lqrl fit --config {folder}/config.yaml --ckpt_path {folder}/checkpoints/interrupted.ckpt"
        assert (tmp_path / folder / "config.yaml").is_file()
    else:
        assert last.endswith("nothing is saved. Start again with the same command.")
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [(), ("--model.sampling.max_tokens=1000",)])
def test_ctrl_c_after_a_run_is_pythons_own_again(lqrl, options, listening):
    lqrl("fit", *options)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_before_the_run_says_so(lqrl, tmp_path, listening):
    (tmp_path / "interrupting.py").write_text("import signal\n\nsignal.raise_signal(signal.SIGINT)\n")
    done = lqrl("fit", "--model=interrupting.Module")
    assert done.failed
    assert "Start again with the same command." in done.last
    assert done.files == ["interrupting.py"]


def test_validation_rows_without_an_answer_are_named(lqrl, tmp_path):
    rows = [{"prompt": "1 2=3:", "answer": "1+2"}, {"prompt": "2 2=4:"}]
    (tmp_path / "val.jsonl").write_text("\n".join(map(json.dumps, rows)))
    val = ["--data.val.rows=lqrl.data.JsonLines", "--data.val.rows.path=val.jsonl"]
    assert "val.jsonl, line 2: no column 'answer'" in lqrl("validate", *val).last
    done = lqrl("validate", *val, "--data.val.answer_field=null")  # the quickstart's reward reads numbers and target
    assert "val.jsonl, line 1: " in done.last
    assert done.files == ["val.jsonl"]
