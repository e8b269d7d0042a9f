"""`PromptDataModule`: the prompts of each iteration, sliced by rank; its sampler is part of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lqrl.data.prompts import PromptDataset, PromptSource
from lqrl.data.samplers import PromptSampler, SamplerFactory, Uniform
from lqrl.modeling.sources import load_tokenizer
from lqrl.types import Prompt, PromptBatch

_FORMAT = "lqrl.prompts/1"


class PromptDataModule(L.LightningDataModule):
    """Training prompts from a sampler, validation prompts in order.

    Every rank draws the same prompts and takes its own slice, so the Trainer needs ``use_distributed_sampler=False``
    with more than one process. The training loader has a length and draws an iteration's prompts when that iteration
    begins, not before: the sampler has then seen all earlier outcomes.

    Args:
        tokenizer: directory or hub name of the model's tokenizer.
        train: training prompts.
        val: validation prompts, or ``None`` for no validation.
        prompts_per_iteration: over all ranks.
        iterations_per_epoch: length of an epoch.
        sampler: how training prompts are chosen.
        max_prompt_tokens: longest prompt, train and val; without it the tokenizer's own limit holds.
        val_batch_size: validation prompts of one batch on one rank, about.
        seed: of the draws.

    Attributes:
        train_prompts, val_prompts: the data sets, after ``setup``.
        sampler: the training sampler, after ``setup``.
        restored: whether a checkpoint's state has been loaded.
        hears_outcomes: set by a callback that will call `observe` after each iteration, such as `SamplerFeedback`.

    Raises:
        ValueError: when a number is not positive.
    """

    def __init__(
        self,
        tokenizer: str,
        train: PromptSource,
        val: PromptSource | None = None,
        prompts_per_iteration: int = 32,
        iterations_per_epoch: int = 10,
        sampler: SamplerFactory = Uniform(),  # noqa: B008 - frozen
        max_prompt_tokens: int | None = None,
        val_batch_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("prompts_per_iteration", prompts_per_iteration),
            ("iterations_per_epoch", iterations_per_epoch),
            ("val_batch_size", val_batch_size),
        ):
            if value < 1:
                raise ValueError(f"PromptDataModule.{name} must be at least 1, got {value}")
        self.tokenizer_name = tokenizer
        self.train_source, self.val_source = train, val
        self.prompts_per_iteration, self.iterations_per_epoch = prompts_per_iteration, iterations_per_epoch
        self.sampler_factory = sampler
        self.max_prompt_tokens = max_prompt_tokens
        self.val_batch_size = val_batch_size
        self.seed = seed
        self.train_prompts: PromptDataset | None = None
        self.val_prompts: PromptDataset | None = None
        self.sampler: PromptSampler | None = None
        self.restored = False
        self.hears_outcomes = False
        self._loaded: dict[str, Any] | None = None
        self._before_draw: dict[str, Any] | None = None
        self._drawn: list[int] = []
        self._awaits_outcomes = False

    def first_prompts(self, count: int) -> list[Prompt]:
        """The first training prompts, or validation ones without those; the same on every rank, fewer if need be."""
        prompts = self.train_prompts if self.train_prompts is not None else self.val_prompts
        return [] if prompts is None else [prompts[i] for i in range(min(count, len(prompts)))]

    # ---------------------------------------------------------------- set-up

    def setup(self, stage: str) -> None:
        """Tokenise what ``stage`` needs and build the sampler; what is there already stays.

        Raises:
            ValueError: for unusable rows, or when the prompts of an iteration cannot be divided among the ranks.
        """
        wants_val = self.val_source is not None and self.val_prompts is None
        if not wants_val and (stage != "fit" or self.train_prompts is not None):
            return
        tokenizer = load_tokenizer(self.tokenizer_name)
        limit = min(n for n in (self.max_prompt_tokens, int(tokenizer.model_max_length)) if n is not None)
        if wants_val:
            assert self.val_source is not None
            self.val_prompts = PromptDataset(self.val_source, tokenizer, max_prompt_tokens=limit)
        if stage == "fit" and self.train_prompts is None:
            self.train_prompts = PromptDataset(self.train_source, tokenizer, max_prompt_tokens=limit)
            _, world = shard()
            if self.prompts_per_iteration % world:
                raise ValueError(
                    f"prompts_per_iteration = {self.prompts_per_iteration} is not divisible by {world} ranks; "
                    "it counts the prompts of all ranks together"
                )
            self.sampler = self.sampler_factory(
                self.train_prompts.ids,
                batch_size=self.prompts_per_iteration,
                iterations=self.iterations_per_epoch,
                seed=self.seed,
            )
            if self._loaded is not None:
                self._apply(self._loaded)

    def train_dataloader(self) -> DataLoader[Prompt]:
        """``PromptBatch`` of this rank's prompts, once an iteration.

        Raises:
            RuntimeError: when the run was resumed but the checkpoint's sampler state was not restored.
        """
        if self._resumed() and not self.restored:
            raise RuntimeError(
                "this run was resumed, but the state of its prompt sampler was not restored: Lightning looks it up "
                f"under the class name {type(self).__qualname__!r}. Resume with the datamodule class that the run was "
                "started with, or call restore(checkpoint) in a callback's on_load_checkpoint"
            )
        return self._loader(self._fitted()[0], _RankBatches(self))

    def val_dataloader(self) -> DataLoader[Prompt] | list[Any]:
        """All validation prompts, each on exactly one rank; every rank has the same number of batches, none empty.

        Raises:
            ValueError: when there are fewer validation prompts than ranks.
        """
        if self.val_source is None:
            return []
        if self.val_prompts is None:
            raise RuntimeError("call setup('validate') before val_dataloader()")
        rank, world = shard()
        return self._loader(self.val_prompts, split_evenly(len(self.val_prompts), self.val_batch_size, rank, world))

    def _loader(self, prompts: PromptDataset, batches: Any) -> DataLoader[Prompt]:
        # num_workers=0: workers would draw ahead of the outcomes
        return _PromptLoader(prompts, batch_sampler=batches, num_workers=0, collate_fn=PromptBatch)

    # ---------------------------------------------------------------- during an iteration

    def begin_iteration(self, indices: list[int], before: dict[str, Any]) -> list[int]:
        """Note the draw of all ranks and the sampler's state before it; return this rank's slice.

        Raises:
            RuntimeError: when the sampler learns from outcomes and was not told those of the last iteration.
        """
        if self._awaits_outcomes:
            raise RuntimeError(
                f"{type(self._fitted()[1]).__name__} never heard how the last iteration's prompts went; add "
                "lqrl.callbacks.SamplerFeedback to trainer.callbacks, or use lqrl.data.Uniform"
            )
        self._awaits_outcomes = self._fitted()[1].needs_feedback
        self._drawn, self._before_draw = list(indices), before
        rank, world = shard()
        return indices[rank::world]

    def refill(self, count: int) -> list[Prompt] | None:
        """Draw fresh prompts in the middle of an iteration; every rank calls it, with the number that it needs.

        Returns:
            This rank's prompts, fewer than ``count`` when the data runs out (none twice in an iteration), or ``None``
            on every rank when no rank needs more or nothing is left.
        """
        prompts, sampler = self._fitted()
        rank, world = shard()
        counts = [count]
        if world > 1:
            counts = [0] * world
            dist.all_gather_object(counts, count)
        total = min(sum(counts), len(prompts) - len(self._drawn))
        if total <= 0:
            return None
        indices = sampler.draw(total, self._drawn)
        self._drawn += indices
        start = sum(counts[:rank])
        return [prompts[i] for i in indices[start : start + count]]

    @property
    def awaits_feedback(self) -> bool:
        """Whether the sampler learns from outcomes that nobody has promised to tell it."""
        return self._fitted()[1].needs_feedback and not self.hears_outcomes

    def observe(self, prompt_ids: Sequence[int], successes: Sequence[float], trials: Sequence[float]) -> None:
        """Give the outcomes of all ranks to the sampler; the same call on every rank."""
        self._awaits_outcomes = False
        self._fitted()[1].observe(prompt_ids, successes, trials)

    def beliefs(self, prompt_ids: Sequence[int]) -> Tensor | None:
        """Success rates that the sampler expects of training prompts, or ``None`` when it has no idea."""
        return self._fitted()[1].beliefs(prompt_ids)

    def sampler_metrics(self) -> dict[str, float]:
        """What the sampler reports about itself."""
        return self._fitted()[1].metrics()

    def on_exception(self, exception: BaseException) -> None:
        """An iteration that failed has no outcomes to wait for."""
        self._awaits_outcomes = False

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state; that before the draw while an iteration is interrupted, so that a resume repeats it."""
        if self.sampler is None or self.train_prompts is None:
            return {}
        state = self.sampler.state_dict()
        if self._in_flight() and self._before_draw is not None:
            state = self._before_draw
        return {"format": _FORMAT, "data": self.train_prompts.digest(), "sampler": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the sampler, now or in ``setup``.

        Raises:
            ValueError: when the state belongs to other prompts, another tokenizer or another kind of sampler.
        """
        if not state_dict:
            return
        self._loaded = dict(state_dict)
        self.restored = True
        self._awaits_outcomes = False  # a saved state has heard of all its iterations, or repeats the last
        if self.sampler is not None:
            self._apply(self._loaded)

    def restore(self, checkpoint: Mapping[str, Any]) -> bool:
        """Restore from a whole Lightning checkpoint, whatever class of datamodule wrote it.

        Lightning itself looks only under this class's own name, and skips silently when that is missing.

        Returns:
            Whether the checkpoint holds a state of a `PromptDataModule` or a subclass.
        """
        if self.restored:
            return True
        for value in checkpoint.values():
            if isinstance(value, dict) and value.get("format") == _FORMAT:
                self.load_state_dict(value)
        return self.restored

    def _apply(self, state: dict[str, Any]) -> None:
        prompts, sampler = self._fitted()
        sampler.load_state_dict(state["sampler"])
        if state["data"] != prompts.digest():
            raise ValueError(
                "the training prompts have other tokens than those of the checkpoint (same ids, changed text, template "
                "or tokenizer); resume with the same data, or start a new run from the weights"
            )

    def _fitted(self) -> tuple[PromptDataset, PromptSampler]:
        if self.train_prompts is None or self.sampler is None:
            raise RuntimeError("call setup('fit') before using the training prompts")
        return self.train_prompts, self.sampler

    def _resumed(self) -> bool:
        return self.trainer is not None and self.trainer.training and self.trainer.ckpt_path is not None

    def _in_flight(self) -> bool:
        """Whether a drawn iteration has not been trained on yet (Ctrl-C, an error)."""
        if self.trainer is None:
            return False
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready > progress.processed  # type: ignore[attr-defined]


class _PromptLoader(DataLoader[Prompt]):
    """Says that it resumes (Lightning warns otherwise): its position is the sampler's, in the datamodule's state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _RankBatches:
    """Batch sampler: this rank's slice of each draw, and a note of the draw for resume and refill."""

    def __init__(self, data: PromptDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data._fitted()[1])

    def __iter__(self) -> Iterator[list[int]]:
        _, sampler = self.data._fitted()
        epoch = iter(sampler)
        while True:
            before = sampler.state_dict()
            indices = next(epoch, None)
            if indices is None:
                return
            yield self.data.begin_iteration(indices, before)


def prompt_data(trainer: L.Trainer) -> PromptDataModule:
    """The trainer's datamodule.

    Raises:
        TypeError: when it has none, or one of another kind.
    """
    data = vars(trainer).get("datamodule")  # Lightning sets the attribute only when there is one
    if not isinstance(data, PromptDataModule):
        raise TypeError(f"the trainer needs a lqrl.data.PromptDataModule, it has {type(data).__name__}")
    return data


def shard() -> tuple[int, int]:
    """This process's rank and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def split_evenly(total: int, chunk: int, rank: int, world: int) -> list[list[int]]:
    """Indices ``rank, rank + world, ...`` below ``total``, in equally many non-empty batches on every rank.

    A batch has ``chunk`` indices, or one more: a rank with more batches than others would wait for them for ever.

    Raises:
        ValueError: when there are fewer indices than ranks.
    """
    if total < world:
        raise ValueError(f"{total} validation prompts for {world} ranks; add prompts, or validate on fewer ranks")
    mine = list(range(rank, total, world))
    batches = -(-(total // world) // chunk)
    return [mine[i * len(mine) // batches : (i + 1) * len(mine) // batches] for i in range(batches)]
