"""What the modules of a vLLM in this process were given and gave, for known sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from decoder_parts import PATHS, Call, Calls, Rows, as_rows
from torch import Tensor, nn

Step = tuple[list[int], list[int]]
"""Tokens and positions of the rows of one forward pass."""


class Run(NamedTuple):
    """A capture, its rows sequence by sequence.

    Attributes:
        calls: what every part was given and gave. Inputs are missing where vLLM fuses a part with the one before.
        lengths: tokens of each sequence that were fed.
        head: hidden states and logits of the sampled tokens, in the order of the passes.
    """

    calls: Calls
    lengths: list[int]
    head: Call


class Recorder:
    """Keeps what passes the parts of vLLM's decoder; see `recording`."""

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._pieces: dict[tuple[int, str], list[Call]] = {}
        self._pending: dict[str, Rows] = {}
        self._layer = -1

    def step(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model: which tokens, and where."""
        given = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        self._steps.append((given["input_ids"].clone(), given["positions"].clone()))

    def enter(self, layer: int) -> None:
        """Before a layer."""
        self._layer = layer

    def before(self, part: str, given: tuple[Any, ...]) -> None:
        """Before a part, which may write where it reads."""
        self._pending[part] = tuple(x.detach().clone() for x in given if isinstance(x, Tensor))

    def after(self, part: str, layer: int | None, output: Any) -> None:
        """After a part of ``layer``, or of the one that was entered last."""
        given = self._pending.pop(part)
        outputs = tuple(x.detach().clone() for x in as_rows(part, given, output))
        self._pieces.setdefault((self._layer if layer is None else layer, part), []).append(Call(given, outputs))

    def run(self, sequences: Sequence[Sequence[int]]) -> Run:
        """What was kept, when ``sequences`` are what was fed.

        Raises:
            RuntimeError: see `rows_of`.
        """
        steps = [(ids.tolist(), positions.tolist()) for ids, positions in self._steps]
        index, lengths = rows_of(steps, sequences)
        joined = {key: _joined(pieces) for key, pieces in self._pieces.items()}
        head = joined.pop((-1, "head"))
        place = torch.tensor(index, device=head.inputs[0].device)
        return Run({key: Call(*(_picked(rows, place) for rows in call)) for key, call in joined.items()}, lengths, head)


def _joined(pieces: Sequence[Call]) -> Call:
    inputs, outputs = (zip(*rows, strict=True) for rows in zip(*pieces, strict=True))
    return Call(tuple(map(torch.cat, inputs)), tuple(map(torch.cat, outputs)))


def _picked(rows: Rows, place: Tensor) -> Rows:
    return tuple(x[place] for x in rows)


def rows_of(steps: Sequence[Step], sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Which row of which pass is which token.

    In each pass the rows of a sequence follow each other, and sequences come in their order; rows that fit none are
    vLLM's padding.

    Args:
        steps: the passes.
        sequences: all tokens of each sequence.

    Returns:
        Rows, counted over all passes, sequence by sequence; and how many each has.

    Raises:
        RuntimeError: when a token, other than the last of a sequence, is nowhere.
    """
    found: list[list[int]] = [[] for _ in sequences]
    start = 0
    for ids, positions in steps:
        at = 0
        for rows, tokens in zip(found, sequences, strict=True):
            seek = at  # rows that a sequence skips belong to none
            while seek < len(ids) and (positions[seek] != len(rows) or _token(tokens, len(rows)) != ids[seek]):
                seek += 1
            if seek == len(ids):
                continue
            at = seek
            while at < len(ids) and positions[at] == len(rows) and _token(tokens, len(rows)) == ids[at]:
                rows.append(start + at)
                at += 1
        start += len(ids)
    short = [i for i, (rows, tokens) in enumerate(zip(found, sequences, strict=True)) if len(rows) < len(tokens) - 1]
    if short:
        raise RuntimeError(f"vLLM's passes do not hold sequence {short[0]} in the order it was asked for")
    return [row for rows in found for row in rows], [len(rows) for rows in found]


def _token(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record what passes the parts of vLLM's ``model``, in eager mode.

    Raises:
        RuntimeError: for a model whose decoder is called otherwise.
    """
    recorder = Recorder()
    handles: list[Any] = [model.register_forward_pre_hook(recorder.step, with_kwargs=True)]

    def watch(module: nn.Module, part: str, layer: int | None) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorder.before(part, (*args, *kwargs.values()))

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            recorder.after(part, layer, output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    try:
        layers, norm, head = _whole(model)
        watched: set[int] = set()
        for i, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(lambda *_, i=i: recorder.enter(i)))
            modules = dict(layer.named_modules(remove_duplicate=False))
            for part, path in PATHS.items():
                if path in modules and id(modules[path]) not in watched:  # layers may share their rotary module
                    watched.add(id(modules[path]))
                    watch(modules[path], part, None)
        watch(norm, "final norm", len(layers))
        watch(head, "head", -1)
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def _whole(model: nn.Module) -> tuple[list[nn.Module], nn.Module, nn.Module]:
    """Layers, the norm after them, and what makes logits."""
    try:
        decoder = model.get_submodule("model")
        layers = list(decoder.get_submodule("layers").children())
        return layers, decoder.get_submodule(PATHS["final norm"]), model.get_submodule("logits_processor")
    except AttributeError as error:
        raise RuntimeError(f"{type(model).__name__} is no decoder of the parts that are compared: {error}") from error
