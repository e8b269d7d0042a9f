"""What servers answer, and what is made of an answer that is none: against peers in this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import test_engine_vllm_server
from test_engine_vllm_server import PROMPTS, SPEC, drawn, engine_on, refreshed, wanted, weights
from vllm_peers import VLLMPeer

from lqrl.engines.base import EngineUnavailableError, RefreshError
from lqrl.engines.vllm import VLLMServerEngineFactory
from lqrl.engines.vllm.fleet import ReplicasLostError
from lqrl.engines.vllm.partial import Partial
from lqrl.engines.vllm.peer import AnswerError, Patience, Peer
from lqrl.engines.vllm.wire import generated, prompt_logprobs, request_body
from lqrl.types import SamplingParams

Start = Callable[..., VLLMPeer]
start = test_engine_vllm_server.start

BODY = request_body((5, 6), {"max_tokens": 3})
VOCABULARY = 64


# ---------------------------------------------------------------- completions


def test_a_request_leaves_nothing_to_the_servers_defaults() -> None:
    body = request_body((5, 6), {"temperature": 0.7, "seed": 3})
    assert body["prompt"] == [5, 6]
    assert (body["temperature"], body["seed"]) == (0.7, 3)
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert body["return_token_ids"] is body["return_tokens_as_token_ids"] is True


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "prompt_token_ids": [5, 6],
        "token_ids": [9, 2],
        "logprobs": {"token_logprobs": [-0.5, -1.25]},
        "finish_reason": "stop",
    }
    return {"choices": [choice | changes]}


def test_an_answer_is_read() -> None:
    said = generated(answer(), BODY, VOCABULARY)
    assert (said.token_ids, said.logprobs, said.log_mass, said.finish_reason) == ([9, 2], [-0.5, -1.25], None, "stop")
    assert generated(answer(logprobs={"token_logprobs": [1e-6, 0]}), BODY, VOCABULARY).logprobs == [1e-6, 0.0]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer(prompt_token_ids=[5, 7]), r"asked to complete \[5, 6\]"),
        (answer(token_ids=None), "'token_ids' is no list"),
        (answer(logprobs=None), "no object"),
        (answer(logprobs={"token_logprobs": None}), "'token_logprobs' is no list"),
        (answer(logprobs={"token_logprobs": ["-0.5", -1]}), "'-0.5' as a log-prob"),
        (answer(logprobs={"token_logprobs": [-0.5, 1.5]}), "1.5 as a log-prob"),
        (answer(logprobs={"token_logprobs": [-0.5, math.inf]}), "inf as a log-prob"),
        (answer(logprobs={"token_logprobs": [-0.5, None]}), "NaN or missing"),
        (answer(logprobs={"token_logprobs": [-9999.0, -1]}), "NaN or missing"),
        (answer(logprobs={"token_logprobs": [-0.5, math.nan]}), "NaN or missing"),
        (answer(logprobs={"token_logprobs": [-0.5]}), "2 tokens and 1 log-probs"),
        (answer(finish_reason=7), "'finish_reason' is no str or null"),
        (answer(finish_reason="error"), "ended a sample with 'error' after 2 of 3 tokens"),
        (answer(finish_reason="length"), "ended a sample with 'length' after 2 of 3 tokens"),
        (answer(token_ids=[9, 64]), r"token ids \[64\], of a vocabulary of 64"),
        (answer(token_ids=[-1, 2]), r"token ids \[-1\]"),
        (answer(token_ids=[9, 2.0]), r"token ids \[2.0\]"),
        (answer(token_ids=[9, True]), r"token ids \[True\]"),
        (answer(token_ids=[9] * 4), "4 tokens, asked for at most 3"),
        ({"choices": []}, "0 choices, asked for one"),
        ({"choices": ["a"]}, "which is no object"),
        ({"choices": {}}, "'choices' is no list"),
        ([], "which is no object"),
        (None, "which is no object"),
    ],
)
def test_an_answer_of_another_form_is_an_error(reply: Any, message: str) -> None:
    with pytest.raises(AnswerError, match=rf"/v1/completions.*{message}"):
        generated(reply, BODY, VOCABULARY)


@pytest.mark.parametrize("said", [None, {}, [None], [None, None], [None, {"7": {}}], [None, {"6": -1}], [None, 1, 2]])
def test_log_probs_of_another_form_are_an_error(said: Any) -> None:
    with pytest.raises(AnswerError, match="/v1/completions"):
        prompt_logprobs(answer(prompt_logprobs=said), BODY)


@pytest.mark.parametrize("partial", [None, Partial(limit_fraction=0.5)])
def test_an_answer_that_cannot_have_been_sampled_ends_the_call_and_names_the_server(
    start: Start, partial: Partial | None
) -> None:
    server = start()
    engine = refreshed(server, partial=partial)
    server.answers["/v1/completions"] = answer(prompt_token_ids=[5, 6, 7], token_ids=[9, 70])
    with pytest.raises(RuntimeError, match=rf"{server.url}: /v1/completions answered with token ids \[70\]"):
        engine.generate_some(PROMPTS[:1], SamplingParams(max_tokens=3), seed=0)
    server.answers["/v1/completions"] = ["busy"]
    with pytest.raises(RuntimeError, match=rf"{server.url}: /v1/completions answered \['busy'\], which is no object"):
        engine.score([[5, 6]])
    server.answers.clear()
    assert [each.tolist() for each in engine.score([[5, 6]])] == [[0.0, -1.5]]


# ---------------------------------------------------------------- other routes


ROUTES: dict[str, Any] = {
    "/weight_info": {"version": "4"},
    "/collective_rpc": {"results": None},
    "/reset_prefix_cache": None,
    "lqrl_facts": {"vllm": "0.32.0"},
    "lqrl_load": {"missed": None, "moved": [], "digest": "0"},
    "/v1/completions": {"choices": [{"prompt_token_ids": [0], "logprobs": 1}]},
}


@pytest.mark.filterwarnings("ignore:replica .* is lost")
@pytest.mark.parametrize("route", ROUTES)
def test_a_refresh_in_which_a_server_answers_something_else_names_it(start: Start, route: str) -> None:
    server = start()
    engine = refreshed(server)
    server.answers[route] = ROUTES[route]
    with pytest.raises(RefreshError, match=rf"{server.url}: .*{route} .*answered .*take a tested vLLM"):
        engine.update_weights(weights(1).items(), policy_version=5)
    server.answers.clear()
    engine.update_weights(weights(1).items(), policy_version=6)
    assert drawn(engine) == wanted()


def test_a_server_whose_version_cannot_be_read_is_lost(start: Start) -> None:
    server = start()
    engine = refreshed(server)
    server.answers["/weight_info"] = [4]
    with pytest.warns(UserWarning, match=rf"{server.url} is lost \(/weight_info"), pytest.raises(ReplicasLostError):
        drawn(engine)


def test_another_http_server_is_refused_by_its_url(start: Start) -> None:
    other = start()
    other.before = lambda route: (404, {"detail": "Not Found"})
    refusal = r"it is no server that lqrl can refresh \(/health was refused with status 404"
    with pytest.raises(ValueError, match=f"^{other.url}: {refusal}"):
        engine_on(other)
    with pytest.raises(EngineUnavailableError, match=f"1 of 2 vLLM servers cannot be used: {other.url}: {refusal}"):
        engine_on(start(), other)


# ---------------------------------------------------------------- the API key


def test_a_wrong_api_key_is_told_when_a_server_is_looked_at(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, told = start(), "/v1/models was refused with status 401: .*set VLLM_API_KEY to the key"
    server.key = "right"
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(ValueError, match=f"^{server.url}: {told}"):
        engine_on(server)
    with pytest.raises(EngineUnavailableError, match=f"{server.url}: {told}"):
        engine_on(start(), server)
    monkeypatch.setenv("VLLM_API_KEY", "right")
    assert drawn(refreshed(server)) == wanted()


def test_an_api_key_that_has_changed_is_not_taken_for_nan(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, told = start(), "/v1/completions was refused with status 401: .*set VLLM_API_KEY to the key"
    monkeypatch.setenv("VLLM_API_KEY", "first")
    engine = refreshed(server)
    server.before = lambda route: setattr(server, "key", "second") if route == "/pause" else None
    with pytest.raises(RefreshError, match=f"1 of 1 replicas: {server.url}: {told}"):
        engine.update_weights(weights(1).items(), policy_version=5)
    server.key = "first"
    server.before = lambda route: None
    engine.update_weights(weights(1).items(), policy_version=6)
    server.key = "second"
    with pytest.raises(RuntimeError, match=f"^{server.url}: {told}"):
        drawn(engine)


def test_a_key_that_is_none_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret\ntwo")
    with pytest.raises(ValueError, match="VLLM_API_KEY has white space in it") as caught:
        Peer("http://127.0.0.1:1", Patience())
    assert "secret" not in str(caught.value)


def test_one_server_under_two_names_is_refused(start: Start) -> None:
    server, other = start(process="a"), start(process="b")
    engine_on(server, other).close()
    urls = [server.url, server.url.replace("127.0.0.1", "localhost")]
    with pytest.raises(ValueError, match=rf"names a server twice: {urls[0]} is also {urls[1]}"):
        VLLMServerEngineFactory(urls=urls, attempts=1)(SPEC)
