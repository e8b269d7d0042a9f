"""Rows become prompts: template or chat template, tokenised once, with stable ids."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import Dataset

from lqrl.data.rows import Row, RowSource
from lqrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSource:
    """Rows, and how each becomes a prompt.

    Attributes:
        rows: where rows come from.
        prompt_field: column of the prompt. With ``chat`` it may hold a list of messages.
        answer_field: column of the reference answer, or ``None`` when no reward reads one.
        answer_after: the answer is what follows the last occurrence of this marker (``####`` for GSM8K); without one it
            is the whole column.
        template: python format string over the row's columns that makes the prompt; without one it is ``prompt_field``.
        chat: apply the tokenizer's chat template, with the generation prompt.
        system_prompt: system message of the chat.
        chat_options: further arguments of the chat template, such as ``enable_thinking: false``.
        add_special_tokens: let the tokenizer add its own (BOS) to a plain prompt; a chat template brings its own.
        max_prompt_tokens: longest prompt.
        overlong: what a longer one does: ``raise`` an error or ``drop`` the row, counted and logged.
        limit: use only this many first rows.

    Raises:
        ValueError: when options contradict each other.
    """

    # Texts are "" where they are not set: a parser that may choose None reads "####" as a comment, so as None.
    rows: RowSource
    prompt_field: str = "prompt"
    answer_field: str | None = "answer"
    answer_after: str = ""
    template: str = ""
    chat: bool = False
    system_prompt: str = ""
    chat_options: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    max_prompt_tokens: int | None = None
    overlong: Literal["raise", "drop"] = "raise"
    limit: int | None = None

    def __post_init__(self) -> None:
        if (self.system_prompt or self.chat_options) and not self.chat:
            raise ValueError("PromptSource: system_prompt and chat_options need chat: true")
        if self.answer_after and self.answer_field is None:
            raise ValueError("PromptSource: answer_after needs answer_field")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"PromptSource.max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"PromptSource.limit must be at least 1, got {self.limit}")
        if self.overlong not in ("raise", "drop"):
            raise ValueError(f"PromptSource.overlong must be 'raise' or 'drop', got {self.overlong!r}")

    def render(self, row: Row, where: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text that is tokenised.

        Raises:
            ValueError: when a column is missing, has the wrong type, or the prompt is empty.
        """
        if self.template:
            try:
                content: Any = self.template.format_map(row)
            except KeyError as error:
                raise ValueError(f"{where}: template names column {error}; the row has {sorted(row)}") from error
        elif self.prompt_field in row:
            content = row[self.prompt_field]
        else:
            raise ValueError(f"{where}: no column {self.prompt_field!r}; set prompt_field to one of {sorted(row)}")
        if isinstance(content, list) and self.chat:
            messages = list(content)
        elif isinstance(content, str):
            if not content.strip():
                raise ValueError(f"{where}: the prompt is empty; remove the row or correct it")
            messages = [{"role": "user", "content": content}]
        else:
            fix = "set chat: true" if isinstance(content, list) else "write it as a string"
            raise ValueError(f"{where}: the prompt is a {type(content).__name__}; {fix}")
        if not self.chat:
            return str(content)
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; set chat: false, or use a chat model's tokenizer")
        if self.system_prompt:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self.chat_options)
        )

    def answer(self, row: Row, where: str) -> str | None:
        """The reference answer of a row.

        Raises:
            ValueError: when the column or the marker is missing, or nothing follows it.
        """
        if self.answer_field is None:
            return None
        value = row.get(self.answer_field)
        if value is None:
            raise ValueError(
                f"{where}: no column {self.answer_field!r}; set answer_field to one of {sorted(row)}, or to null if no "
                "reward needs an answer"
            )
        answer = str(value)
        if self.answer_after:
            _, marker, answer = answer.rpartition(self.answer_after)
            if not marker:
                raise ValueError(f"{where}: the answer does not contain {self.answer_after!r}; correct answer_after")
        answer = answer.strip()
        if not answer:
            raise ValueError(f"{where}: the answer is empty; remove the row or correct it")
        return answer


class PromptDataset(Dataset[Prompt]):
    """The prompts of a source, tokenised once, on the host.

    Args:
        source: rows and how to render them.
        tokenizer: the model's.
        max_prompt_tokens: a further limit, such as the context of the model; the smaller one counts.

    Attributes:
        prompts: all prompts; the position in this list is the *dataset index*.
        ids: their stable ids, ``ids[index] == prompts[index].id``.
        dropped: overlong rows left out.

    Raises:
        ValueError: when a row is unusable (file, line and fix are named), no row is left, or two ids are equal.
    """

    def __init__(
        self, source: PromptSource, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int | None = None
    ) -> None:
        limits = [n for n in (source.max_prompt_tokens, max_prompt_tokens) if n is not None]
        self.max_prompt_tokens = min(limits) if limits else None
        self.dropped = 0
        self.prompts: list[Prompt] = []
        rows = source.rows
        total = len(rows) if source.limit is None else min(len(rows), source.limit)
        for index in range(total):
            prompt = self._tokenize(source, tokenizer, index)
            if prompt is not None:
                self.prompts.append(prompt)
        if not self.prompts:
            raise ValueError(
                f"{rows.identity()}: none of {total} rows is left ({self.dropped} are longer than "
                f"{self.max_prompt_tokens} tokens); raise max_prompt_tokens"
            )
        if self.dropped:
            log.warning(
                "%s: dropped %d of %d rows, longer than %s tokens",
                rows.identity(),
                self.dropped,
                total,
                self.max_prompt_tokens,
            )
        self.ids: tuple[int, ...] = tuple(prompt.id for prompt in self.prompts)
        if len(set(self.ids)) != len(self.ids):
            raise ValueError(f"{rows.identity()}: two rows have the same prompt id; give the source another name")

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def digest(self) -> str:
        """Digest of ids and tokens in order; equal for equal data and tokenizer."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(repr((prompt.id, prompt.input_ids)).encode())
        return digest.hexdigest()

    def _tokenize(self, source: PromptSource, tokenizer: PreTrainedTokenizerBase, index: int) -> Prompt | None:
        row, where = source.rows[index], source.rows.where(index)
        text, answer = source.render(row, where, tokenizer), source.answer(row, where)
        special = source.add_special_tokens and not source.chat
        token_ids = tuple(tokenizer(text, add_special_tokens=special)["input_ids"])  # type: ignore[arg-type]
        if not token_ids:
            raise ValueError(f"{where}: the prompt has no tokens; remove the row or correct it")
        if self.max_prompt_tokens is not None and len(token_ids) > self.max_prompt_tokens:
            if source.overlong == "raise":
                raise ValueError(
                    f"{where}: the prompt has {len(token_ids)} tokens, more than max_prompt_tokens = "
                    f"{self.max_prompt_tokens}; raise the limit, shorten the prompt, or set overlong: drop"
                )
            self.dropped += 1
            return None
        return Prompt(
            id=prompt_id(source.rows.identity(), index),
            input_ids=token_ids,
            text=text,
            answer=answer,
            fields=_other_fields(row, (source.prompt_field, source.answer_field)),
            where=where,
        )


def prompt_id(identity: str, index: int) -> int:
    """Stable id of row ``index`` of a source: 63 bits of a hash, the same on any machine."""
    digest = hashlib.sha256(f"{identity}\n{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _other_fields(row: Mapping[str, Any], taken: Sequence[str | None]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in taken}
