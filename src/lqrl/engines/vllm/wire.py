"""The completions route of vLLM's servers: a sample as the body of a request, and what its answer says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from lqrl.engines.vllm.peer import AnswerError, fields
from lqrl.engines.vllm.requests import CUT, ENDS, Generated

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
_LARGEST = 1e-3  # log-prob; above 0 by rounding
_LOGPROBS = f"{ROUTE} (log-probs)"


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


def generated(answer: Any, body: Mapping[str, Any], vocabulary: int) -> Generated:
    """What was sampled.

    Args:
        answer: of the server.
        body: what it was asked.
        vocabulary: tokens that there are.

    Raises:
        AnswerError: when the answer has another form, speaks of another prompt, or has what cannot have been sampled.
    """
    choice = _choice(
        answer, body, {"token_ids": (list,), "finish_reason": (str, NoneType), "logprobs": (dict, NoneType)}
    )
    tokens = choice["token_ids"]
    if not tokens and choice["finish_reason"] == CUT:
        return Generated([], [], None, CUT)
    if len(tokens) > body["max_tokens"]:
        raise AnswerError(f"{ROUTE} answered with {len(tokens)} tokens, asked for at most {body['max_tokens']}")
    if strange := [each for each in tokens if type(each) is not int or not 0 <= each < vocabulary]:
        raise AnswerError(f"{ROUTE} answered with token ids {strange[:3]}, of a vocabulary of {vocabulary}")
    said = fields(choice["logprobs"], _LOGPROBS, {"token_logprobs": (list,)})["token_logprobs"]
    logprobs, reason = _numbers(said), choice["finish_reason"]
    if reason not in (*ENDS, CUT) or (reason == "length" and len(tokens) < body["max_tokens"]):
        raise AnswerError(
            f"{ROUTE} ended a sample with {reason!r} after {len(tokens)} of {body['max_tokens']} tokens; see its log"
        )
    if not tokens or len(logprobs) != len(tokens):
        raise AnswerError(f"{ROUTE} answered with {len(tokens)} tokens and {len(logprobs)} log-probs")
    return Generated(tokens, logprobs, None, reason)


def prompt_logprobs(answer: Any, body: Mapping[str, Any]) -> list[float]:
    """Log-probs of the prompt's tokens but for the first.

    Raises:
        AnswerError: as `generated`.
    """
    tokens = body["prompt"]
    said = _choice(answer, body, {"prompt_logprobs": (list,)})["prompt_logprobs"]
    if len(said) != len(tokens):
        raise AnswerError(f"{ROUTE} answered with {len(said)} log-probs of a prompt of {len(tokens)} tokens")
    found = [
        fields(each, _LOGPROBS, {str(token): (dict,)})[str(token)]
        for each, token in zip(said[1:], tokens[1:], strict=True)
    ]
    return _numbers([each.get("logprob") for each in found])


def top_logprobs(answer: Any, body: Mapping[str, Any]) -> list[float]:
    """All log-probs that were asked for, the sampled tokens' and the most likely ones'.

    Raises:
        AnswerError: as `generated`.
    """
    said = fields(_choice(answer, body, {"logprobs": (dict,)})["logprobs"], _LOGPROBS, {"top_logprobs": (list,)})
    found = [_logprob(value) for each in said["top_logprobs"] for value in fields(each, _LOGPROBS, {}).values()]
    if not found:
        raise AnswerError(f"{ROUTE} answered without the log-probs that were asked for")
    return found


def _choice(answer: Any, body: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> Mapping[str, Any]:
    choices = fields(answer, ROUTE, {"choices": (list,)})["choices"]
    if len(choices) != 1:
        raise AnswerError(f"{ROUTE} answered with {len(choices)} choices, asked for one: {str(answer)[:200]}")
    choice = fields(choices[0], ROUTE, {"prompt_token_ids": (list,), **kinds})
    if choice["prompt_token_ids"] != body["prompt"]:
        read = str(choice["prompt_token_ids"])[:100]
        raise AnswerError(f"{ROUTE} was asked to complete {body['prompt'][:8]}... and completed {read}...")
    return choice


def _numbers(values: Sequence[Any]) -> list[float]:
    """Log-probs that all can have been drawn with."""
    found = [_logprob(value) for value in values]
    if any(map(math.isnan, found)):
        raise AnswerError(
            f"{ROUTE} answered with a log-prob that is NaN or missing; the weights or an option are broken"
        )
    return found


def _logprob(value: Any) -> float:
    """NaN for what no token that was drawn can have."""
    if value is None:
        return math.nan
    if type(value) not in (int, float) or value > _LARGEST:
        raise AnswerError(f"{ROUTE} answered with {value!r} as a log-prob")
    return math.nan if value <= _CLAMPED else float(value)
