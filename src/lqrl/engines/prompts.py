"""What an engine can be asked to complete."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from lqrl.types import Prompt, SamplingParams


def check_prompts(
    prompts: Sequence[Prompt], params: SamplingParams, *, vocabulary: int, max_model_len: int, eos: Sequence[int]
) -> None:
    """Refuse what would be cut, skipped or read as something else.

    Args:
        prompts: all prompts of a call.
        params: sampling settings.
        vocabulary: rows of the output head.
        max_model_len: most tokens of a prompt and its completion.
        eos: tokens that end a completion.

    Raises:
        ValueError: for a prompt that is empty, too long, not of integers or out of the vocabulary, or a stop token out
            of it.
    """
    for prompt in prompts:
        tokens = len(prompt.input_ids)
        if not tokens:
            raise ValueError(f"prompt {prompt.id} is empty; a prompt needs at least one token")
        if tokens + params.max_tokens > max_model_len:
            raise ValueError(
                f"prompt {prompt.id} has {tokens} tokens and max_tokens={params.max_tokens} more do not fit "
                f"max_model_len={max_model_len}, the positions of the model (max_position_embeddings); lower "
                "model.init_args.sampling.max_tokens, leave out long prompts with data.init_args.max_prompt_tokens and "
                "overlong: drop in data.init_args.train and val, or take a model with more positions"
            )
        if not all(issubclass(kind, Integral) for kind in set(map(type, prompt.input_ids))):
            odd = next(token for token in prompt.input_ids if not isinstance(token, Integral))
            raise ValueError(
                f"prompt {prompt.id} holds {odd!r}, which is no token id; give it the tokenizer's integers"
            )
        if min(prompt.input_ids) < 0 or max(prompt.input_ids) >= vocabulary:
            raise ValueError(
                f"prompt {prompt.id} holds a token outside the model's vocabulary of {vocabulary}; "
                "tokenizer and model do not belong together"
            )
    outside = [t for t in (*eos, *params.stop_token_ids) if not 0 <= t < vocabulary]
    if outside:
        raise ValueError(f"stop tokens {outside} are outside the model's vocabulary of {vocabulary}")
