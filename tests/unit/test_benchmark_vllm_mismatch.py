"""The comparison with vLLM: which rows are whose, decoders part by part, and what is printed; without a vLLM."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from lqrl.modeling.arithmetic import Arithmetic, use_arithmetic_
from lqrl.modeling.backbone import hidden_states, load_model, pack
from lqrl.quant import AlignedLinear, QuantScheme, prepare_

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
IDS = torch.tensor([[3, 5, 7, 9, 11], [2, 4, 6, 8, 10]])


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module(name)


def policy_of(family: type) -> PreTrainedModel:
    return load_model(family(**SIZES), dtype=torch.bfloat16, seed=0).eval()


# ---------------------------------------------------------------- which rows are whose


def test_rows_of_passes_are_found_by_token_and_position(monkeypatch):
    rows_of = benchmark("vllm_capture", monkeypatch).rows_of
    sequences = [[5, 6, 7, 8], [5, 9, 3, 4]]
    together = ([5, 6, 5, 9, 0], [0, 1, 0, 1, 0])  # the last row is padding
    steps = [together, ([7, 3], [2, 2])]
    assert rows_of(steps, sequences) == ([0, 1, 5, 2, 3, 6], [3, 3])
    in_turn = [([5], [0]), ([6, 7], [1, 2]), ([8, 5, 9, 3], [3, 0, 1, 2])]
    assert rows_of(in_turn, sequences) == ([0, 1, 2, 3, 4, 5, 6], [4, 3])
    with pytest.raises(RuntimeError, match="do not hold sequence 1"):
        rows_of([together, ([3, 7], [2, 2])], sequences)
    with pytest.raises(RuntimeError, match="do not hold sequence 1"):
        rows_of([together, ([7], [2])], sequences)


class FusedNorm(nn.Module):
    """As vLLM's: adds to the residual in place and gives both."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return 2 * x
        residual += x
        x.copy_(2 * residual)
        return x, residual


class Rotary(nn.Module):
    """Writes where it reads, as vLLM's does."""

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q += positions[:, None]
        return q, k


class Product(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.factor * x, None


class Attention(nn.Module):
    def __init__(self, rotary: Rotary, factor: float) -> None:
        super().__init__()
        self.qkv_proj, self.rotary_emb, self.o_proj = Product(factor), rotary, Product(1)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].split([2, 1, 1], -1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(torch.cat([q, k, v], -1))[0]


class Layer(nn.Module):
    def __init__(self, rotary: Rotary, factor: float) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = FusedNorm(), Attention(rotary, factor)

    def forward(self, positions: Tensor, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Any]:
        if residual is None:
            residual = x
            x = self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        return self.self_attn(positions, x), residual


class Served(nn.Module):
    """Two layers with vLLM's names that share their rotary module, and a head."""

    def __init__(self) -> None:
        super().__init__()
        rotary = Rotary()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer(rotary, 3), Layer(rotary, 5)])
        self.model.norm = FusedNorm()
        self.logits_processor = Product(1)

    def forward(self, input_ids: Tensor, positions: Tensor) -> None:
        x, residual = input_ids[:, None].repeat(1, 4).float(), None
        for layer in self.model.layers:  # pyright: ignore
            x, residual = layer(positions, x, residual)
        x, _ = self.model.norm(x, residual)  # pyright: ignore
        self.logits_processor(x)


def test_what_parts_were_given_is_kept_as_it_was_before_they_wrote(monkeypatch):
    recording, model = benchmark("vllm_capture", monkeypatch).recording, Served()
    with recording(model) as recorder:
        model(input_ids=torch.tensor([1, 2, 7]), positions=torch.tensor([0, 1, 0]))
        model(input_ids=torch.tensor([3, 8]), positions=torch.tensor([2, 1]))
    run = recorder.run([[1, 2, 3], [7, 8]])
    assert run.lengths == [3, 2]
    ids, positions = torch.tensor([1.0, 2, 3, 7, 8]), torch.tensor([0, 1, 2, 0, 1])
    assert torch.equal(run.calls[0, "input norm"].inputs[0][:, 0], ids)
    assert torch.equal(run.calls[0, "input norm"].outputs[1][:, 0], ids)
    assert torch.equal(run.calls[0, "qkv"].outputs[0], 6 * ids[:, None].expand(-1, 4))
    at, q, k = run.calls[0, "rotary"].inputs
    assert torch.equal(at, positions)
    assert torch.equal(q[:, 0], 6 * ids)
    assert torch.equal(run.calls[0, "rotary"].outputs[0][:, 0], 6 * ids + positions)
    assert torch.equal(k, run.calls[0, "rotary"].outputs[1])
    x, residual = run.calls[1, "input norm"].inputs
    assert torch.equal(residual[:, 0], ids)
    assert torch.equal(run.calls[1, "input norm"].outputs[1], x + residual)
    assert torch.equal(run.calls[1, "qkv"].outputs[0], 10 * (x + residual))
    assert {(2, "final norm"), (1, "o_proj"), (1, "rotary")} <= run.calls.keys()
    assert len(run.head.outputs[0]) == 5
    model(input_ids=torch.tensor([1]), positions=torch.tensor([0]))  # nothing listens any more
    assert recorder.run([[1, 2, 3], [7, 8]]).lengths == [3, 2]


def test_a_model_of_other_parts_is_refused(monkeypatch):
    recording = benchmark("vllm_capture", monkeypatch).recording
    with pytest.raises(RuntimeError, match="Linear is no decoder"), recording(nn.Linear(2, 2)):
        pass


# ---------------------------------------------------------------- part by part


@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("scheme", ["none", "int8_w8a8"])
@pytest.mark.parametrize("arithmetic", [Arithmetic(), Arithmetic(True, False, False), Arithmetic(False, True, False)])
@torch.no_grad()
def test_the_parts_of_the_learner_are_its_forward_pass(family, scheme, arithmetic, monkeypatch):
    parts = benchmark("decoder_parts", monkeypatch)
    policy = policy_of(family)
    if scheme != "none":
        prepare_(policy, QuantScheme.preset(scheme), export_dtype=torch.bfloat16)
    use_arithmetic_(policy, arithmetic)
    learner = parts.LearnerParts(policy, [5, 5], arithmetic)
    calls = parts.walk_policy(policy, learner, IDS.flatten(), torch.arange(5).repeat(2))
    whole = hidden_states(policy, pack(IDS, torch.ones_like(IDS, dtype=torch.bool)))
    assert torch.equal(calls[2, "final norm"].outputs[0], whole)
    assert {part for _, part in calls} == set(parts.PATHS) - ({"q norm", "k norm"} if family is LlamaConfig else set())
    for (layer, part), call in calls.items():
        assert all(map(torch.equal, learner(layer, part, *call.inputs), call.outputs)), part
    assert (parts.method_of(policy, 0, "qkv") is None) == (scheme == "none")

    def louder(layer: int, part: str, *given: Tensor) -> tuple[Tensor, ...]:
        outputs = learner(layer, part, *given)
        return tuple(1.5 * x for x in outputs) if (layer, part) == (1, "activation") else outputs

    other = parts.walk_policy(policy, louder, IDS.flatten(), torch.arange(5).repeat(2))
    parted = [key for key, call in calls.items() if not torch.equal(call.outputs[0], other[key].outputs[0])]
    assert parted == [(1, "activation"), (1, "down"), (2, "final norm")]


def test_differences_are_relative_to_the_other_side(monkeypatch):
    parts = benchmark("decoder_parts", monkeypatch)
    row = parts.compared(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]))
    assert row["equal"] == 0.5
    assert row["relative"] == pytest.approx(1 / math.sqrt(34))
    assert row["largest"] == pytest.approx(1 / math.sqrt(17))
    same = parts.compared(torch.ones(2), torch.ones(2))
    both = parts.pooled([row, same])
    assert (both["equal"], both["largest"]) == (0.75, row["largest"])
    assert both["relative"] == pytest.approx(row["relative"] / math.sqrt(2))


@torch.no_grad()
def test_fake_quantization_rounds_weights_and_inputs(monkeypatch):
    subject = benchmark("vllm_subject", monkeypatch)
    policy, x = policy_of(LlamaConfig), torch.randn(6, 32).bfloat16()
    plain = policy.model.layers[0].self_attn.q_proj.weight.clone()  # pyright: ignore
    prepare_(policy, QuantScheme.preset("int8_w8a8"), export_dtype=torch.bfloat16)
    layer = policy.model.layers[0].self_attn.q_proj  # pyright: ignore
    assert isinstance(layer, AlignedLinear)
    method, tensors = layer.method, layer.quantized_weight()
    outputs = {}
    for way, change in subject.WAYS.items():
        layer.method = change(method)
        layer.invalidate()
        outputs[way] = layer(x)
    rounded = method.round_input(x) @ method.dequantize(tensors, torch.bfloat16).T
    assert torch.equal(outputs["fake quantization"], rounded)
    assert torch.equal(outputs["not aligned"], x @ plain.T)
    assert not torch.equal(outputs["aligned"], outputs["not aligned"])
    torch.testing.assert_close(outputs["aligned"], rounded, rtol=0.02, atol=0.02)


def test_k3_is_the_estimate_of_a_divergence(monkeypatch):
    gap = benchmark("vllm_subject", monkeypatch).gap
    row = gap(torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[-1.0, -2.0], [-3.0, -4.5]]))
    assert (row["tokens"], row["equal"], row["mean"], row["max"]) == (4, 0.75, 0.125, 0.5)
    assert row["k3"] == pytest.approx((math.exp(0.5) - 1.5) / 4)


# ---------------------------------------------------------------- what is run and printed


def test_modes_are_jobs_of_their_own(monkeypatch):
    mismatch = benchmark("vllm_mismatch", monkeypatch)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    argv = ["--formats", "none", "int8_w8a8", "--modes", "eager", "invariant", "--seeds", "4", "5", "--tables", "alone"]
    jobs = mismatch.make_jobs(mismatch.parse([*argv, "--device", "cuda"]))
    assert [(job.case["mode"], job.case["format"]) for job in jobs] == [
        ("eager", "none"),
        ("eager", "int8_w8a8"),
        ("invariant", "none"),
        ("invariant", "int8_w8a8"),
    ]
    assert [(row["table"], row.get("seed")) for row in jobs[0].rows] == [
        ("logprobs", 4),
        ("logprobs", 5),
        ("alone", None),
    ]
    assert len(jobs[2].rows) == 2
    assert ["VLLM_BATCH_INVARIANT" in job.environment for job in jobs] == [False, False, True, True]
    assert {job.case["mode"] for job in mismatch.make_jobs(mismatch.parse([*argv, "--device", "cpu"]))} == {"eager"}
    with pytest.raises(SystemExit):
        mismatch.parse(["--sequences", "5", "--prompts", "4"])


def test_a_format_without_an_engine_is_named_once_and_others_are_summed_up(monkeypatch, capsys):
    mismatch = benchmark("vllm_mismatch", monkeypatch)
    report, key = mismatch.Report(2), {"format": "int8_w8a8", "mode": "eager"}
    refused = {"format": "nvfp4_w4a16", "mode": "eager", "table": "logprobs", "error": "no kernel"}
    for seed, k3 in ((0, 0.25), (1, 0.5), (2, 0.125)):
        numbers = {"learner": "aligned", "tokens": 10, "k3": k3, "mean": 0.5, "max": 1.0, "equal": 0.5}
        report.add(key | {"table": "logprobs", "seed": seed, "rows": [numbers]})
        report.add(refused | {"seed": seed, "stage": mismatch.NO_ENGINE})
    report.add(key | {"table": "swaps", "rows": [{"swap": "norms", "error": "needs more"}]})
    report.add(key | {"table": "layers", "error": "lost"})
    report.summary()
    printed = capsys.readouterr().out
    assert printed.count("not run: no kernel") == 2
    assert "| int8_w8a8 | eager | aligned | 30 | 2.5e-01 | 1.2e-01 to 5.0e-01 | 5.0e-01 | 1.0e+00 | 50.0% |" in printed
    assert "| norms |  |  |  |  |  | needs more |" in printed
    assert "layers: no result: lost" in printed


def test_of_many_layers_some_are_shown_and_a_share_is_100_only_when_all_are(monkeypatch):
    mismatch = benchmark("vllm_mismatch", monkeypatch)
    rows = [{"layer": i} for i in range(30)]
    assert [row["layer"] for row in mismatch.shown("layers", rows, 3)] == [0, 1, 2, 6, 12, 24, 29]
    assert mismatch.shown("layers", rows[:6], 3) == rows[:6]
    runs = [{"run": run, "part": part} for run in ("decode", "prefill") for part in ("qkv", "down")]
    assert [row["part"] for row in mismatch.shown("alone", runs, 3)] == ["qkv", "qkv", "down", "down"]
    assert [mismatch.share(x) for x in (1, 0.9999999, 0.5, 0.0, None)] == ["100%", "99.999%", "50.0%", "0%", ""]


def test_the_script_names_what_it_cannot_run(monkeypatch, capsys, tmp_path):
    mismatch, path = benchmark("vllm_mismatch", monkeypatch), tmp_path / "rows.jsonl"
    options = ["--model", "missing", "--device", "cpu", "--formats", "none", "--seeds", "0", "1", "--tables"]
    monkeypatch.setattr(sys, "argv", ["vllm_mismatch.py", *options, "--rows", str(path)])
    monkeypatch.setattr(mismatch, "require_vllm", lambda args: None)
    with pytest.raises(SystemExit, match="1"):
        mismatch.main()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["seed"], row["stage"]) for row in rows] == [(0, mismatch.NO_ENGINE), (1, mismatch.NO_ENGINE)]
    assert re.search("unknown quantization scheme|No module named 'vllm'", rows[0]["error"])
    assert capsys.readouterr().out.count(f"not run: {rows[0]['error']}") == 2
