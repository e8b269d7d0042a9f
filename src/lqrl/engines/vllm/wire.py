"""The completions route of vLLM's servers: a sample as the body of a request, and what its answer says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lqrl.engines.vllm.requests import CUT, Generated

ROUTE = "/v1/completions"

# Written out, since a server fills what is left open from the model's generation_config.json.
_NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_CLAMPED = -9999.0  # the server's word for -inf


def request_body(tokens: Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request that gives tokens and wants tokens.

    Args:
        tokens: the prompt.
        fields: see `lqrl.engines.vllm.requests.sampling_fields`.
    """
    return {
        **_NEUTRAL,
        **fields,
        "prompt": list(tokens),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # in the log-probs, which have no tokenizer
    }


def generated(answer: Any, tokens: Sequence[int]) -> Generated:
    """What was sampled after the prompt ``tokens``.

    Raises:
        RuntimeError: when the answer has another form, or speaks of another prompt.
    """
    choice = _choice(answer, tokens)
    try:
        if not choice["token_ids"] and choice["finish_reason"] == CUT:
            return Generated([], [], None, CUT)
        logprobs = [_logprob(value) for value in choice["logprobs"]["token_logprobs"]]
        return Generated([int(token) for token in choice["token_ids"]], logprobs, None, choice["finish_reason"])
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"vLLM's answer has no tokens and log-probs where they belong: {error!r}") from error


def prompt_logprobs(answer: Any, tokens: Sequence[int]) -> list[float]:
    """Log-probs of the prompt's tokens but for the first.

    Raises:
        RuntimeError: as `generated`.
    """
    choice = _choice(answer, tokens)
    try:
        said = choice["prompt_logprobs"][1:]
        return [_logprob(each[str(token)]["logprob"]) for each, token in zip(said, tokens[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"vLLM's answer has no log-probs of the prompt: {error!r}") from error


def top_logprobs(answer: Any, tokens: Sequence[int]) -> list[float]:
    """All log-probs that were asked for, the sampled tokens' and the most likely ones'.

    Raises:
        RuntimeError: as `generated`.
    """
    choice = _choice(answer, tokens)
    try:
        return [_logprob(value) for said in choice["logprobs"]["top_logprobs"] for value in said.values()]
    except (KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"vLLM's answer has no log-probs: {error!r}") from error


def _choice(answer: Any, tokens: Sequence[int]) -> Any:
    try:
        (choice,) = answer["choices"]
        read = choice["prompt_token_ids"]
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"vLLM answered without a choice that holds token ids: {str(answer)[:300]}") from error
    if read != list(tokens):
        raise RuntimeError(f"vLLM was asked to complete {list(tokens)[:8]}... and completed {str(read)[:100]}...")
    return choice


def _logprob(value: float | None) -> float:
    """NaN for what no token that was drawn can have."""
    return math.nan if value is None or value <= _CLAMPED else float(value)
