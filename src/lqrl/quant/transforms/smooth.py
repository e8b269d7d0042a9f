"""SmoothQuant: move the outliers of activation channels into the weights that read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lqrl.quant.transforms.base import InvariantTransform
from lqrl.quant.transforms.structure import NormSite, linear_in, norm_sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lqrl.modeling.backbone import AttentionShape

_SITE, _PAIR = "smooth_scale", "smooth_pair_scale"  # buffers of a block: the factors that unfold_ needs
_RANDOM_SEQUENCES, _RANDOM_TOKENS = 8, 64
_PACKED = "SmoothQuant runs packed tokens: load the model with lqrl.modeling.backbone.load_model"
# With anything else in a block its values or its up projection may not reach the last layer linearly.
_LINEAR_PATH = {
    "self_attn": frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}),
    "mlp": frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"}),
}


@dataclass(frozen=True)
class SmoothQuant(InvariantTransform):
    """Scale each input channel of a linear layer down and its weights up: ``W x = (W diag(s)) (x / s)``.

    SmoothQuant (arXiv 2211.10438, eq. 4): ``s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)``; a larger ``alpha`` moves
    more of the difficulty from the activations into the weights. ``1 / s`` goes into the gain of the norm before
    (q, k, v share one ``s``, gate and up another) and, with ``pairs``, into the rows of v_proj before o_proj (one
    factor for a channel of a key/value head, the largest that its query heads ask for) and of up_proj before
    down_proj; the biases of v and up are divided too. Both are exact: attention is linear in the values, the MLP in
    ``up``.

    What differs: each ``s`` is divided by its geometric mean, since a common factor changes no code but would act on
    the learning rate as UAQ does; ``pairs`` is ours. Under Adam the relative update of a column becomes ``1 / s_j`` of
    what it was. A channel that is zero in the calibration or in the weights keeps its scale. The arithmetic is fp64,
    rounded once to the parameter's dtype.

    Attributes:
        alpha: the paper's 0.5 suits most models.
        tokens: token ids of the calibration sequences; ``None`` takes 8 sequences of 64 uniformly random tokens, which
            need no data and find the channels that are large whatever the input.
        pairs: also smooth the inputs of o_proj and down_proj.
        seed: of the random tokens.

    Raises:
        ValueError: when ``alpha`` is not in [0, 1], or ``tokens`` holds no sequence or an empty one.
    """

    alpha: float = 0.5
    tokens: tuple[tuple[int, ...], ...] | None = None
    pairs: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"SmoothQuant's alpha must lie in [0, 1], got {self.alpha}; 0.5 is the published value")
        if self.tokens is not None:
            object.__setattr__(self, "tokens", tuple(tuple(row) for row in self.tokens))
            if not self.tokens or not all(self.tokens):
                raise ValueError("SmoothQuant.tokens must hold sequences of token ids, or be None for random ones")

    @torch.no_grad()
    def fold_(self, model: PreTrainedModel) -> int:
        """See `InvariantTransform.fold_`; runs the calibration tokens through the model as it is.

        Raises:
            ValueError: as there; when the model is smoothed already; as `activation_amax`.
        """
        if is_smoothed(model):
            raise ValueError("the model is smoothed already; unfold_ it first")
        sites = norm_sites(model)
        pairs = _pairs(model, sites) if self.pairs else []
        amax = activation_amax(model, self._batches(model))
        # Every scale is known before anything is written.
        site_scales = [_smooth_scale(amax[next(iter(s.readers))], s.readers.values(), self.alpha) for s in sites]
        pair_scales = [pair.scale(amax[pair.name], self.alpha) for pair in pairs]
        for site, scale in zip(sites, site_scales, strict=True):
            _rescale_site_(site, scale)
            model.get_submodule(site.block).register_buffer(_SITE, scale, persistent=False)
        for pair, scale in zip(pairs, pair_scales, strict=True):
            pair.rescale_(scale)
            model.get_submodule(pair.block).register_buffer(_PAIR, scale, persistent=False)
        return sum(len(site.readers) for site in sites) + len(pairs)

    @torch.no_grad()
    def unfold_(self, model: PreTrainedModel) -> int:
        """See `InvariantTransform.unfold_`; the scales are those that `fold_` left on the model.

        Raises:
            ValueError: when the model is not smoothed, or was smoothed with the other ``pairs``.
        """
        sites = norm_sites(model)
        pairs = _pairs(model, sites) if self.pairs else []
        buffers = dict(model.named_buffers())
        held = {name for name in buffers if name.rpartition(".")[2] in (_SITE, _PAIR)}
        if held != {f"{s.block}.{_SITE}" for s in sites} | {f"{p.block}.{_PAIR}" for p in pairs}:
            raise ValueError(f"the model does not hold the scales of {self}: only a folded model can be unfolded")
        for pair in pairs:
            pair.rescale_(1.0 / buffers[f"{pair.block}.{_PAIR}"].double())
            delattr(model.get_submodule(pair.block), _PAIR)
        for site in sites:
            _rescale_site_(site, 1.0 / buffers[f"{site.block}.{_SITE}"].double())
            delattr(model.get_submodule(site.block), _SITE)
        return sum(len(site.readers) for site in sites) + len(pairs)

    def _batches(self, model: PreTrainedModel) -> list[Tensor]:
        if self.tokens is not None:
            return [torch.tensor([row]) for row in self.tokens]
        config = model.config.get_text_config(decoder=True)
        length = min(_RANDOM_TOKENS, int(config.max_position_embeddings))
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(config.vocab_size, (_RANDOM_SEQUENCES, length), generator=generator)]


def is_smoothed(model: nn.Module) -> bool:
    """Whether `SmoothQuant` is folded into ``model``."""
    return any(name.rpartition(".")[2] == _SITE for name, _ in model.named_buffers())


@torch.no_grad()
def activation_amax(model: PreTrainedModel, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Largest absolute input of every linear layer of the decoder, per channel, over all tokens.

    Args:
        model: loaded by `lqrl.modeling.backbone.load_model`; runs as it is, prepared or not.
        batches: token ids ``[B, T]`` without padding.

    Returns:
        ``[K]`` fp32 by the layer's full name; the output head is not part of the decoder.

    Raises:
        ValueError: without a batch, without the packed attention, or when a layer saw NaN or inf.
    """
    from lqrl.modeling.backbone import attention_shapes, hidden_states, pack  # which imports this package
    from lqrl.modeling.mode import in_mode

    if not attention_shapes(model):
        raise ValueError(_PACKED)
    amax: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        seen = args[0].detach().abs().flatten(0, -2).amax(0).float()
        amax[name] = torch.maximum(amax[name], seen) if name in amax else seen

    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_pre_hook(partial(note, name)) for name, module in linears]
    try:
        with in_mode(model, training=False):
            for batch in batches:
                batch = batch.to(model.device)
                hidden_states(model, pack(batch, torch.ones_like(batch)))
    finally:
        for handle in handles:
            handle.remove()
    if not amax:
        raise ValueError("calibration saw no tokens; pass at least one batch of token ids")
    broken = [name for name, value in amax.items() if not bool(value.isfinite().all())]
    if broken:
        raise ValueError(f"{broken[0]} reads NaN or inf in the calibration; the model or its dtype is at fault")
    return amax


@dataclass(frozen=True)
class _Pair:
    """``second`` reads the output of ``first`` through something linear in it.

    Attributes:
        block: full name of the block that holds both.
        name: full name of ``second``.
        first, second: the linear layers.
        heads: key/value heads, query heads that share one, channels of a head; ``(1, 1, channels)`` in an MLP.
    """

    block: str
    name: str
    first: nn.Linear
    second: nn.Linear
    heads: tuple[int, int, int]

    def scale(self, amax: Tensor, alpha: float) -> Tensor:
        """One factor for each output channel of ``first``, from the inputs of ``second``."""
        kv_heads, group, width = self.heads
        shared = amax.view(kv_heads, group, width).amax(1).flatten()
        columns = _column_amax([self.second]).view(kv_heads, group, width).amax(1).flatten()
        return _scale(shared, columns, alpha)

    def rescale_(self, scale: Tensor) -> None:
        """Divide the rows of ``first`` and multiply the columns of ``second``."""
        _, group, width = self.heads
        _multiply_(self.first.weight, 1.0 / scale[:, None])
        if self.first.bias is not None:
            _multiply_(self.first.bias, 1.0 / scale)
        _multiply_(self.second.weight, scale.view(-1, 1, width).expand(-1, group, width).flatten())


def _pairs(model: PreTrainedModel, sites: list[NormSite]) -> list[_Pair]:
    from lqrl.modeling.backbone import attention_shapes

    shapes = attention_shapes(model)
    pairs = []
    for i, site in enumerate(sites):
        kind = site.block.rpartition(".")[2]
        others = {name for name, _ in model.get_submodule(site.block).named_children()} - _LINEAR_PATH[kind]
        if others:
            raise ValueError(f"{site.block} holds {sorted(others)}: its pairs may not be linear; set pairs=False")
        first = linear_in(model, site.block, "v_proj" if kind == "self_attn" else "up_proj")
        name = "o_proj" if kind == "self_attn" else "down_proj"
        second = linear_in(model, site.block, name)
        heads = _heads(shapes, i // 2, first, second) if kind == "self_attn" else (1, 1, first.out_features)
        pairs.append(_Pair(site.block, f"{site.block}.{name}", first, second, heads))
    return pairs


def _heads(shapes: dict[int, AttentionShape], layer: int, first: nn.Linear, second: nn.Linear) -> tuple[int, int, int]:
    if layer not in shapes:
        raise ValueError(
            "SmoothQuant needs the packed attention: load the model with lqrl.modeling.backbone.load_model"
        )
    kv_heads, width = shapes[layer].kv_heads, shapes[layer].value_width
    group = second.in_features // (kv_heads * width)
    if first.out_features != kv_heads * width or second.in_features != group * first.out_features:
        raise ValueError(
            f"layer {layer}: {first.out_features} rows of v_proj and {second.in_features} columns of o_proj do not "
            f"follow {kv_heads} heads of width {width}; set pairs=False"
        )
    return kv_heads, group, width


def _smooth_scale(amax: Tensor, readers: Iterable[nn.Linear], alpha: float) -> Tensor:
    return _scale(amax, _column_amax(readers), alpha)


def _column_amax(linears: Iterable[nn.Linear]) -> Tensor:
    return torch.stack([linear.weight.detach().abs().amax(0) for linear in linears]).amax(0)


def _scale(activations: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Eq. 4 in fp64 with geometric mean 1; 1 where a channel of either side is zero."""
    x, w = activations.double(), weights.double()
    live = (x > 0) & (w > 0)
    log = torch.where(live, alpha * x.log() - (1.0 - alpha) * w.log(), 0.0)
    mean = log.sum() / live.sum().clamp_min(1)
    return torch.where(live, (log - mean).exp(), 1.0)


def _rescale_site_(site: NormSite, scale: Tensor) -> None:
    site.set_gain_(site.gain() / scale)
    for linear in site.readers.values():
        _multiply_(linear.weight, scale)


def _multiply_(parameter: Tensor, factor: Tensor) -> None:
    parameter.copy_(parameter.detach().double() * factor)
