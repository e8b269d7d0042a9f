"""One order of summation broken on purpose: the comparison of engine and learner must see it, and say where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact_sides import both, compared, prompts

from lqrl.learner.divergence import first_divergence
from lqrl.quant import exact, exact_native
from lqrl.quant.native_build import BuildError
from lqrl.testing import tiny_config
from lqrl.types import SamplingParams

try:
    exact.check_device("cpu")
except BuildError:
    pytest.skip("no C compiler", allow_module_level=True)

PARAMS = SamplingParams(n=2, max_tokens=12)
MUTATIONS = {
    # The product of a single row rounds each term; tiles of rows fuse them.
    "product": (
        "sum[v] = FUSED(x, NAME(widen)(b, at + v / 2 * PANEL * steps + v % 2 * 8, bf16), sum[v]);",
        "sum[v] = sum[v] + x * NAME(widen)(b, at + v / 2 * PANEL * steps + v % 2 * 8, bf16);",
        "model.layers.0.self_attn.q_proj",
    ),
    # Values are weighed in a tile of several rows in full forwards, row by row in decoding with one query a key head.
    "attention": (
        "sum[r][c] = FUSED(w, x[c], sum[r][c]);",
        "sum[r][c] = rows == 2 ? sum[r][c] + w * x[c] : FUSED(w, x[c], sum[r][c]);",
        "model.layers.0.self_attn.o_proj input",
    ),
    # The engine draws and normalizes in one pass; let it add the lanes in another order there.
    "log-softmax": (
        "double part = (double)NAME(tree)(sum);",
        "double part = (double)(weight ? sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7]"
        " : NAME(tree)(sum));",
        "output head",
    ),
}


@pytest.fixture
def mutated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The kernels with one line changed; gives the module where engine and learner should part."""
    before, after, module = MUTATIONS[request.param]
    for path in (exact_native.SOURCE, *exact_native.HEADERS):
        (tmp_path / path.name).write_text(path.read_text())
    (header,) = exact_native.HEADERS
    assert header.read_text().count(before) == 1
    (tmp_path / header.name).write_text(header.read_text().replace(before, after))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(exact_native, "SOURCE", tmp_path / exact_native.SOURCE.name)
    monkeypatch.setattr(exact_native, "HEADERS", (tmp_path / header.name,))
    monkeypatch.setattr(exact_native, "_loaded", [exact_native.load(at_most="portable")])  # half the time to compile
    return module


@pytest.mark.parametrize("mutated", MUTATIONS, indirect=True)
def test_a_broken_order_is_seen_and_located(mutated: str):
    case = both(tiny_config("llama"), "none", max_num_seqs=1)
    tokens, different = compared(case, prompts(5, 12, 64), PARAMS, rows=4)
    assert 0 < different <= tokens
    found = first_divergence(case.scorer(1.0), case.engine, prompts(1, 12, 64), SamplingParams(max_tokens=12))
    assert found is not None
    assert found.module == mutated
    assert 0 < found.max_abs < 1e-4
    assert found.layer == (None if mutated == "output head" else 0)


@pytest.mark.parametrize("scheme", ["int8_w8a8+kv_int8", "none"])
def test_an_exact_run_parts_nowhere(scheme: str):
    case = both(tiny_config("qwen3"), scheme, torch.bfloat16)
    assert first_divergence(case.scorer(1.0), case.engine, prompts(5, 12, 64), PARAMS) is None


def test_an_inexact_run_parts_in_its_first_attention():
    case = both(tiny_config("llama", layers=3), "int8_w8a8", exact=False)
    found = first_divergence(case.scorer(1.0), case.engine, prompts(4, 12, 64), PARAMS)
    assert found is not None
    # Embedding, norm and int8 projections are exact anyway; attention is the first sum whose order differs.
    assert (found.layer, found.module) == (0, "model.layers.0.self_attn.o_proj input")
    assert (found.tokens, len(found.by_layer)) == (4 * 2 * 12, 3)
    assert found.logprobs_differ > 0
    assert "part at model.layers.0.self_attn.o_proj input, prompt" in str(found)
