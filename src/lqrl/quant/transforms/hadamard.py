"""Rotation of the residual stream by a randomized Hadamard matrix (QuaRot, SpinQuant)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from lqrl.quant.transforms.base import InvariantTransform
from lqrl.quant.transforms.rotation import Rotation
from lqrl.quant.transforms.smooth import is_smoothed
from lqrl.quant.transforms.structure import NormSite, gain_offset, layer_names, norm_sites, writers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BUFFER = "absorbed_gain"  # of a norm: what unfold_ gives back
_CHUNK = 1 << 24  # elements that are held in fp64 at once


@dataclass(frozen=True)
class HadamardRotation(InvariantTransform):
    """Rotate the residual stream, so that no channel holds the outliers: every hidden state ``h`` becomes ``h Q``.

    QuaRot (arXiv 2404.00456, its offline part) and SpinQuant's R1 before learning (2405.16406): norm gains are
    absorbed into the layers that read the norm, the gains become 1, and RMSNorm without a gain commutes with an
    orthogonal ``Q``. Then the embedding and all layers that read the residual stream (q, k, v, gate, up, the output
    head) take ``W Q``, those that write to it (o, down, with their biases) ``Q^T W``. The result is an ordinary model
    of the same architecture and costs nothing at inference. The inputs of o_proj and down_proj are not rotated.

    ``Q`` is a diagonal of random signs times a Hadamard matrix; a hidden size ``2^p m`` with odd ``m > 1`` takes the
    Hadamard matrix of ``2^p`` times (Kronecker) a random orthogonal one of ``m``, where QuaRot has a table of known
    Hadamard matrices. The arithmetic is fp64, rounded once to the parameter's dtype.

    An output head that is tied to the embedding is untied, because only the head takes the final gain:
    ``config.tie_word_embeddings`` becomes false, the model gains the parameters of a head, and `unfold_` leaves it so.
    It must come before transforms that scale gains (``absorbs_gains``). `unfold_` after training absorbs what the
    gains have learned, rotates back, and takes the old gains out again.

    Attributes:
        seed: of signs and orthogonal factor.
    """

    absorbs_gains: ClassVar[bool] = True

    seed: int = 0

    @torch.no_grad()
    def fold_(self, model: PreTrainedModel) -> int:
        """See `InvariantTransform.fold_`.

        Raises:
            ValueError: as there; when the model is rotated or smoothed already.
            NotImplementedError: when a parameter that is not known reads or writes the residual stream.
        """
        if is_smoothed(model):
            raise ValueError("the rotation absorbs the norm gains and would undo SmoothQuant: rotate first")
        parts = _parts(model)
        if any(_BUFFER in dict(site.norm.named_buffers(recurse=False)) for site in parts.sites):
            raise ValueError("the model is rotated already; unfold_ it first")
        _untie(model)
        parts = _parts(model)
        rotation = Rotation.random(parts.embedding.embedding_dim, self.seed, model.device)
        for site in parts.sites:
            gain = site.gain()
            for linear in site.readers.values():
                _map_rows_(linear.weight, lambda rows, gain=gain: rotation.apply(rows * gain))
            site.set_gain_(torch.ones_like(gain))
            site.norm.register_buffer(_BUFFER, gain, persistent=False)
        for rows in parts.residual_rows():
            _map_rows_(rows, rotation.apply)
        return parts.linears

    @torch.no_grad()
    def unfold_(self, model: PreTrainedModel) -> int:
        """See `InvariantTransform.unfold_`.

        A channel whose gain was 0 comes back with gain 1 and weights 0, which is the same function.

        Raises:
            ValueError: when the model is not rotated.
        """
        parts = _parts(model)
        held = [dict(site.norm.named_buffers(recurse=False)).get(_BUFFER) for site in parts.sites]
        if any(gain is None for gain in held):
            raise ValueError("the model does not hold the gains that the rotation absorbed: only a folded one unfolds")
        rotation = Rotation.random(parts.embedding.embedding_dim, self.seed, model.device)
        for site, stored in zip(parts.sites, held, strict=True):
            assert stored is not None
            old = torch.where(stored == 0, 1.0, stored.double())
            now = site.gain()
            for linear in site.readers.values():
                _map_rows_(linear.weight, lambda r, now=now, old=old: rotation.apply_inverse(r * now) / old)
            site.set_gain_(old)
            delattr(site.norm, _BUFFER)
        for rows in parts.residual_rows():
            _map_rows_(rows, rotation.apply_inverse)
        return parts.linears


@dataclass(frozen=True)
class _Parts:
    """All that touches the residual stream."""

    embedding: nn.Embedding
    sites: list[NormSite]  # the final norm with the output head is the last
    writers: dict[str, nn.Linear]

    @property
    def linears(self) -> int:
        return sum(len(site.readers) for site in self.sites) + len(self.writers)

    def residual_rows(self) -> Iterator[Tensor]:
        """What holds residual vectors as rows: embeddings, the writers' transposed weights, their biases."""
        yield self.embedding.weight
        for linear in self.writers.values():
            yield linear.weight.t()
            if linear.bias is not None:
                yield linear.bias[None]


def _parts(model: PreTrainedModel) -> _Parts:
    sites, written = norm_sites(model), writers(model)
    decoder = layer_names(model)[0].rpartition(".")[0].rpartition(".")[0]
    modules = dict(model.named_modules())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    final = f"{decoder}.norm" if decoder else "norm"
    if final not in modules or not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise NotImplementedError(f"{type(model).__name__}: rotation needs an embedding, {final} and an output head")
    sites.append(NormSite(final, modules[final], gain_offset(final, modules[final]), decoder, {"output head": head}))
    known: list[nn.Module] = [embedding, *written.values()]
    for site in sites:
        known += [site.norm, *site.readers.values()]
    parameters = {id(p) for module in known for p in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        # Norms of queries and keys act inside a head and never see the residual stream.
        if id(parameter) not in parameters and name.split(".")[-2] not in ("q_norm", "k_norm"):
            raise NotImplementedError(
                f"{name} is not known to the rotation, which may change the model (norms after a block, as in Gemma 2, "
                f"cannot be rotated); leave HadamardRotation out for this architecture"
            )
    return _Parts(embedding, sites, written)


def _untie(model: PreTrainedModel) -> None:
    """Give the output head weights of its own, and say so in the config, from which engines are built."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    if head.weight is not embedding.weight:
        return
    head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=embedding.weight.requires_grad)
    model.config.tie_word_embeddings = False
    model.config.get_text_config(decoder=True).tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _map_rows_(weight: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Replace rows ``[N, H]`` by an fp64 function of them, a chunk at a time; ``copy_`` rounds."""
    for rows in weight.detach().split(max(1, _CHUNK // weight.shape[1])):
        rows.copy_(fn(rows.double()))
