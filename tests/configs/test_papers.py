"""The papers' recipes: what they select, and one iteration of each on a tiny model of the same architecture."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedConfig, Qwen2Tokenizer

from lqrl.algorithms import TBPOLoss
from lqrl.cli import run
from lqrl.data import PromptDataModule
from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm import VLLMEngineFactory
from lqrl.engines.vllm.adapters import ServedAdapters
from lqrl.engines.vllm.served import ServedModel, kv_cache_dtype
from lqrl.learner import PolicyModule
from lqrl.lightning_cli import LqrlCLI
from lqrl.modeling.backbone import load_model
from lqrl.quant.lora import Lora
from lqrl.quant.scheme import QuantScheme
from lqrl.testing import tiny_config
from lqrl.testing.models import tiny_moe_config

FOLDER = Path("configs/recipes/papers")
# What a recipe's header offers by --model.init_args.scheme, beside the scheme in the file.
OTHER_SCHEMES = {"qurl": ["fp8_per_channel"], "qarl": ["int8_w8a8"], "fp8": ["fp8_per_block"], "qerl": []}
RECIPES = [
    (path, scheme)
    for path in sorted(FOLDER.glob("*.yaml"))
    for scheme in [None, *OTHER_SCHEMES[path.stem.partition("_")[0]]]
]
# A token that is the right answer in the form of every recipe, so that a random policy finds it now and then.
ANSWER = "<think>\\boxed{1}</think> <answer>1</answer> #### 1\n"


def answering_tokenizer() -> Qwen2Tokenizer:
    """Knows the line break and the answer, and drops everything else. The class that Qwen2's models insist on."""
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), "Ċ"])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], **special)
    tokenizer.add_tokens([ANSWER])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return tokenizer


def tiny_architecture(name: str, vocab_size: int) -> PreTrainedConfig:
    """That of the model ``name``, with layers that every format can hold."""
    if "A3B" in name:
        config = tiny_moe_config(vocab_size=vocab_size)
    else:
        config = tiny_config("qwen3" if "Qwen3" in name else "qwen2", vocab_size=vocab_size)
        config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
    config.max_position_embeddings, config.eos_token_id, config.bos_token_id = 512, 1, 2
    config.initializer_range = 0.02  # near uniform: each token comes
    return config


def tiny_model(name: str, folder: Path) -> str:
    tokenizer = answering_tokenizer()
    config = tiny_architecture(name, len(tokenizer))
    load_model(config, dtype=torch.float32, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows_for(source: dict[str, Any], path: Path) -> dict[str, Any]:
    """A file with the columns that a recipe's source names."""
    answer = f"So {source['answer_after']} 1" if "answer_after" in source else "1"
    names = {source.get("prompt_field", "prompt"), "question", "problem"}
    row = dict.fromkeys(names, "What is 3 - 2?") | {source.get("answer_field", "answer"): answer}
    path.write_text("\n".join([json.dumps(row)] * 8))
    return {"class_path": "lqrl.data.JsonLines", "init_args": {"path": str(path)}}


def tiny_run(path: Path, scheme: str | None, folder: Path) -> dict[str, Any]:
    """The recipe with another model, the embedded engine, and less and shorter data; all else is the file's."""
    config = yaml.safe_load(path.read_text())
    config["trainer"] |= {"accelerator": "cpu", "max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    config["trainer"]["logger"]["init_args"]["save_dir"] = str(folder / "runs")
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    model["model"] = tiny_model(model["model"], folder / "model")
    model["engine"] = {"class_path": "lqrl.engines.TorchEngineFactory", "init_args": {"max_num_seqs": 64}}
    model["scheme"] = scheme or model["scheme"]
    model["sampling"]["max_tokens"], model["val_samples"] = 3, 2
    for term in model["reward"]["init_args"]["terms"]:
        if term["init_args"]["name"] == "overlong":
            term["init_args"]["fn"]["init_args"] |= {"max_tokens": 3, "cache_tokens": 1}
    data |= {"prompts_per_iteration": 4, "iterations_per_epoch": 1}
    for name in ("train", "val"):
        data[name]["rows"] = rows_for(data[name], folder / f"{name}.jsonl")
    return config


def parsed(path: Path) -> LqrlCLI:
    """The recipe as it is; nothing is loaded or downloaded."""
    return LqrlCLI(
        PolicyModule,
        PromptDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        args=["--config", str(path)],
        run=False,
    )


def test_the_papers_are_there():
    assert {path.stem.partition("_")[0] for path, _ in RECIPES} == OTHER_SCHEMES.keys()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_recipe_selects_what_its_paper_used(path):
    module, paper = parsed(path).model, path.stem.partition("_")[0]
    assert isinstance(module.engine_factory, VLLMEngineFactory)
    assert module.scheme.quantizes
    assert module.aligned == (paper in ("qarl", "qerl"))
    assert isinstance(module.loss, TBPOLoss) == (paper == "qarl")
    assert len(module.transforms) == (path.stem in ("qurl_dapo", "qurl_deepscaler"))
    assert (module.kl is not None) == (path.stem == "qurl_deepscaler")
    assert (module.lora is not None) == (paper == "qerl")
    assert getattr(module.correction, "acr", False) == (paper == "qurl")


@pytest.mark.parametrize(("path", "scheme"), RECIPES, ids=lambda v: getattr(v, "stem", v))
def test_vllm_has_the_format(path, scheme):
    model = yaml.safe_load(path.read_text())["model"]["init_args"]
    chosen = QuantScheme.preset(scheme or model["scheme"])
    config = tiny_architecture(model["model"], 8)
    spec = EngineSpec(config, chosen, torch.bfloat16, torch.device("cuda"), 512, (1,))
    served = ServedModel(spec, unties=False)
    assert served.config.quantization_config["quant_method"] == "compressed-tensors"
    assert kv_cache_dtype(chosen, "cuda") == ("fp8_e4m3" if chosen.kv_cache else "auto")
    if model.get("lora"):
        adapters = ServedAdapters(spec, Lora(**model["lora"]))
        assert adapters.arguments["max_lora_rank"] == model["lora"]["r"]
        assert len(adapters.tensors) == 2 * 7 * config.num_hidden_layers


@pytest.mark.filterwarnings("ignore:RolloutNoise.total_iterations", "ignore:nothing was learned")
@pytest.mark.parametrize(("path", "scheme"), RECIPES, ids=lambda v: getattr(v, "stem", v))
def test_a_recipe_trains_for_one_iteration(path, scheme, tmp_path):
    config = tiny_run(path, scheme, tmp_path)
    changed = tmp_path / "config.yaml"
    changed.write_text(yaml.safe_dump(config))

    cli = run(["fit", "--config", str(changed)])

    with (Path(cli.trainer.log_dir) / "metrics.csv").open() as file:
        logged = {name: value for row in csv.DictReader(file) for name, value in row.items() if value}
    assert cli.model.iteration == 1
    # Some answers are right and some are not, so there is something to learn from, and a step was taken.
    assert 0 < float(logged["rollout/accuracy"]) < 1
    assert float(logged["train/rows"]) > 0
    assert float(logged["train/grad_norm"]) > 0
    assert float(logged["mismatch/k3"]) >= 0
    assert "val/pass@1" in logged
