"""Rollout noise: its schedule, where it goes, and that it leaves no trace."""

from __future__ import annotations

import csv
import math
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from engine_models import CONFIGS
from torch import Tensor

from lqrl.cli import run
from lqrl.engines import EngineSpec, RefreshError, StaleEngineError, TorchEngine, TorchEngineFactory
from lqrl.learner import RolloutNoise
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams

Stream = list[tuple[str, Tensor]]
SCHEME = QuantScheme.preset("int8_w8a8")


def stream(family: str = "qwen2", dtype: torch.dtype = torch.float32) -> Stream:
    model = load_model(CONFIGS[family], dtype=torch.float32, seed=0)
    return list(export_weights(model, SCHEME, export_dtype=dtype))


def empty_engine(device: torch.device) -> TorchEngine:
    return TorchEngineFactory()(EngineSpec(CONFIGS["qwen2"], SCHEME, torch.float32, device, 64, ()))


def changed(stage: RolloutNoise, weights: Stream, version: int) -> set[str]:
    noisy = list(stage(weights, policy_version=version))
    assert [n for n, _ in noisy] == [n for n, _ in weights]
    assert all(a.dtype == b.dtype and a.shape == b.shape for (_, a), (_, b) in zip(noisy, weights, strict=True))
    return {n for (n, a), (_, b) in zip(noisy, weights, strict=True) if not torch.equal(a, b)}


def test_the_schedule_has_the_worked_values() -> None:
    noise = RolloutNoise(total_iterations=100)
    # ten stages of ten; 1e-2 * (1e-4 / 1e-2)^(i / 8) for i = 0..8 from the second on
    assert [noise.stage(v) for v in (0, 9, 10, 19, 20, 99, 100, 500)] == [0, 0, 1, 1, 2, 9, 9, 9]
    assert noise.sigma(9) == 0.0
    assert noise.sigma(10) == 1e-2
    assert noise.sigma(20) == pytest.approx(1e-2 * 10 ** (-1 / 4))
    assert noise.sigma(50) == pytest.approx(1e-3)  # i = 4, half way: 10^-1
    assert noise.sigma(99) == noise.sigma(10**6) == pytest.approx(1e-4)
    # 7 iterations in 10 stages: floor(6 * 10 / 7) = 8
    assert [RolloutNoise(total_iterations=7).stage(v) for v in range(7)] == [0, 1, 2, 4, 5, 7, 8]


def test_the_norms_in_front_of_linear_layers_get_noise_and_nothing_else() -> None:
    layers = {f"model.layers.{i}.{n}_layernorm.weight" for i in (0, 1) for n in ("input", "post_attention")}
    for family in ("llama", "qwen2", "qwen3", "gemma", "mistral"):
        assert changed(RolloutNoise(10), stream(family), 1) == layers
    heads = {f"model.layers.{i}.self_attn.{n}_norm.weight" for i in (0, 1) for n in "qk"}
    assert changed(RolloutNoise(10, norms=("*norm",)), stream("qwen3"), 1) == layers | heads | {"model.norm.weight"}


def test_the_noise_has_its_sigma() -> None:
    weights = [(f"layers.{i}.input_layernorm.weight", torch.full((4096,), 0.5)) for i in range(4)]
    stage = RolloutNoise(10, norms=("*.input_layernorm",))
    noise = torch.stack([t for _, t in stage(weights, policy_version=1)]) - 0.5
    # 16384 draws: the mean is within 4 * 1e-2 / 128, the deviation within 4 * 1e-2 / sqrt(2 * 16384)
    assert abs(float(noise.mean())) < 3.2e-4
    assert float(noise.std()) == pytest.approx(1e-2, abs=2.3e-4)
    assert float((noise[0] * noise[1]).mean()) < 4 * 1e-4 / math.sqrt(4096)  # each norm has its own
    assert stage.metrics == {"refresh/noise_sigma": 1e-2, "refresh/noise_changed_fraction": 1.0}


def test_the_noise_is_a_function_of_seed_version_and_name() -> None:
    weights = stream()

    def norm(version: int, *, seed: int = 0) -> Tensor:
        torch.manual_seed(version + 17)  # the global generator has no say
        return dict(RolloutNoise(10, seed=seed)(weights, policy_version=version))[
            "model.layers.1.input_layernorm.weight"
        ]

    assert torch.equal(norm(1), norm(1))
    assert not torch.equal(norm(1), norm(2))
    assert not torch.equal(norm(1), norm(1, seed=1))


def test_the_first_stage_is_silent_and_the_learner_is_never_written() -> None:
    weights = stream()
    before = [t.clone() for _, t in weights]
    stage = RolloutNoise(10)
    assert changed(stage, weights, 0) == set()
    assert stage.metrics == {"refresh/noise_sigma": 0.0, "refresh/noise_changed_fraction": 0.0}
    assert changed(stage, weights, 5)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, weights, strict=True))


def test_a_refresh_without_the_stage_brings_back_the_clean_engine(device: torch.device) -> None:
    engine, weights, stage = empty_engine(device), stream(), RolloutNoise(10)
    clean = engine.update_weights(weights, policy_version=0).digest
    digests = [engine.update_weights(stage(weights, policy_version=v), policy_version=v).digest for v in (1, 2, 1)]
    assert digests[0] == digests[2]  # nothing piles up
    assert len({clean, *digests}) == 3
    assert engine.update_weights(weights, policy_version=3).digest == clean


def test_bf16_swallows_small_noise_and_the_metric_says_so() -> None:
    weights = [("l.input_layernorm.weight", torch.full((20000,), 0.75).bfloat16())]
    stage = RolloutNoise(100, norms=("*.input_layernorm",))
    share = {}
    for version in (10, 50, 99):
        list(stage(weights, policy_version=version))
        share[version] = stage.metrics["refresh/noise_changed_fraction"]
    # the step below 1 is 2^-8: P(|Z| > 2^-9) is 84.5% at 1e-2, 5.1% at 1e-3, 0 at 1e-4 (19 sigma)
    assert share[10] == pytest.approx(0.845, abs=0.02)
    assert share[50] == pytest.approx(0.051, abs=0.01)
    assert share[99] == 0.0


def test_a_pattern_that_matches_nothing_leaves_a_refusing_engine() -> None:
    engine = empty_engine(torch.device("cpu"))
    stage = RolloutNoise(10, norms=("*.input_layernorm", "*.ln_1"))
    with pytest.raises(RefreshError, match=r"no tensor is named \*\.ln_1\.weight; set norms"):
        engine.update_weights(stage(stream(), policy_version=0), policy_version=0)
    with pytest.raises(StaleEngineError):
        engine.generate([Prompt(0, (1,))], SamplingParams(), seed=0)


@pytest.mark.parametrize("pattern", ["*.q_proj", "model.embed_tokens"])
def test_a_match_that_is_no_norm_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="which is no norm's weight"):
        list(RolloutNoise(10, norms=(pattern,))(stream(), policy_version=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_iterations": 0}, "total_iterations must be at least 1"),
        ({"total_iterations": 9, "stages": 2}, "stages must be at least 3"),
        ({"total_iterations": 9, "sigma_end": 1.0}, "0 < sigma_end <= sigma_start"),
        ({"total_iterations": 9, "sigma_end": 0.0}, "0 < sigma_end <= sigma_start"),
        ({"total_iterations": 9, "norms": ()}, "norms is empty"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutNoise(**options)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The quickstart with noise, cut to three iterations."""
    config = yaml.safe_load(Path("configs/quickstart.yaml").read_text())
    config["trainer"] |= {"max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    config["trainer"]["callbacks"] = [
        {
            "class_path": "lqrl.callbacks.EngineRefresh",
            "init_args": {
                "stages": [
                    {"class_path": "lqrl.learner.RolloutNoise", "init_args": {"total_iterations": 3, "stages": 3}}
                ]
            },
        },
        {"class_path": "lqrl.callbacks.SamplerFeedback"},
    ]
    config["trainer"]["logger"]["init_args"]["save_dir"] = str(tmp_path / "runs")
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    model |= {"val_samples": 1, "validate_full_precision": True, "sampling": {"max_tokens": 8}}
    model["budget"]["init_args"]["group_size"] = 4
    data |= {"prompts_per_iteration": 4, "iterations_per_epoch": 3}
    data["train"]["rows"]["init_args"]["size"] = data["val"]["rows"]["init_args"]["size"] = 8
    path = tmp_path / "noise.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_recipe_names_the_noise_among_the_stages(recipe: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lqrl"])
    with pytest.raises(SystemExit) as stop:
        run(["fit", "--config", str(recipe), "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    (stage,) = printed["trainer"]["callbacks"][0]["init_args"]["stages"]
    assert stage["class_path"].endswith("RolloutNoise")
    assert stage["init_args"]["total_iterations"] == 3
    assert stage["init_args"]["sigma_start"] == 1e-2


def test_a_run_logs_sigma_and_keeps_noise_from_the_full_precision_engine(recipe: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lqrl"])
    cli = run(["fit", "--config", str(recipe)])
    folder = cli.trainer.log_dir
    assert folder is not None
    with (Path(folder) / "metrics.csv").open() as file:
        sigmas = [float(row["refresh/noise_sigma"]) for row in csv.DictReader(file) if row["refresh/noise_sigma"]]
    # versions 1, 2 and 3 of 3, in stages 1, 2 and 2
    assert sigmas == pytest.approx([1e-2, 1e-4, 1e-4])
    module = cli.model
    name = "model.layers.0.input_layernorm.weight"
    learner, rollout, full = (
        m.state_dict()[name] for m in (module.policy, module.engine.decoder.model, module.full_engine.decoder.model)
    )
    assert torch.equal(full, learner)
    assert 0 < float((rollout - learner).abs().max()) < 6e-4


@pytest.mark.parametrize(
    ("iterations", "total", "says"),
    [
        (3, 300, "after 3 iterations, in stage 1 of 10 with sigma 0: its rollouts never get noise; set .* to 3"),
        (50, 100, "after 50 iterations, in stage 5 of 10 with sigma 0.00177828; set total_iterations to 50"),
        (100, 100, None),
        (200, 100, None),
        (math.inf, 100, None),
    ],
)
def test_a_run_that_ends_before_its_noise_does_is_warned_about(iterations: float, total: int, says: str | None) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        RolloutNoise(total_iterations=total).begin(iterations)
    assert len(warned) == (says is not None)
    if says is not None:
        assert re.search(says, str(warned[0].message))


@pytest.mark.parametrize("options", [["--trainer.max_epochs=1"], ["--trainer.max_epochs=-1", "--trainer.max_steps=3"]])
def test_the_run_tells_the_noise_how_long_it_is(recipe: Path, monkeypatch, options: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lqrl"])
    config = yaml.safe_load(recipe.read_text())
    config["trainer"]["callbacks"][0]["init_args"]["stages"][0]["init_args"]["total_iterations"] = 300
    recipe.write_text(yaml.safe_dump(config))
    with pytest.warns(UserWarning, match=r"total_iterations is 300 and the run ends after 3 iterations") as warned:
        run(["fit", "--config", str(recipe), *options])
    assert len([w for w in warned if "RolloutNoise" in str(w.message)]) == 1
