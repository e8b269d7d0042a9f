"""Where a vLLM and the learner part: whole runs, parts on equal inputs, and the learner with parts of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from decoder_parts import (
    LINEAR,
    NORMS,
    PATHS,
    STREAMS,
    Calls,
    LearnerParts,
    Parts,
    Rows,
    VllmParts,
    compared,
    equal_share,
    input_codes,
    method_of,
    pooled,
    vllm_codes,
    walk_policy,
)
from torch import Tensor
from vllm_capture import Run
from vllm_subject import Subject, gap

from lqrl.algorithms.logprobs import head_logits
from lqrl.modeling.backbone import hidden_states, pack
from lqrl.modeling.head import output_head

SWAPS = {
    "norms": NORMS,
    "rotary": ("rotary",),
    "linear layers": tuple(LINEAR),
    "activation": ("activation",),
    "attention": ("attention",),
}
"""What is taken from vLLM together."""
EVERY = tuple(part for parts in SWAPS.values() for part in parts)


class Comparison:
    """The aligned learner beside what vLLM did with the same tokens; each table is a list of rows."""

    def __init__(self, subject: Subject) -> None:
        self._policy, self._first, self._start = subject.policy, subject.setting.first, subject.start
        self._ids, self._logprobs, self._runs = subject.capture()
        self._fed = self._ids[:, :-1]
        self._depth = len(subject.policy.get_decoder().layers)  # type: ignore[arg-type]
        self._last = self._depth, "final norm"
        lengths = [self._fed.shape[1]] * len(self._fed)
        self._learner = LearnerParts(subject.policy, lengths, subject.engine.arithmetic)
        self._vllm = VllmParts(subject.model(), subject.vllm_config())
        self._own = self._walk(self._learner)

    @torch.no_grad()
    def _walk(self, parts: Parts) -> Calls:
        positions = torch.arange(self._fed.shape[1], device=self._fed.device).repeat(len(self._fed))
        return walk_policy(self._policy, parts, self._fed.flatten(), positions)

    def _rows(self, x: Tensor, before: int = 0) -> Tensor:
        """Rows of the sampled tokens, and of ``before`` tokens before the first."""
        return x.unflatten(0, (len(self._fed), -1))[:, self._start - before :].flatten(0, 1)

    # ---------------------------------------------------------------- whole runs

    @torch.no_grad()
    def layers(self) -> list[dict[str, Any]]:
        """The stream after each layer, run against run; and the codes of the input that the layer's qkv has."""
        prefill, decode = self._runs["prefill"].calls, self._runs["decode"].calls
        rows: list[dict[str, Any]] = []
        for layer in range(self._depth):
            ours, whole, step = (self._stream(calls, layer) for calls in (self._own, prefill, decode))
            pairs = {"prefill": (ours, whole), "decode": (ours, step), "own": (step, whole)}
            rows.append({"layer": layer, "codes": self._codes(layer, "qkv", decode)})
            rows[-1] |= {name: compared(*pair) for name, pair in pairs.items()}
        return rows

    def _stream(self, calls: Calls, layer: int) -> Tensor:
        part = "final norm" if layer + 1 == self._depth else "input norm"
        return self._rows(calls[layer + 1, part].outputs[1])

    def _codes(self, layer: int, part: str, calls: Calls) -> float | None:
        """Share of equal codes of a linear part's input, the learner's run against vLLM's."""
        method = method_of(self._policy, layer, part)
        if method is None or not calls[layer, part].inputs:
            return None
        ours, theirs = (self._rows(each[layer, part].inputs[0]) for each in (self._own, calls))
        return equal_share(input_codes(method, ours), input_codes(method, theirs))

    @torch.no_grad()
    def inside(self) -> list[dict[str, Any]]:
        """Outputs of the parts of the first layers, the learner's run against vLLM's one pass."""
        calls = self._runs["prefill"].calls
        return [
            {"layer": layer, "part": part, "codes": self._codes(layer, part, calls)}
            | compared(self._rows(self._own[layer, part].outputs[0]), self._rows(calls[layer, part].outputs[0]))
            for layer in range(min(self._first, self._depth))
            for part in PATHS
            if (layer, part) in calls
        ]

    # ---------------------------------------------------------------- parts on equal inputs

    @torch.no_grad()
    def alone(self) -> list[dict[str, Any]]:
        """Each part of the learner on the inputs that vLLM's had: what it alone does differently."""
        rows = []
        for name, run in self._runs.items():
            found: dict[str, list[dict[str, Any]]] = {}
            for layer, part in sorted(run.calls, key=lambda key: (list(PATHS).index(key[1]), key[0])):
                for what, row in self._alone(layer, part, *run.calls[layer, part]):
                    found.setdefault(what, []).append(row)
            rows += [{"run": name, "part": what, **_over_layers(each)} for what, each in found.items()]
            for part, rounded in (("head", False), ("head, rounded", True)):
                rows.append({"run": name, "part": part, **self._head(run, rounded)})
        return rows

    def _alone(self, layer: int, part: str, inputs: Rows, outputs: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
        if not inputs:  # the part before has made codes of them
            return
        if part in STREAMS:
            stream = outputs[1]
            if len(inputs) > 1:
                yield f"add before {part}", compared(self._rows(inputs[1] + inputs[0]), self._rows(stream))
            outputs = outputs[:1]
        ours = self._learner(layer, part, *inputs)
        row: dict[str, Any] = pooled(
            [compared(self._rows(a), self._rows(b)) for a, b in zip(ours, outputs, strict=part not in STREAMS)]
        )
        method = method_of(self._policy, layer, part)
        if method is not None:
            try:
                row["codes"] = equal_share(input_codes(method, inputs[0]), vllm_codes(method, inputs[0]))
            except (RuntimeError, ImportError, AttributeError, TypeError, NotImplementedError) as error:
                row["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        yield part, row

    def _head(self, run: Run, rounded: bool) -> dict[str, Any]:
        """Of logits; ``logprob`` is the mean difference of the most likely token's log-prob."""
        ours, theirs = self._logits(run.head.inputs[0], rounded), run.head.outputs[0].float()
        best = theirs.argmax(-1, keepdim=True)
        both = [torch.log_softmax(each, -1).gather(-1, best) for each in (ours, theirs)]
        return _over_layers([compared(ours, theirs)]) | {"logprob": gap(*both)["mean"]}

    def _logits(self, hidden: Tensor, rounded: bool = False) -> Tensor:
        head = output_head(self._policy, rounds_logits=rounded)
        return head_logits(hidden, head.weight) if head.product is None else head.product(hidden)

    # ---------------------------------------------------------------- the learner with parts of vLLM's

    @torch.no_grad()
    def swaps(self) -> list[dict[str, Any]]:
        """The learner with parts of vLLM's, against the log-probs that tokens were sampled with.

        vLLM's modules compute with what the learner gives them; only attention, which needs vLLM's cache, gives what it
        gave in vLLM's own pass.
        """
        whole, decoded = (self._runs[name].calls[self._last].outputs[0] for name in ("prefill", "decode"))
        own = self._own[self._last].outputs[0]
        rows = [self._swap("nothing", lambda: own) | {"forward_equal": self._walks_alike()}]
        for name, parts in SWAPS.items():
            rows.append(self._swap(name, lambda parts=parts: self._mixed(parts)))
        rows.append(self._swap("head", lambda: own, their_head=True))
        rows.append(self._swap("all but the head", lambda: self._mixed(EVERY)))
        for name in ("attention", "linear layers"):
            rest = tuple(part for part in EVERY if part not in SWAPS[name])
            rows.append(self._swap(f"all but {name}", lambda parts=rest: self._mixed(parts), their_head=True))
        rows.append(self._swap("vLLM in one pass, the learner's head", lambda: whole))
        rows.append(self._swap("vLLM in one pass", lambda: whole, their_head=True))
        rows.append(self._swap("vLLM decoding, the learner's head", lambda: decoded))
        return [*rows, self._swap("vLLM decoding", lambda: decoded, their_head=True)]

    def _mixed(self, parts: tuple[str, ...]) -> Tensor:
        """Last hidden states of the learner with ``parts`` of vLLM's."""
        calls = self._runs["prefill"].calls

        def call(layer: int, part: str, *given: Tensor) -> Rows:
            if part not in parts:
                return self._learner(layer, part, *given)
            return calls[layer, part].outputs if part == "attention" else self._vllm(layer, part, *given)

        return self._walk(call)[self._last].outputs[0]

    def _swap(self, name: str, hidden: Callable[[], Tensor], their_head: bool = False) -> dict[str, Any]:
        try:
            last = hidden()
            rows = self._rows(last, before=1)
            logits = self._vllm.logits(rows) if their_head else self._logits(rows)
        except Exception as error:  # a module of vLLM that needs more than its input
            return {"swap": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        targets = self._ids[:, self._start :].flatten()
        ours = torch.log_softmax(logits.float(), -1).gather(-1, targets[:, None])
        whole = self._runs["prefill"].calls[self._last].outputs[0]
        hidden_row = compared(self._rows(last), self._rows(whole))
        return {"swap": name, "hidden": hidden_row, **gap(ours.flatten().cpu(), self._logprobs.flatten())}

    def _walks_alike(self) -> float:
        """Share of equal elements: the learner part by part, against its forward pass."""
        packed = pack(self._fed, torch.ones_like(self._fed, dtype=torch.bool))
        return compared(self._own[self._last].outputs[0], hidden_states(self._policy, packed))["equal"]


def _over_layers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows of one part in all layers as one."""
    codes = [row["codes"] for row in rows if row.get("codes") is not None]
    notes = [row["note"] for row in rows if "note" in row]
    return {
        "layers": len(rows),
        "layers_equal": sum(row["equal"] == 1 for row in rows),
        "codes": sum(codes) / len(codes) if codes else None,
        "by_layer": [row["relative"] for row in rows],
        **({"note": notes[0]} if notes else {}),
        **pooled(rows),
    }
