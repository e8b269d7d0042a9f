"""HTTP servers in this process that speak as vLLM's do, and fail as real ones can: the other side of the engine."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lqrl.engines.base import RefreshError
from lqrl.engines.digest import digest
from lqrl.engines.vllm.served import ServedModel, described
from lqrl.engines.vllm.transfer import read_weights, this_machine

Answer = tuple[int, Any]

PATIENCE = 60
"""Seconds for what cannot fail to come; a machine may be slow."""


def sampled(seed: int, count: int) -> list[int]:
    """What a peer draws."""
    return [4 + (seed >> 3 * i) % 50 for i in range(count)]


def loading(peer: VLLMPeer) -> bool:
    """Whether it has been told that its weights are no version."""
    return str(peer.version).startswith("none-")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away before its answer is no fault."""


class VLLMPeer:
    """One server. Its attributes may be set while it runs.

    Attributes:
        asked: how often each route and each method of its worker was asked.
        paths: what was asked with a query.
        before: called with the route of every request, ahead of the answer; a status and an answer of its own go out
            instead, for a negative status the connection is cut.
        version: what ``/weight_info`` says; ``None`` is a vLLM without that route.
        stamped: the version that its worker knows.
        held: digest of the weights that came last.
        load_result: changes what ``lqrl_load`` says.
        keeps_prefixes, says_nan: faults of a refresh.
        says: called with the body of every completion; how many of its tokens there are before it waits to be cut off.
            It need not return at once.
        key: what it wants to be told on the routes of OpenAI's API; nothing when it is empty.
        answers: what is said on a route, or by a method of its worker, instead of its own answer.
        bodies: of the completions that were asked.
    """

    def __init__(self, model: ServedModel | None = None, port: int = 0, **facts: Any) -> None:
        self.asked: Counter[str] = Counter()
        self.paths: list[str] = []
        self.before: Callable[[str], Answer | None] = lambda route: None
        self.version: str | None = "default"
        self.stamped = ""
        self.held = ""
        self.load_result: dict[str, Any] = {}
        self.keeps_prefixes = self.says_nan = self.paused = False
        self.says: Callable[[Any], int] = lambda body: body["max_tokens"]
        self.key = ""
        self.answers: dict[str, Any] = {}
        self.bodies: list[Any] = []
        self._cuts = 0
        self._lock, self._dead = threading.Lock(), False
        self._changed = threading.Condition()  # it was paused, resumed, or died
        self._closed = threading.Event()
        self.facts = {
            "vllm": "0.32.0",
            "machine": this_machine(),
            "platform": "cuda",
            "capability": [9, 0],
            "max_model_len": 64,
            "served": ({} if model is None else described(model.config))
            | {
                "dtype": "torch.float32",
                "kv_cache_dtype": "auto",
                "logprobs_mode": "processed_logprobs",
                "generation_config": "vllm",
                "data_parallel_size": 1,
                "speculative": False,
                "quantization": None,
            }
            | facts.pop("served", {}),
        } | facts
        self._server = _Server(("127.0.0.1", port), self._handler())
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        """Answer nobody any more, those who wait included."""
        with self._changed:
            self._dead = True
            self._changed.notify_all()
        threading.Thread(target=self.close).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._closed.set()

    def gone(self) -> None:
        """Wait until nothing listens on its port."""
        assert self._closed.wait(PATIENCE)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._dead or condition(), PATIENCE)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._reply(json.loads(data) if data else None)

            def _reply(self, body: Any) -> None:
                route = self.path.partition("?")[0]
                with peer._lock:
                    peer.asked[route] += 1
                    peer.paths += [self.path] if "?" in self.path else []
                status, answer = peer.before(route) or peer._answer(route, body)
                if peer.key and route.startswith("/v1") and self.headers["Authorization"] != f"Bearer {peer.key}":
                    status, answer = 401, {"error": "Unauthorized"}
                if status < 0 or peer._dead:
                    self.close_connection = True
                    return
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def _answer(self, route: str, body: Any) -> Answer:
        if route in self.answers:
            return 200, self.answers[route]
        if route == "/health":
            return 200, b""
        if route == "/v1/models":
            return 200, {"data": []}
        if route == "/weight_info" and self.version is not None:
            return 200, {"weight_version": self.version}
        if route == "/update_weight_version" and self.version is not None:
            self.version = body["new_version"]
            return 200, {"success": True}
        if route in ("/pause", "/resume"):
            with self._changed:
                self.paused = route == "/pause"
                self._cuts += self.paused
                self._changed.notify_all()
            return 200, {"status": route}
        if route == "/reset_prefix_cache":
            return 200, {"success": not self.keeps_prefixes}
        if route == "/collective_rpc":
            return 200, {"results": [self._worker(body["method"], *body["args"])]}
        if route == "/v1/completions":
            self._wait(lambda: not self.paused)
            return 200, self._completion(body)
        return 404, {"detail": "Not Found"}

    def _worker(self, method: str, *args: str) -> Any:
        self.asked[method] += 1
        if method in self.answers:
            return self.answers[method]
        if method == "lqrl_facts":
            return self.facts
        if method == "lqrl_seal" and self.stamped == args[0]:
            self.stamped = args[1]
        if method in ("lqrl_seal", "lqrl_version"):
            return {"version": self.stamped}
        assert method == "lqrl_load"
        self.stamped = args[1]
        try:
            self.held = digest(read_weights(Path(args[0])))
        except RefreshError as error:
            return {"error": str(error), "broken": False}
        return {"missed": [], "moved": [], "digest": self.held} | self.load_result

    def _completion(self, body: Any) -> Any:
        self.bodies.append(body)
        tokens = sampled(body.get("seed", 0), body["max_tokens"])[: self.says(body)]
        finish = "length"
        if len(tokens) < body["max_tokens"]:
            finish, cuts = "abort", self._cuts
            self._wait(lambda: self._cuts > cuts)
        logprob = -9999.0 if self.says_nan else -0.5
        return {
            "choices": [
                {
                    "finish_reason": finish,
                    "prompt_token_ids": body["prompt"],
                    "token_ids": tokens,
                    "logprobs": {
                        "token_logprobs": [logprob] * len(tokens),
                        "top_logprobs": [{"token_id:4": logprob, "token_id:5": -3.0}] * len(tokens),
                    },
                    "prompt_logprobs": [None, *({str(t): {"logprob": -0.25 * t}} for t in body["prompt"][1:])],
                }
            ]
        }
