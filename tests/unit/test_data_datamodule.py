from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils._pytree import tree_flatten

from lqrl.callbacks.sampler_feedback import feed_back
from lqrl.data import VADE, Countdown, JsonLines, PromptDataModule, PromptSource, SamplerFactory, Uniform, VADESampler
from lqrl.data.datamodule import split_evenly
from lqrl.testing.tokenizer import character_tokenizer
from lqrl.types import PromptBatch


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return str(folder)


def datamodule(tokenizer: str, cls: type[PromptDataModule] = PromptDataModule, **options: Any) -> PromptDataModule:
    options = {"prompts_per_iteration": 4, "iterations_per_epoch": 3, "sampler": VADE(), "seed": 5} | options
    train = options.pop("train", PromptSource(Countdown(size=20)))
    return cls(tokenizer, train, PromptSource(Countdown(size=7, split="validation")), **options)


class Recorder(L.LightningModule):
    """Notes the prompts of each iteration."""

    def __init__(self, stop_in: int | None = None, refill: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.stop_in, self.refill = stop_in, refill
        self.seen: list[list[int]] = []
        self.validated: list[int] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        prompts = [*batch, *(data.refill(3) or [])] if self.refill else list(batch)
        if self.stop_in == len(self.seen):
            raise RuntimeError("stopped")
        optimizer = self.optimizers()
        (self.weight * 1.0).sum().backward()
        optimizer.step()  # type: ignore[union-attr]
        self.seen.append([p.id for p in prompts])

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validated += [p.id for p in batch]


class Feedback(L.Callback):
    """Tells the sampler how the prompts went; before any checkpoint is written, as Lightning puts those last."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Recorder)
        ids = pl_module.seen[-1]
        trainer.datamodule.observe(ids, [i % 5 for i in ids], [4] * len(ids))  # type: ignore[attr-defined]


def trainer(folder: Path, *callbacks: L.Callback, epochs: int = 3, **options: Any) -> L.Trainer:
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=bool(callbacks),
        callbacks=[Feedback(), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **options,
    )


def run(folder: Path, data: PromptDataModule, *callbacks: L.Callback, module: Recorder | None = None, **options: Any):
    module = module or Recorder()
    ckpt_path = options.pop("ckpt_path", None)
    trainer(folder, *callbacks, **options).fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.seen


def test_loader_yields_the_iterations_of_an_epoch(tokenizer: str) -> None:
    data = datamodule(tokenizer, sampler=Uniform())
    data.setup("fit")
    loader = data.train_dataloader()
    batches = list(loader)
    assert len(loader) == len(batches) == 3
    assert all(isinstance(batch, PromptBatch) and len(batch) == 4 for batch in batches)


def test_prompts_are_drawn_when_the_iteration_begins(tokenizer: str) -> None:
    data = datamodule(tokenizer)
    data.setup("fit")
    batches = iter(data.train_dataloader())
    next(batches)
    sampler = data.sampler
    assert isinstance(sampler, VADESampler)
    assert sampler.iteration == 1
    data.observe([], [], [])
    sampler.alpha[4:] = 1e6  # only the first four are left to learn from
    assert {p.id for p in next(batches)} == set(sampler.ids[:4])


def test_trainer_gets_the_draws_of_the_sampler_and_every_validation_prompt_once(tokenizer: str, tmp_path: Path) -> None:
    data = datamodule(tokenizer, sampler=Uniform(), val_batch_size=3)
    module = Recorder()
    seen = run(tmp_path, data, module=module, epochs=2)
    assert len(seen) == 6
    assert len({i for batch in seen[:5] for i in batch}) == 20  # 5 * 4 prompts are one pass over 20
    assert data.val_prompts is not None
    assert sorted(module.validated) == sorted(data.val_prompts.ids * 2)


@pytest.mark.parametrize("factory", [Uniform(), VADE()])
@pytest.mark.parametrize("step", [3, 4])  # at the end of an epoch, and inside one
def test_resume_continues_with_the_next_draw(tokenizer, tmp_path: Path, factory: SamplerFactory, step: int) -> None:
    expected = run(tmp_path, datamodule(tokenizer, sampler=factory), module=Recorder(refill=True))
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(tmp_path, datamodule(tokenizer, sampler=factory), saver, module=Recorder(refill=True))
    resumed = run(
        tmp_path,
        datamodule(tokenizer, sampler=factory),
        module=Recorder(refill=True),
        ckpt_path=tmp_path / f"step={step}.ckpt",
    )
    assert resumed == expected[step:]


def test_an_interrupted_iteration_is_drawn_again(tokenizer: str, tmp_path: Path) -> None:
    expected = run(tmp_path, datamodule(tokenizer), module=Recorder(refill=True))
    saver = OnExceptionCheckpoint(str(tmp_path), "stopped")
    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path, datamodule(tokenizer), saver, module=Recorder(stop_in=4, refill=True))
    path = tmp_path / "stopped.ckpt"
    assert run(tmp_path, datamodule(tokenizer), module=Recorder(refill=True), ckpt_path=path) == expected[4:]


class Renamed(PromptDataModule):
    """A subclass, whose state Lightning looks up under another name."""


class Restore(L.Callback):
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        assert trainer.datamodule.restore(checkpoint)  # type: ignore[attr-defined]


def saved_run(tokenizer: str, folder: Path) -> Path:
    saver = ModelCheckpoint(folder, filename="one", save_last=False)
    run(folder, datamodule(tokenizer), saver, epochs=1)
    return folder / "one.ckpt"


def test_a_resume_that_did_not_restore_the_sampler_is_an_error(tokenizer: str, tmp_path: Path) -> None:
    path = saved_run(tokenizer, tmp_path)
    with pytest.raises(RuntimeError, match=r"sampler was not restored.*'Renamed'"):
        run(tmp_path, datamodule(tokenizer, Renamed), ckpt_path=path)


def test_a_subclass_restores_from_the_whole_checkpoint(tokenizer: str, tmp_path: Path) -> None:
    path = saved_run(tokenizer, tmp_path)
    expected = run(tmp_path, datamodule(tokenizer))
    assert run(tmp_path, datamodule(tokenizer, Renamed), Restore(), ckpt_path=path) == expected[3:]


def test_changed_text_behind_the_same_ids_is_refused(tokenizer: str, tmp_path: Path) -> None:
    def data(text: str) -> PromptDataModule:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f'{{"prompt": "{text} {i}", "answer": "1"}}\n' for i in range(8)))
        module = datamodule(tokenizer, train=PromptSource(JsonLines(str(path))))
        module.setup("fit")
        return module

    state = data("one").state_dict()
    data("one").load_state_dict(state)
    with pytest.raises(ValueError, match="other tokens than those of the checkpoint"):
        data("two").load_state_dict(state)


def test_state_may_come_before_setup(tokenizer: str) -> None:
    first, second = datamodule(tokenizer), datamodule(tokenizer)
    first.setup("fit")
    ids = [p.id for p in next(iter(first.train_dataloader()))]
    first.observe(ids, [1] * 4, [8] * 4)
    second.load_state_dict(first.state_dict())
    second.setup("fit")
    assert [p.id for p in next(iter(second.train_dataloader()))] == [p.id for p in next(iter(first.train_dataloader()))]


def test_refill_never_repeats_a_prompt_of_the_iteration_and_ends_with_the_data(tokenizer: str) -> None:
    data = datamodule(tokenizer, prompts_per_iteration=12)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    more, rest = data.refill(5), data.refill(5)
    assert more is not None
    assert rest is not None
    assert (len(more), len(rest)) == (5, 3)
    assert len({p.id for p in [*batch, *more, *rest]}) == 20
    assert data.refill(1) is None
    assert data.refill(0) is None


def test_setup_is_done_once(tokenizer: str) -> None:
    data = datamodule(tokenizer)
    data.setup("fit")
    sampler = data.sampler
    data.setup("validate")
    data.setup("fit")
    assert data.sampler is sampler


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 6))
def test_validation_prompts_are_split_without_repeats(total: int, chunk: int, world: int) -> None:
    if total < world:
        with pytest.raises(ValueError, match="validation prompts for"):
            split_evenly(total, chunk, 0, world)
        return
    parts = [split_evenly(total, chunk, rank, world) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1
    assert all(1 <= len(batch) <= chunk + 1 for part in parts for batch in part)
    assert sorted(i for part in parts for batch in part for i in batch) == list(range(total))


def test_a_sampler_that_never_hears_of_outcomes_is_an_error(tokenizer: str) -> None:
    data = datamodule(tokenizer)
    data.setup("fit")
    with pytest.raises(RuntimeError, match=r"VADESampler never heard .* add lqrl\.callbacks\.SamplerFeedback"):
        list(data.train_dataloader())


@pytest.mark.parametrize("factory", [Uniform(), VADE()])
def test_a_prompt_that_comes_twice_is_told_once_with_the_sum(tokenizer: str, factory: SamplerFactory) -> None:
    """A group that a refresh cut can end beside the prompt's next draw."""
    told, added = (datamodule(tokenizer, sampler=factory) for _ in range(2))
    for data in (told, added):
        data.setup("fit")
        first, second, third = (p.id for p in next(iter(data.train_dataloader())).prompts[:3])
    feed_back(told, [(first, 2.0, 8), (second, 0.0, 8), (first, 0.5, 4), (third, 8.0, 8)])
    added.observe([third, second, first], [8.0, 0.0, 2.5], [8, 8, 12])
    state, expected = (tree_flatten(data.state_dict())[0] for data in (told, added))
    for one, other in zip(state, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_without_validation_there_is_no_loader(tokenizer: str) -> None:
    assert PromptDataModule(tokenizer, PromptSource(Countdown(size=40))).val_dataloader() == []


@pytest.mark.parametrize("option", ["prompts_per_iteration", "iterations_per_epoch", "val_batch_size"])
def test_numbers_must_be_positive(tokenizer: str, option: str) -> None:
    with pytest.raises(ValueError, match=rf"PromptDataModule\.{option} must be at least 1"):
        datamodule(tokenizer, **{option: 0})


def test_use_before_setup_says_so(tokenizer: str) -> None:
    with pytest.raises(RuntimeError, match=r"setup\('fit'\)"):
        datamodule(tokenizer).train_dataloader()


def test_yaml_builds_data_and_rewards(tmp_path: Path) -> None:
    from lqrl.rewards import MathReward, OverlongPenalty, RewardSum, TaskReward

    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.dump(
            {
                "data": {
                    "tokenizer": "some/model",
                    "train": {"rows": {"class_path": "lqrl.data.Countdown", "init_args": {"size": 99, "seed": 3}}},
                    "val": {
                        "rows": {"class_path": "lqrl.data.JsonLines", "init_args": {"path": "x.jsonl"}},
                        "chat": True,
                        "chat_options": {"enable_thinking": False},
                        "answer_after": "####",
                    },
                    "sampler": {"class_path": "lqrl.data.VADE", "init_args": {"decay_selected": 0.3}},
                },
                "reward": {
                    "terms": [
                        {
                            "fn": {
                                "class_path": "lqrl.rewards.TaskReward",
                                "init_args": {"task": {"class_path": "lqrl.data.Countdown"}},
                            },
                            "name": "right",
                        },
                        {"fn": {"class_path": "lqrl.rewards.MathReward"}, "name": "math", "weight": 0.0},
                        {
                            "fn": {"class_path": "lqrl.rewards.OverlongPenalty", "init_args": {"max_tokens": 9000}},
                            "name": "overlong",
                        },
                    ]
                },
            }
        )
    )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(PromptDataModule, "data")
    parser.add_class_arguments(RewardSum, "reward")
    built = parser.instantiate(parser.parse_args(["--config", str(config), "--data.prompts_per_iteration", "8"]))
    assert built.data.train_source == PromptSource(Countdown(size=99, seed=3))
    assert built.data.val_source.chat_options == {"enable_thinking": False}
    assert built.data.sampler_factory == VADE(decay_selected=0.3)
    assert built.data.prompts_per_iteration == 8
    assert [term.fn for term in built.reward.terms] == [
        TaskReward(Countdown()),
        MathReward(),
        OverlongPenalty(max_tokens=9000),
    ]


def test_yaml_default_sampler_is_uniform() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PromptDataModule, "data")
    words = ["--data.tokenizer", "x", "--data.train.rows", "lqrl.data.Countdown", "--data.train.rows.size", "4"]
    assert parser.instantiate(parser.parse_args(words)).data.sampler_factory == Uniform()
