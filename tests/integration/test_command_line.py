"""What a user meets on the command line: where files go, what errors say, what an interrupted run leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml
from command_runs import LESS, QUICKSTART

from lqrl import __version__, cli

FAILING = ["--data.train.rows=lqrl.data.JsonLines", "--data.train.rows.path=missing.jsonl"]


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


def test_a_run_that_learned_nothing_says_so_at_its_end(lqrl):
    one_token = ["--model.sampling.max_tokens=1", "--trainer.limit_val_batches=0"]  # no answer has only one
    with pytest.warns(UserWarning, match=r"nothing was learned: none of the 2 iterations .* \(train/rows 0\)"):
        assert not lqrl("fit", *one_token).failed


def test_a_marker_that_no_completion_holds_is_named_at_the_end(lqrl):
    exact = "lqrl.rewards.ExactAnswer, init_args: {after: '####'}}"
    terms = f"[{{class_path: lqrl.rewards.RewardTerm, init_args: {{name: correct, fn: {{class_path: {exact}}}}}]"
    rows = ["--trainer.limit_val_batches=0"]
    with pytest.warns(UserWarning, match=r"'correct' was 0 throughout: .* of the 2 iterations .* \(after\) '####'"):
        assert not lqrl("fit", f"--model.reward.terms={terms}", *rows).failed


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


@pytest.mark.parametrize("words", [[], ["fti"]])
def test_who_names_no_command_is_told_all_of_them(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["lqrl", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert re.search(r"fit'?, ?'?validate'?, ?'?doctor", capsys.readouterr().err)


def test_the_version_is_printed(lqrl):
    assert lqrl("--version", before=()).out == f"lqrl {__version__}\n"


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
