"""Every shipped recipe runs one iteration, on a tiny model of the same architecture and a few rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from lqrl.cli import run
from lqrl.data import PromptSource
from lqrl.modeling.backbone import load_model
from lqrl.rewards import ExactAnswer
from lqrl.testing import tiny_config
from lqrl.testing.tokenizer import character_tokenizer

CONFIGS = sorted(path for path in Path("configs").rglob("*.yaml") if path.parent.name != "papers")  # test_papers.py
FAMILY = {"smollm2": "llama", "qwen3": "qwen3"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(16)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def tiny_model(name: str, folder: Path) -> str:
    """A random model of the recipe's family with a character tokenizer; the shipped policy stays itself."""
    if name.startswith("asset:"):
        return name
    family = next(f for key, f in FAMILY.items() if key in name.lower())
    tokenizer = character_tokenizer(chat=True)
    config = tiny_config(family, vocab_size=len(tokenizer))
    config.max_position_embeddings, config.eos_token_id, config.bos_token_id = 512, 1, 2
    load_model(config, dtype=torch.float32, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


ROWS = {"class_path": "lqrl.data.JsonLines", "init_args": {"path": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("owner", "option"),
    [(PromptSource, "answer_after"), (PromptSource, "template"), (ExactAnswer, "after"), (ExactAnswer, "pattern")],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_text_of_number_signs_is_no_comment(owner, option):
    """Where a parser may choose None, it reads ``####`` as YAML, and so as nothing."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=owner)
    values = {option: "####"}
    if owner is ExactAnswer:
        config = {"class_path": "lqrl.rewards.ExactAnswer", "init_args": values}
    else:
        config = {"rows": ROWS} | values
    parsed = parser.parse_string(yaml.safe_dump({"value": config}))
    assert getattr(parser.instantiate_classes(parsed).value, option) == "####"


def test_there_are_recipes():
    assert len(CONFIGS) >= 3


@pytest.mark.filterwarnings("ignore:RolloutNoise.total_iterations", "ignore:nothing was learned")  # one iteration
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_recipe_runs_one_iteration(path, tmp_path, rows):
    config = yaml.safe_load(path.read_text())
    config["trainer"] |= {"accelerator": "cpu", "max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    config["trainer"]["logger"]["init_args"]["save_dir"] = str(tmp_path / "runs")
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    model["model"] = tiny_model(model["model"], tmp_path / "model")
    model["sampling"]["max_tokens"] = 8
    model["val_samples"] = 2
    model["budget"]["init_args"]["group_size"] = 4
    data |= {"prompts_per_iteration": 4, "iterations_per_epoch": 1}
    for source in (data["train"], data["val"]):
        source["limit"] = 8
        if source["rows"]["class_path"] == "lqrl.data.HubDataset":
            source["rows"] = {"class_path": "lqrl.data.JsonLines", "init_args": {"path": str(rows)}}
    changed = tmp_path / "config.yaml"
    changed.write_text(yaml.safe_dump(config))

    cli = run(["fit", "--config", str(changed)])

    folder = Path(cli.trainer.log_dir)
    names = {p.name for p in folder.iterdir()}
    assert {"config.yaml", "metrics.csv", "rollouts.jsonl", "checkpoints", "hf"} <= names
    with (folder / "metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    assert float(logged[0]["rollout/length"]) > 0
    assert any(row["val/pass@1"] for row in logged)
    assert sum(1 for _ in (folder / "rollouts.jsonl").open()) >= 16
    # The run's own config.yaml is a complete recipe: it parses, and names the same algorithm.
    again = yaml.safe_load((folder / "config.yaml").read_text())
    assert again["model"]["init_args"]["loss"]["class_path"].endswith("ClippedLoss")
