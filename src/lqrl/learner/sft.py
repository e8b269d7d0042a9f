"""Supervised fine-tuning: the stage before RL, on the learner's own packed forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lqrl.algorithms.logprobs import chunked_logprobs
from lqrl.modeling.backbone import hidden_states, output_weight, pack
from lqrl.modeling.head import head_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class SFTBatch:
    """Right-padded prompts with their answers.

    Attributes:
        input_ids: ``[B, T]`` int64, prompt, answer, EOS.
        attention_mask: ``[B, T]`` bool.
        loss_mask: ``[B, T]`` bool, true on answer and EOS.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SFTBatch:
        """The same batch on ``device``."""
        move = {"device": device, "non_blocking": non_blocking}
        return SFTBatch(self.input_ids.to(**move), self.attention_mask.to(**move), self.loss_mask.to(**move))


class SFTDataset(Dataset[SFTBatch]):
    """Tokenised rows held as three tensors; an index is the list of rows of one batch.

    Args:
        rows: mappings with the two fields.
        tokenizer: gives the ids and the EOS.
        prompt_field, answer_field: what is conditioned on, and what is learned.

    Raises:
        ValueError: when a row lacks a field, has an empty text, or there are no rows.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_field: str = "prompt",
        answer_field: str = "solution",
    ) -> None:
        rows = list(rows)
        if not rows:
            raise ValueError("SFTDataset got no rows")
        for index, row in enumerate(rows):
            if missing := [f for f in (prompt_field, answer_field) if not row.get(f)]:
                raise ValueError(f"row {index} has no text in {missing}; its fields are {sorted(row)}")
        # The prompt as the RL stage tokenises it; the answer continues it, so it gets no special tokens in front.
        prompts = tokenizer([row[prompt_field] for row in rows])["input_ids"]
        answers = tokenizer([row[answer_field] for row in rows], add_special_tokens=False)["input_ids"]
        length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True)) + 1
        width = torch.arange(length)
        begins = torch.tensor([len(p) for p in prompts])[:, None]
        ends = begins + torch.tensor([len(a) for a in answers])[:, None] + 1
        flat = [t for p, a in zip(prompts, answers, strict=True) for t in (*p, *a, tokenizer.eos_token_id)]
        self.attention_mask = width < ends
        self.loss_mask = self.attention_mask & (width >= begins)
        self.input_ids = torch.zeros(len(rows), length, dtype=torch.int64)  # padding is never computed
        self.input_ids[self.attention_mask] = torch.tensor(flat)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: Sequence[int]) -> SFTBatch:
        """The rows ``index`` as one batch, cut to its longest row."""
        at = torch.as_tensor(index)
        length = int(self.attention_mask[at].sum(1).max())
        return SFTBatch(*(x[at, :length] for x in (self.input_ids, self.attention_mask, self.loss_mask)))

    def loader(self, batch_size: int, *, seed: int) -> DataLoader[SFTBatch]:
        """Full batches in an order that depends on ``seed`` alone; another order each epoch.

        Raises:
            ValueError: when there are fewer rows than ``batch_size``.
        """
        if len(self) < batch_size:
            raise ValueError(f"batch_size {batch_size} is more than the {len(self)} rows")
        order = RandomSampler(self, generator=torch.Generator().manual_seed(seed))
        return DataLoader(self, sampler=BatchSampler(order, batch_size, drop_last=True), batch_size=None)


class SFTModule(L.LightningModule):
    """Maximises the mean log-probability of answer tokens.

    The forward is the one of RL: packed tokens, log-probs in chunks. A policy trained here starts RL with the numbers
    it had at the end of this stage.

    Args:
        policy: a model from `lqrl.modeling.backbone.load_model`.
        optimizer, lr_scheduler: as callables of the parameters and of the optimizer; the schedule counts steps.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler

    def forward(self, batch: SFTBatch) -> Tensor:
        """``[N]`` float32 log-probs of the answer tokens, row by row; logits of the prompts are not computed."""
        packed = pack(batch.input_ids, batch.attention_mask)
        # The hidden state before a token predicts it. A row's first token has none before it and is never learned.
        learned = batch.loss_mask.flatten()[packed.index[1:]] & (packed.position_ids[0, 1:] > 0)
        hidden = hidden_states(self.policy, packed)[:-1][learned]
        targets = packed.input_ids[0, 1:][learned]
        kernels = head_kernels(hidden.device, exact=False)
        return chunked_logprobs(hidden, output_weight(self.policy), targets, **kernels._asdict())

    def training_step(self, batch: SFTBatch, batch_idx: int) -> Tensor:
        """Mean negative log-prob of the answer tokens."""
        loss = -self(batch).mean()
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Log the same loss, weighted by answer tokens over the epoch."""
        logprobs = self(batch)
        self.log("val/loss", -logprobs.mean(), prog_bar=True, batch_size=len(logprobs))

    def configure_optimizers(self) -> Any:
        """The optimizer over the policy's parameters, and the schedule over steps."""
        optimizer = self.optimizer(self.policy.parameters())
        if self.lr_scheduler is None:
            return optimizer
        schedule = {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}
