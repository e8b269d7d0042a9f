"""Where engine and learner part: the first module whose output differs for the same token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lqrl.engines.slots import DecodeContext, PrefillContext, SlotCache
from lqrl.engines.torch import TorchEngine
from lqrl.learner.scorer import Scorer
from lqrl.modeling.attention import AttentionContext
from lqrl.quant.kv import kv_method, kv_scales
from lqrl.types import Prompt, SamplingParams, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = " input"  # what the output projection reads is what attention gives
_HEAD = "output head"


@dataclass(frozen=True)
class Divergence:
    """Two runs of one policy on the same tokens.

    Attributes:
        module: name of the first module, in the order of the forward pass, whose outputs differ; ``output head`` where
            only the log-probs do.
        layer: its layer; ``None`` outside of one.
        prompt_id: prompt of the first token that differs there.
        position: place of that token in prompt and completion.
        max_abs: largest difference of that module's outputs.
        by_layer: largest difference of the hidden states after each layer, relative to their root mean square.
        logprobs_differ: sampled tokens whose log-probs differ, as bits.
        logprobs_max_abs: the largest of these differences.
        tokens: sampled tokens that were compared.
    """

    module: str
    layer: int | None
    prompt_id: int
    position: int
    max_abs: float
    by_layer: tuple[float, ...]
    logprobs_differ: int
    logprobs_max_abs: float
    tokens: int

    def __str__(self) -> str:
        layers = " ".join(f"{i}:{d:.1e}" for i, d in enumerate(self.by_layer))
        again = " (decoded again, every module gives the learner's output)" if self.module == _HEAD else ""
        return (
            f"engine and learner part at {self.module}{again}, prompt {self.prompt_id}, position {self.position}, by "
            f"at most {self.max_abs:.2e}; after each layer, relative: {layers}; {self.logprobs_differ} of "
            f"{self.tokens} log-probs differ, by at most {self.logprobs_max_abs:.2e}"
        )


@dataclass(frozen=True)
class SampledRow:
    """A prompt with one of its completions.

    Attributes:
        prompt_id: see `Prompt`.
        prompt_length: tokens of the prompt.
        tokens: of prompt and completion.
        logprobs: ``[L]`` fp32 on the host, the engine's for the completion, before top-k and top-p.
    """

    prompt_id: int
    prompt_length: int
    tokens: list[int]
    logprobs: Tensor


def rows_apart(batch: TrainBatch, apart: Tensor, most: int) -> list[SampledRow]:
    """The rows with the earliest tokens of ``apart``, each cut behind its first: what follows changes nothing there.

    Args:
        batch: with ``prompt_ids``. What lies before a row's first trained token is taken for its prompt.
        apart: ``[B, T]`` bool, tokens whose log-probs differ.
        most: rows to return.
    """
    apart, behavior = apart.cpu(), batch.behavior_logprobs.cpu()
    starts, stops = batch.loss_mask.int().argmax(1).tolist(), (apart.int().argmax(1) + 1).tolist()
    found = sorted(apart.any(1).nonzero().flatten().tolist(), key=lambda i: stops[i])[:most]
    assert batch.prompt_ids is not None
    ids, prompts = batch.input_ids.tolist(), batch.prompt_ids.tolist()
    return [SampledRow(prompts[i], starts[i], ids[i][: stops[i]], behavior[i, starts[i] : stops[i]]) for i in found]


def first_divergence(
    scorer: Scorer, engine: TorchEngine, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int = 0
) -> Divergence | None:
    """Generate with ``engine``, then `divergence_of` what it sampled.

    Args:
        scorer: the learner, with the temperature and cache rounding of its rollouts.
        engine: refreshed from the same weights.
        prompts: what to complete.
        params: sampling settings.
        seed: of the draw.

    Returns:
        ``None`` when every output and every log-prob is equal as bits.

    Example:
        >>> print(first_divergence(scorer, engine, prompts, SamplingParams(max_tokens=16)))  # doctest: +SKIP
    """
    groups = engine.generate(prompts, params, seed=seed)
    rows = [
        SampledRow(p.id, len(p.input_ids), [*p.input_ids, *c.token_ids.tolist()], c.logprobs + c.log_mass)
        for p, group in zip(prompts, groups, strict=True)
        for c in group
    ]
    return divergence_of(scorer, engine, rows)


@torch.no_grad()
def divergence_of(scorer: Scorer, engine: TorchEngine, rows: Sequence[SampledRow]) -> Divergence | None:
    """Run the engine's decoder and the learner on sampled tokens again, and compare module by module.

    The decoder is fed the tokens one by one, through a cache of its own, so that every module's output can be kept; the
    learner runs one forward pass. Keep the rows few: all outputs are held in memory.

    Args:
        scorer: the learner, with the temperature and cache rounding of its rollouts.
        engine: with the weights that it sampled with.
        rows: what it sampled.

    Returns:
        ``None`` when every output and every log-prob is equal as bits.

    Raises:
        ValueError: without rows, or when learner and engine are not one model in one dtype.
    """
    if not rows:
        raise ValueError("there is nothing to compare: give at least one prompt, or one sampled row")
    learner = _described(scorer.policy, scorer.compute_dtype)
    own = _described(engine.decoder.model, engine.spec.dtype)
    if learner != own:
        raise ValueError(
            f"the learner is {', '.join(learner)}, the engine {', '.join(own)}: build the engine from the learner's "
            "config and dtype"
        )
    rows = sorted(rows, key=lambda row: row.prompt_length - len(row.tokens))  # longest completions first
    length = max(len(row.tokens) for row in rows)
    ids, mask = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)], mask[i, : len(row.tokens)] = torch.tensor(row.tokens), True
    ids, mask = ids.to(engine.spec.device), mask.to(engine.spec.device)
    learned: dict[str, Tensor] = {}
    with _recording(scorer.policy, learned):
        scores = scorer.score(ids, mask)
    mask = mask.cpu()
    place = mask.flatten().nonzero().squeeze(1)
    fed = mask.clone()  # the engine never reads the last token of a sequence
    fed[torch.arange(len(rows)), mask.sum(1) - 1] = False
    kept = fed.flatten()[place]
    decoded = {name: torch.zeros(ids.numel(), x.shape[1], dtype=x.dtype) for name, x in learned.items()}
    _decode(engine, rows, ids, decoded)
    pairs = {name: (decoded[name][place[kept]], x[kept]) for name, x in learned.items()}
    return _compare(rows, pairs, scores.cpu(), place[kept] // length, place[kept] % length)


def _described(model: PreTrainedModel, dtype: torch.dtype) -> tuple[str, ...]:
    config: Any = model.config
    sizes = f"{config.num_hidden_layers} layers", f"{config.hidden_size} wide"
    return type(model).__name__, *sizes, str(dtype).removeprefix("torch.")


def _compare(
    rows: list[SampledRow], pairs: dict[str, tuple[Tensor, Tensor]], scores: Tensor, row_of: Tensor, position_of: Tensor
) -> Divergence | None:
    """Both sides' outputs of each module, ``[N, width]``, in the order of the forward pass."""
    differences = [(row.logprobs - scores[i, row.prompt_length : len(row.tokens)]).abs() for i, row in enumerate(rows)]
    logprobs = torch.cat(differences)
    layers = [pair for name, pair in pairs.items() if _parse(name)[1] == ""]
    found = next(((name, pair) for name, pair in pairs.items() if not torch.equal(*pair)), None)
    if found is None and not bool(logprobs.count_nonzero()):
        return None
    if found is None:
        i = next(i for i, d in enumerate(differences) if bool(d.count_nonzero()))
        module, prompt = _HEAD, rows[i].prompt_id
        position = rows[i].prompt_length + int(differences[i].nonzero()[0])
        largest = float(logprobs.max())
    else:
        module, (a, b) = found
        apart = (a != b).any(1).nonzero().squeeze(1)
        first = int(apart[position_of[apart].argmin()])
        prompt, position = rows[int(row_of[first])].prompt_id, int(position_of[first])
        largest = float((a.float() - b.float()).abs().max())
    return Divergence(
        module=module,
        layer=_parse(module)[0],
        prompt_id=prompt,
        position=position,
        max_abs=largest,
        by_layer=tuple(float((a.float() - b.float()).abs().max() / a.float().pow(2).mean().sqrt()) for a, b in layers),
        logprobs_differ=int(logprobs.count_nonzero()),
        logprobs_max_abs=float(logprobs.max()),
        tokens=len(logprobs),
    )


def _parse(name: str) -> tuple[int | None, str]:
    """Layer of a module, and the rest of its name."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return (None, name) if at is None else (int(parts[at]), ".".join(parts[at + 1 :]))


@contextmanager
def _recording(model: nn.Module, into: dict[str, Tensor]) -> Iterator[None]:
    """Keep the outputs ``[N, width]`` of every module that gives a row a token, by name, in the order of the calls."""

    def keep(name: str, value: Any) -> None:
        x = value[0] if isinstance(value, tuple) else value
        if isinstance(x, Tensor) and x.dim() > 2 and x.shape[0] == 1:
            into[name] = x.detach()[0].flatten(1).cpu().clone()

    handles = []
    for name, module in model.named_modules():
        if not name or name.endswith(("rotary_emb", "model")):
            continue
        if name.endswith(".o_proj"):
            handles.append(module.register_forward_pre_hook(lambda _, x, n=name: keep(n + _ATTENTION, x[0])))
        handles.append(module.register_forward_hook(lambda _, __, y, n=name: keep(n, y)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _decode(engine: TorchEngine, rows: list[SampledRow], ids: Tensor, into: dict[str, Tensor]) -> None:
    """Prefill every prompt and feed the sampled tokens; ``into`` gets the outputs by row and position."""
    decoder, spec, length = engine.decoder, engine.spec, ids.shape[1]
    shapes = [shape for _, shape in sorted(decoder.shapes.items())]
    method, scales = kv_method(spec.scheme), kv_scales(decoder.model, spec.scheme)
    cache = SlotCache(shapes, spec.dtype, spec.device, method, scales, spec.exact)
    cache.reserve(len(rows), length)
    lean, decoder.lean = decoder.lean, None  # the short cut gives the same bits, and no module's output
    try:
        prompts = [row.prompt_length for row in rows]
        made = [len(row.tokens) - n for row, n in zip(rows, prompts, strict=True)]
        prefill = PrefillContext(cache, prompts, list(range(len(rows))))
        slots = torch.arange(len(rows)).repeat_interleave(torch.tensor(prompts))
        _step(engine, ids, slots, prefill.position_ids, prefill, into)
        for step in range(max(made) - 1):
            live = sum(n > step + 1 for n in made)  # the first rows, which are the longest
            positions = torch.tensor([n + step for n in prompts[:live]], device=spec.device)
            context = DecodeContext(cache, positions, int(positions.max()) + 1, spec.dtype)
            _step(engine, ids, torch.arange(live), positions, context, into)
    finally:
        decoder.lean = lean


def _step(
    engine: TorchEngine, ids: Tensor, slots: Tensor, at: Tensor, context: AttentionContext, into: dict[str, Tensor]
) -> None:
    """Run the engine's decoder on the tokens at places ``at`` of rows ``slots``."""
    outputs: dict[str, Tensor] = {}
    with _recording(engine.decoder.model, outputs), torch.autocast(at.device.type, enabled=False):
        engine.decoder(ids[slots.to(at.device), at], at.clone(), context)
    for name, x in outputs.items():
        into[name][slots * ids.shape[1] + at.cpu()] = x.cpu()
