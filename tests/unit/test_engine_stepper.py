"""Steps on static buffers: with rows that nobody uses, captured or not, they draw what plain steps draw."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engine_models import CONFIGS

from lqrl.engines.base import EngineSpec
from lqrl.engines.stepper import Stepper, bucket
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, SamplingParams

PROMPTS = [Prompt(id=i, input_ids=tuple(range(1, 3 + 2 * i))) for i in range(5)]
PARAMS = SamplingParams(n=(3, 6, 1, 4, 5), max_tokens=14, temperature=0.9)
FORMATS = ["none", "int8_w8a8", "none+kv_int8"]


class WideStepper(Stepper):
    """Takes the way of a captured step, buckets and all, without capturing it: for the CPU."""

    def reserve(self, slots: int, length: int, params: SamplingParams) -> None:
        self._capture = True
        super().reserve(slots, length, params)

    def _step(self) -> None:
        self._free_step()


def engine(scheme: str, device: torch.device, exact: bool = False, **options: int | bool) -> TorchEngine:
    spec = EngineSpec(CONFIGS["qwen3"], QuantScheme.parse(scheme), torch.float32, device, 64, (3, 4), exact=exact)
    built = TorchEngineFactory(max_num_seqs=7, **options)(spec)
    refresh(built, 0)
    return built


def refresh(built: TorchEngine, seed: int) -> None:
    policy = load_model(CONFIGS["qwen3"], dtype=torch.float32, seed=seed).eval()
    weights = export_weights(policy, built.spec.scheme, export_dtype=torch.float32)
    built.update_weights(weights, policy_version=seed)


def assert_same(a: Sequence[Sequence[Completion]], b: Sequence[Sequence[Completion]], exact: bool) -> None:
    for x, y in zip((c for g in a for c in g), (c for g in b for c in g), strict=True):
        assert x.token_ids.tolist() == y.token_ids.tolist()
        assert x.finish_reason == y.finish_reason
        # Products of another height round otherwise, and a code of a low-bit cache may then be another one.
        torch.testing.assert_close(x.logprobs, y.logprobs, rtol=0, atol=0 if exact else 5e-3)


def test_buckets_hold_the_rows_with_little_waste():
    for rows in range(1, 1100):
        assert rows <= bucket(rows) <= max(rows + 7, rows * 1.25)
        assert bucket(bucket(rows)) == bucket(rows)
    assert len({bucket(rows) for rows in range(1, 257)}) == 20


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("interval", [1, 4])
def test_rows_beyond_the_running_ones_change_nothing(scheme, exact, interval):
    cpu = torch.device("cpu")
    plain, wide = (engine(scheme, cpu, exact, host_interval=interval) for _ in range(2))
    wide._stepper = WideStepper(wide.decoder, wide._cache, interval, capture=False)
    lengths = set()
    for seed in range(2):
        a, b = (e.generate(PROMPTS, PARAMS, seed=seed) for e in (plain, wide))
        assert_same(a, b, exact)
        lengths |= {len(c.token_ids) for g in a for c in g}
    assert len(lengths) > 4  # slots were left and taken again
    held = wide._cache.geometry
    wide.generate(PROMPTS[:2], SamplingParams(n=2, max_tokens=3), seed=0)
    assert wide._cache.geometry == held  # fewer and shorter samples move nothing
    wide.sleep()
    wide.wake()
    assert_same(plain.generate(PROMPTS, PARAMS, seed=5), wide.generate(PROMPTS, PARAMS, seed=5), exact)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("scheme", "exact"), [("none", False), *((scheme, True) for scheme in [*FORMATS, "none+kv_fp8"])]
)
def test_replayed_steps_draw_what_steps_draw(scheme, exact):
    device = torch.device("cuda")
    graphs, eager = (engine(scheme, device, exact, cuda_graphs=on) for on in (True, False))
    for seed in range(2):
        assert_same(graphs.generate(PROMPTS, PARAMS, seed=seed), eager.generate(PROMPTS, PARAMS, seed=seed), exact)
    captured = graphs._stepper.captured
    assert captured > 1
    assert eager._stepper.captured == 0
    for built in (graphs, eager):
        refresh(built, 1)
    assert_same(graphs.generate(PROMPTS, PARAMS, seed=0), eager.generate(PROMPTS, PARAMS, seed=0), exact)
    assert graphs._stepper.captured == captured  # they survive a refresh
    greedy = SamplingParams(n=2, max_tokens=5, temperature=0)
    assert_same(graphs.generate(PROMPTS, greedy, seed=0), eager.generate(PROMPTS, greedy, seed=0), exact)
    captured = graphs._stepper.captured
    for truncated in (
        SamplingParams(n=2, max_tokens=5, top_p=0.7),
        SamplingParams(n=2, max_tokens=5, top_p=0.7, top_k=3),
    ):
        assert_same(graphs.generate(PROMPTS, truncated, seed=0), eager.generate(PROMPTS, truncated, seed=0), exact)
        assert graphs._stepper.captured > captured  # a step of its own
        captured = graphs._stepper.captured
    longer = SamplingParams(n=9, max_tokens=30)
    assert_same(graphs.generate(PROMPTS, longer, seed=3), eager.generate(PROMPTS, longer, seed=3), exact)
    captured = graphs._stepper.captured
    graphs.sleep()
    graphs.wake()
    assert graphs._stepper.captured == captured
    assert_same(graphs.generate(PROMPTS, PARAMS, seed=4), eager.generate(PROMPTS, PARAMS, seed=4), exact)
