"""Prompts for the benchmarks: what a model of this kind is asked."""

from __future__ import annotations

from lqrl.data import Arithmetic, Countdown
from lqrl.types import Prompt


def make_prompts(tokenizer, count: int) -> list[Prompt]:
    """Chat prompts where the model chats, countdown problems where it does not."""
    if tokenizer.chat_template:
        task = Arithmetic(digits=2, size=count)
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": task[i]["prompt"]}], tokenize=False, add_generation_prompt=True
            )
            for i in range(count)
        ]
    else:
        texts = [Countdown(size=count)[i]["prompt"] for i in range(count)]
    return [Prompt(i, tuple(tokenizer(t)["input_ids"]), t) for i, t in enumerate(texts)]
