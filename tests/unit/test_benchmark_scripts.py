"""The GPU benchmarks run, small, on a CPU: a script must not fail late."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import needs_triton
from transformers import AutoModelForCausalLM

from lqrl.quant import QuantScheme

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = {
    "aligned_linear.py": (["--tokens", "8"], ["| qkv, 8", "| down, 8", "| all, 8"]),
    "refresh.py": (["--layers", "1"], ["| fp8_per_channel", "| int8_w8a8"]),
    "exact_cost.py": (
        ["--batches", "8", "16", "--prompt", "8", "--tokens", "6", "--rows", "3"],
        [f"{name:16} {n:5d} {n * 6:8d} of {n * 6:8d}" for name in ("none", "int4_w4a16") for n in (8, 16)],
    ),
}


@pytest.mark.parametrize("script", list(SCRIPTS))
def test_a_benchmark_prints_its_rows(script, monkeypatch, capsys):
    options, wanted = SCRIPTS[script]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [script, "--device", "cpu", "--tiny", "--repeats", "1", *options])
    runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(any(line.startswith(row) for line in printed.splitlines()) for row in wanted), printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize(
    "script",
    ["refresh", *(pytest.param(name, marks=needs_triton) for name in ("hopper_gemm", "decode_gemm", "cache_write"))],
)
def test_what_measures_a_gpu_says_that_there_is_none(script, monkeypatch, capsys):
    assert re.search(r"measures a GPU, and torch .* sees none", refusal(script, [], monkeypatch, capsys))


@pytest.mark.parametrize(
    ("script", "options", "reason"),
    [
        ("learner", ["--total", "1"], "--total: must be at least 2, not 1"),
        ("learner", ["--token-budget", "64", "0"], "--token-budget: must be at least 1, not 0"),
        ("learner", ["--repeats", "-1"], "--repeats: must be at least 1, not -1"),
        ("learner", ["--learners", "transformers", "unknown"], "--learners: unknown quantization scheme 'unknown'"),
        ("learner", ["--limit", "0"], "--limit: must be more than 0 seconds, not 0"),
        ("iteration", ["--iterations", "1"], "--iterations: must be at least 2, not 1"),
        ("rollout", ["--dtype", "unknown"], "--dtype: unknown dtype 'unknown'; choose one of float32, bfloat16"),
        ("rollout", ["--batch", "4", "--tokens", "9", "7"], "2 numbers for 1 batches"),
        ("rollout", ["--batch", "12", "--group", "8"], "does not divide"),
        ("engine", ["--batch", "4"], "--samples 8 does not divide --batch 4"),
        ("int8_gemm", ["--shape", "0,64,64"], "--shape: must be at least 1, not 0"),
        ("int8_gemm", ["--shape", "1,2"], "--shape: must be M,K,N, not 1,2"),
        ("mismatch", ["--dtype", "float32,unknown"], "--dtype: unknown dtype 'unknown'"),
    ],
)
def test_options_are_refused_before_anything_is_printed(script, options, reason, monkeypatch, capsys):
    assert reason in refusal(script, options, monkeypatch, capsys)


@pytest.mark.skipif(util.find_spec("trl") is not None, reason="TRL is here")
def test_a_package_that_the_children_would_miss_is_named_with_its_option(monkeypatch, capsys, tmp_path):
    said = refusal("iteration", ["--device", "cpu", "--trl-path", str(tmp_path)], monkeypatch, capsys)
    assert said.startswith("error: trl is not installed")
    assert "--trl-path" in said
    (tmp_path / "trl").mkdir()
    import_module("options").require("trl", "--trl-path", None, tmp_path)


@pytest.mark.skipif(util.find_spec("vllm") is not None, reason="vLLM is here")
@pytest.mark.parametrize("script", ["vllm_refresh", "vllm_transport"])
def test_without_vllm_no_child_is_started(script, monkeypatch, capsys):
    said = refusal(script, ["--model", "tiny", "--device", "cpu", "--formats", "none"], monkeypatch, capsys)
    assert "vllm is not installed" in said
    assert "--vllm-python" in said


def refusal(script: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """What a script says that ends with the status of a wrong option, having printed nothing else."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    return printed.err


def test_prefills_are_timed_and_their_products_counted(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    argv = ["prefill.py", "--model", "tiny", "--device", "cpu", "--batch", "2", "--prompt", "8", "--tokens", "8", "64"]
    monkeypatch.setattr(sys, "argv", argv)
    prefill = import_module("prefill")
    prefill.main()
    rows = [row.split(" | ")[:3] for row in capsys.readouterr().out.splitlines() if "| 2 | 8 |" in row]
    assert [row[0] for row in rows] == ["| none"] * 2 + ["| fp8_per_channel+kv_fp8_static"] * 2
    engine = prefill.build(QuantScheme.preset("none"), None, prefill.parse(argv[1:]))
    linear = [m for m in engine.decoder.model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert prefill.SHAPES["tiny"].linear_weights == sum(m.weight.numel() for m in linear)


def test_exported_checkpoints_are_read_back(monkeypatch, capsys):
    options = ["--peer", "lqrl", "--device", "cpu", "--tiny", "--families", "moe", "--formats", "int8_w8a8", "unknown"]
    script = "vllm_checkpoint.py"
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [script, *options, "--prompts", "2", "--tokens", "4", "--jobs", "2"])
    runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    read, refused = [row for row in capsys.readouterr().out.splitlines() if row.startswith("moe")]
    assert read.split()[1:6] == ["int8_w8a8", "8", "0.00e+00", "0.00e+00", "0.00e+00"]
    assert "not loaded: ValueError: unknown quantization scheme 'unknown'" in refused


@pytest.fixture
def rollout(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("rollout")


def test_what_a_ratio_is_to_is_measured_first(rollout):
    argv = ["--engines", "torch", "vllm", "transformers", "--formats", "int8_w8a8", "none", "--kv", "fp8", "none"]
    jobs = rollout.make_jobs(rollout.parse([*argv, "--batch", "8", "256", "--vllm-path", "/site"]))
    assert [tuple(job.case[name] for name in ("format", "kv", "engine")) for job in jobs] == [
        ("none", "none", "vllm"),
        ("none", "none", "transformers"),
        ("none", "none", "torch"),
        ("int8_w8a8", "fp8", "vllm"),
        ("int8_w8a8", "fp8", "torch"),
        ("int8_w8a8", "none", "vllm"),
        ("int8_w8a8", "none", "torch"),
        ("none", "fp8", "vllm"),
        ("none", "fp8", "torch"),
    ]
    assert [(row["batch"], row["new"]) for row in jobs[0].rows] == [(8, 128), (256, 512)]
    assert (jobs[0].case["batch"], jobs[0].case["positions"]) == (256, 256 + 512 + 1)
    assert [job.environment.get("PYTHONPATH", "").split(":")[0] == "/site" for job in jobs[:3]] == [True, False, False]


def test_new_tokens_go_with_their_batches(rollout):
    assert rollout.new_tokens([4, 2], [9, 7]) == [(2, 7), (4, 9)]


def test_ratios_are_to_bf16_of_the_same_engine_and_to_vllm_in_the_same_formats(rollout):
    ratios = rollout.Ratios()

    def add(engine, fmt, rate):
        row = {"engine": engine, "format": fmt, "kv": "none", "batch": 8, "tokens_per_s": rate}
        return ratios.add(row | {"decode_tokens_per_s": 2 * rate, "floor_tokens_per_s": 100.0})

    assert "tokens_per_s_x_bf16" not in add("vllm", "none", 10.0)
    assert add("torch", "none", 20.0)["decode_tokens_per_s_x_vllm"] == 2.0
    failed = {"engine": "vllm", "format": "int8_w8a8", "kv": "none", "batch": 8, "error": "no"}
    assert ratios.add(failed) == failed
    last = add("torch", "int8_w8a8", 30.0)
    assert last["tokens_per_s_x_bf16"] == 1.5
    assert "tokens_per_s_x_vllm" not in last
    assert last["of_floor"] == 0.6


def test_the_floor_counts_every_weight_and_cached_token_once(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    shapes = import_module("shapes")
    shape, preset = shapes.SHAPES["8B"], QuantScheme.preset
    head = 151936 * 4096
    layers = 36 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12288)
    assert shape.step_bytes(preset("none"), 1, 0) == 2 * (layers + head)
    assert shape.step_bytes(preset("fp8_per_channel+lm_head"), 1, 0) == layers + head
    assert shape.step_bytes(preset("int4_w4a16"), 1, 0) == layers * (4 + 16 / 128) / 8 + 2 * head
    both = [shape.step_bytes(preset(f"none{kv}"), 256, 512) - 2 * (layers + head) for kv in ("", "+kv_fp8")]
    assert both == [256 * 512 * 147456, 256 * 512 * 73728]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes.SHAPES["0.6B"].config(64))
    counted = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    shape = shapes.SHAPES["0.6B"]
    assert shape.linear_weights == counted - (0 if shape.tied else shape.vocabulary * shape.hidden)


def test_the_rollout_benchmark_prints_and_keeps_its_rows(rollout, monkeypatch, capsys, tmp_path):
    options = ["--model", "tiny", "--device", "cpu", "--batch", "2", "4", "--prompt", "6", "--tokens", "24", "24"]
    options += ["--engines", "torch", "transformers", "--formats", "none", "int4_w4a16", "--kv", "none"]
    options += ["--group", "2", "--repeats", "3", "--rows", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", ["rollout.py", *options])
    rollout.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| t")]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    wanted = [
        (e, f, n) for e, f in [("transformers", "none"), ("torch", "none"), ("torch", "int4_w4a16")] for n in (2, 4)
    ]
    assert [tuple(row.get(name) for name in ("engine", "format", "batch", "error")) for row in rows] == [
        (*each, None) for each in wanted
    ]
    assert len(lines) == len(rows)
    assert all(row["tokens_per_s"] > 0 and row["card"] == "CPU" and "torch" in row["versions"] for row in rows)
    assert "tokens_per_s_x_bf16" in rows[-1]
    assert "of_floor" not in rows[-1]  # which a CPU has not


def test_the_steps_of_a_rollout_are_timed_part_by_part(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    argv = ["rollout_steps.py", "--model", "tiny", "--device", "cpu", "--batch", "2", "--prompt", "8", "--pause", "0"]
    monkeypatch.setattr(sys, "argv", [*argv, "--tokens", "67", "--parts", "3", "--formats", "none"])
    rollout_steps = import_module("rollout_steps")
    rollout_steps.main()
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if row.startswith("| none")]
    assert [row[1] for row in rows] == [*(f"rollout, {n} of 3" for n in (1, 2, 3)), "rollout, all", "after a pause"]
    assert all(float(row[4]) > 0 for row in rows)


def test_a_step_takes_the_mean_of_its_runs_and_a_gap_what_lies_between(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    steps = import_module("rollout_steps").Steps(False, [(0.0, 0.8, 8), (0.9, 1.7, 8), (2.0, 2.2, 2)])
    assert steps.share(slice(None)) == pytest.approx((100.0, 200.0))
    assert steps.share(slice(0, 1)) == pytest.approx((100.0, 0.0))


@pytest.fixture
def learner(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("learner")


def test_lengths_are_mixed_and_add_up(learner):
    pairs = learner.mixed_lengths(65536, 2048)
    lengths = [p + c for p, c in pairs]
    assert 65535 <= sum(lengths) <= 65536
    assert pairs == learner.mixed_lengths(65536, 2048)
    assert min(min(pair) for pair in pairs) >= 1
    assert max(lengths) <= 2048
    completions = sorted(c for _, c in pairs)
    assert completions[len(completions) // 4] < 400 < completions[-len(completions) // 4]
    assert learner.padded_tokens([3, 5, 2, 1, 4], 2) == 2 * 5 + 2 * 2 + 4


def test_learners_of_this_library_are_compiled_too(learner):
    names = ["--models", "0.6B", "--learners", "transformers", "none", "int8_w8a8", "--token-budget", "512"]
    jobs = learner.make_jobs(learner.parse([*names, "--compile"]))
    rows = [(job.case["learner"], job.case["compiled"], job.rows[0]["learner"]) for job in jobs]
    assert rows == [
        ("transformers", False, "transformers"),
        ("none", False, "none"),
        ("none", True, "none, compiled"),
        ("int8_w8a8", False, "int8_w8a8"),
        ("int8_w8a8", True, "int8_w8a8, compiled"),
        *((way, False, way) for way in learner.HEADS),
    ]
    assert not any(job.case["compiled"] for job in learner.make_jobs(learner.parse(names)))


def test_ratios_of_learners_are_to_their_own_peers(learner):
    ratios = learner.Ratios()

    def add(name, rate, peak, budget=64):
        row = {"model": "4B", "learner": name, "budget": budget, "tokens_per_s": rate, "peak_bytes": peak}
        return ratios.add(row)

    assert "x_peer" not in add("transformers", 5.0, 4, 32)
    assert "x_peer" not in add("transformers", 10.0, 8)  # what suits it best
    assert add("none", 20.0, 4) | {"x_peer": 2.0, "memory_x_peer": 0.5} == add("none", 20.0, 4)
    assert add("int8_w8a8", 30.0, 4)["x_bf16"] == 1.5
    assert "x_bf16" not in add("int8_w8a8", 30.0, 4, 32)
    assert add("none", 20.0, 4, 32)["x_peer"] == 2.0
    assert "x_peer" not in add("full logits", 50.0, None)
    last = add("chunked log-probs", 25.0, 4)
    assert (last["x_peer"], "x_bf16" in last, "memory_x_peer" in last) == (0.5, False, False)
    lost = {"model": "4B", "learner": "none", "budget": 64, "error": "out of memory"}
    assert ratios.add(lost) == lost


def test_the_learner_benchmark_prints_and_keeps_its_rows(learner, monkeypatch, capsys, tmp_path):
    options = ["--models", "tiny", "--device", "cpu", "--total", "96", "--longest", "32", "--token-budget", "64"]
    options += ["--repeats", "1", "--learners", "int8_w8a8", "transformers"]
    monkeypatch.setattr(sys, "argv", ["learner.py", *options, "--rows", str(tmp_path / "rows.jsonl")])
    learner.main()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["learner"] for row in rows] == ["transformers", "int8_w8a8", *learner.HEADS]
    assert not any("error" in row for row in rows)
    assert all(row["tokens"] in (64, 95, 96) and row["x_peer"] > 0 for row in (rows[1], rows[3]))
    assert sum(line.startswith("| tiny") for line in capsys.readouterr().out.splitlines()) == len(rows)


def test_the_memory_benchmark_prints_and_keeps_its_rows(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    memory = import_module("memory")
    options = ["--models", "tiny", "--device", "cpu", "--prompts", "2", "--samples", "2", "--prompt", "8"]
    options += ["--total", "96", "--longest", "32", "--repeats", "1", "--ways", "cache and state"]
    monkeypatch.setattr(sys, "argv", ["memory.py", *options, "--rows", str(tmp_path / "rows.jsonl")])
    memory.main()
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert "| tiny | cache and state | " in capsys.readouterr().out
    assert row["cache_bytes"] == 4 * (8 + 16) * 2 * 2 * 2 * 64 * 2  # samples, tokens, layers, keys and values, heads
    # bfloat16 and float32 moments and the 16 bits beside each weight, a step of each parameter
    assert row["state_bytes"] > 8 * 2 * 3 * 128 * 256
    assert min(row[f"{name}_s"] for name in ("release", "restore", "state_out", "state_in", "iteration")) > 0


@pytest.fixture
def iteration(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("iteration")


def test_sizes_that_one_side_cannot_divide_are_refused(iteration, capsys):
    args = iteration.parse(["--prompts", "4", "--samples", "2"])
    assert (args.generation_batch, args.trl_rows) == (8, 8)
    for sizes, reason in [
        (["--trl-rows", "3"], "does not divide the 8 samples"),
        (["--trl-rows", "4", "--generation-batch", "2"], "must be a multiple"),
    ]:
        with pytest.raises(SystemExit):
            iteration.parse(["--prompts", "4", "--samples", "2", *sizes])
        assert reason in capsys.readouterr().err


def test_only_the_processes_of_trl_see_its_folder(iteration, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/src")
    args = iteration.parse(["--learners", "none", "trl-vllm", "trl", "--trl-path", "/trl", "--vllm-path", "/vllm"])
    jobs = iteration.make_jobs(args)
    assert [(job.case["learner"], job.environment["PYTHONPATH"]) for job in jobs] == [
        ("trl", "/trl:/src"),
        ("trl-vllm", "/trl:/vllm:/src"),
        ("none", "/src"),
    ]
    peers = {}
    rows = [{"learner": name, "tokens_per_s": rate} for name, rate in [("trl", 2.0), ("none", 6.0)]]
    assert [iteration.with_ratios(row, peers) for row in rows] == [rows[0], rows[1] | {"x_trl": 3.0}]


def test_the_iteration_benchmark_prints_and_keeps_its_rows(iteration, monkeypatch, capsys, tmp_path):
    options = ["--model", "tiny", "--device", "cpu", "--prompts", "2", "--samples", "2", "--prompt", "6"]
    options += ["--tokens", "5", "--learners", "none", "--rows", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", ["iteration.py", *options])
    iteration.main()
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert "| none | " in capsys.readouterr().out
    assert row["tokens_per_s"] == pytest.approx(2 * 2 * 5 / row["iteration"])
    assert sum(row[name] for name in iteration.PHASES) == pytest.approx(row["iteration"])
    assert min(row[name] for name in ("generate", "forward_backward", "step", "refresh")) > 0
