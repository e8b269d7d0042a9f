"""The embedded engine's model: built from a config, quantized, and run on flat tokens."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lqrl.algorithms.logprobs import head_logits
from lqrl.engines.base import EngineSpec, RefreshError
from lqrl.engines.fused_decoder import FusedDecoder
from lqrl.engines.layers import fuse_projections_
from lqrl.engines.lean import LeanDecoder
from lqrl.engines.probe import Probe, Run, deviation
from lqrl.engines.slots import PrefillContext
from lqrl.modeling.attention import AttentionContext
from lqrl.modeling.backbone import attention_shapes, load_model, output_weight, run_decoder
from lqrl.modeling.exact import exact_engine_
from lqrl.quant import exact, triton_use
from lqrl.quant.adapters import attach_adapters_
from lqrl.quant.codes import CodeModule
from lqrl.quant.fused import scales_agree
from lqrl.quant.kv import kv_rounding, prepare_kv_
from lqrl.quant.linear import QuantizedLinear
from lqrl.quant.prepare import convert_
from lqrl.quant.walk import walk

log = logging.getLogger(__name__)

_BIT_LENGTHS = (5, 1, 3)  # of the sequences that must give the same bits
_FUSED_LENGTHS = (150, 33, 2)  # of those that fused kernels are compared on: several blocks of keys
# Fused kernels may lie this many times as far from the plain layers as one rounding of every attention's result moves
# those. They differ from them in a few roundings a layer: of weights and sums in attention, of sums in norms. A wrong
# kernel is far beyond: its error is a part of the result, not of its last place.
_ROUNDINGS = 8.0


class _Way(NamedTuple):
    """A way through the layers: `FusedDecoder`, or `LeanDecoder` with these fused norms and fused products."""

    kernels: bool
    norms: bool = False
    products: bool = True


class Decoder:
    """A transformers model of ``spec.config`` with ``spec.scheme``'s linear layers; its weights come later.

    Attributes:
        model: the module; its parameters need no gradient.
        head: ``[V, H]`` weight of the output head as the head multiplies it: off CUDA a 16-bit weight is kept a
            second time in fp32, which the product would otherwise make in every step, in exact mode in the exact
            kernel's layout. ``None`` for a low-bit head.
        exact: see `EngineSpec`.
        shapes: heads and widths of each attention layer.
        vocabulary: rows of the output head.
        device: where the model is.
        lean: the short cut through the layers, or ``None``; chosen at the first refresh. It gives the same bits, but
            for `FusedDecoder` out of exact mode, which gives the same result up to rounding.

    A deep copy computes with weights of its own.

    Args:
        spec: what to build.
        fused: let `FusedDecoder` run the layers where it can: on CUDA, in exact mode where it gives the same bits.
    """

    def __init__(self, spec: EngineSpec, fused: bool = True) -> None:
        with torch.no_grad():
            self.model = load_model(spec.config, dtype=spec.dtype, device=spec.device)
            self.shapes = attention_shapes(self.model)
            weight = output_weight(self.model)
            self.device, self.vocabulary = weight.device, weight.shape[0]
            adapted = [] if spec.lora is None else spec.lora.targets(self.model)
            convert_(self.model, spec.scheme)
            if spec.lora is not None:
                attach_adapters_(self.model, spec.lora, adapted)
            prepare_kv_(self.model, spec.scheme)
            self.exact = spec.exact
            if spec.exact:
                exact_engine_(self.model)
            self.model.requires_grad_(False)
            self.model.eval()
            # Off CUDA another width may be summed in another order, and integer layers keep a packed copy.
            self._fused = fuse_projections_(self.model) if self.device.type == "cuda" else {}
            head = self.model.get_output_embeddings()
            self._low_bit_head = head if isinstance(head, QuantizedLinear) else None
            self.head: Tensor | None = weight
            if self._low_bit_head is not None:
                self.head = None
            elif spec.exact:
                self.head = exact.pack(weight)
            elif not weight.is_cuda and weight.dtype != torch.float32:
                self.head = weight.float()
        self._coded = [module for _, module in walk(self.model) if isinstance(module, CodeModule)]
        self.lean: LeanDecoder | FusedDecoder | None = None
        self._way: _Way | None = None  # of `lean`
        self._fuses = fused and triton_use.serves(self.device) and spec.max_model_len > 1
        self._dtype, self._scheme = spec.dtype, spec.scheme
        self._max_positions = spec.max_model_len
        self._chosen = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        """A decoder on tensors of its own, that takes the same way through the layers."""
        other = memo[id(self)] = object.__new__(type(self))
        # Products and layers are functions that hold modules, and parameters that are parts of one tensor are copied
        # apart: both are made anew on the copied model.
        rest = {name: value for name, value in vars(self).items() if name not in ("lean", "_fused")}
        vars(other).update(copy.deepcopy(rest, memo))
        other._fused = fuse_projections_(other.model) if self._fused else {}
        with torch.no_grad():
            other.lean = None if other._way is None else other._built(other._way)
        return other

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and of the copies that kernels read, each storage once."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *([] if self.head is None else [self.head])]
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())

    def __call__(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states ``[N, H]`` of ``tokens`` ``[N]`` at ``positions`` ``[N]``."""
        if self.lean is not None:
            return self.lean(tokens, positions, context)
        return run_decoder(self.model, tokens[None], positions[None], context)

    def prefill(self, tokens: Tensor, context: PrefillContext) -> Tensor:
        """Hidden states ``[S, H]`` of the last token of each prompt of ``context``, whose cache then holds them all."""
        if isinstance(self.lean, FusedDecoder):
            return self.lean.last(tokens, context)
        return self(tokens, context.position_ids, context).index_select(0, context.last)

    def logits(self, hidden: Tensor) -> Tensor:
        """The output head: ``[N, H]`` to fp32 ``[N, V]``, the arithmetic that the learner's log-probs use."""
        if self._low_bit_head is not None:
            return self._low_bit_head.logits(hidden)
        assert self.head is not None
        if self.exact:
            return exact.linear(hidden, self.head, dtype=torch.float32)
        return head_logits(hidden, self.head)

    @torch.no_grad()
    def refresh_derived(self) -> None:
        """Bring what is computed from the weights (packed codes, the fp32 head) up to date, in place.

        Raises:
            RefreshError: when layers that are multiplied together were sent with different scales.
        """
        if not scales_agree(self._fused.values()):
            raise RefreshError(
                "query, key and value, or gate and up, came with different scales for whole tensors, and are "
                "multiplied with one; quantize the checkpoint with one for them, as export_weights does"
            )
        for layer in self._coded:
            layer.pack()
        if self.head is not None and self.exact:
            exact.pack(output_weight(self.model), self.head)
        elif self.head is not None:
            self.head.copy_(output_weight(self.model))
        if not self._chosen:
            self._choose()

    def _choose(self) -> None:
        """Take the fastest way through the layers that is right on these weights."""
        probe = Probe(_BIT_LENGTHS, self._max_positions, self.vocabulary, self.device, self.exact)
        expected = probe.packed(self._through(None))
        if not bool(expected.isfinite().all()):
            return  # weights that compute nothing decide nothing
        self._chosen = True
        if not (self._fuses and self._choose_fused()):
            self._choose_equal(probe, expected)

    def _choose_equal(self, probe: Probe, expected: Tensor) -> None:
        """Take the fastest way that equals transformers' bit for bit."""
        reason, norms = "another result", (False,) if self.exact else (True, False)
        for fused_norms, products in itertools.product(norms, (True, False) if self._fused else (False,)):
            way = _Way(False, fused_norms, products)
            try:
                candidate = self._built(way)
            except NotImplementedError as error:
                reason = str(error)
                break
            if torch.equal(probe.packed(self._through(candidate)), expected):
                count = len(self._fused) if products else 0
                log.info("decoder layers run lean, fused norms %s, fused products %d", fused_norms, count)
                self.lean, self._way = candidate, way
                return
        log.info("decoder layers run as transformers has them: %s", reason)

    def _choose_fused(self) -> bool:
        """Take the fused kernels if they lie as near to transformers' layers as rounding does; if equal when exact."""
        way = _Way(True)
        try:
            candidate = self._built(way)
        except NotImplementedError as error:
            log.info("decoder layers run without fused kernels: %s", error)
            return False
        if not (self._equal(candidate) if self.exact else self._near(candidate)):
            return False
        self.lean, self._way = candidate, way
        return True

    def _built(self, way: _Way) -> LeanDecoder | FusedDecoder:
        fused = self._fused if way.products else {}
        if way.kernels:
            return FusedDecoder(self.model, self.shapes, self._max_positions, fused)
        return LeanDecoder(self.model, self.shapes, self._max_positions, way.norms, fused)

    def _equal(self, candidate: LeanDecoder | FusedDecoder) -> bool:
        """Whether prefill and a decode step from a cache of the engine's format have the learner's bits."""
        kv = kv_rounding(self.model, self._scheme)
        probe = Probe(_FUSED_LENGTHS, self._max_positions, self.vocabulary, self.device, True, kv)
        shapes = [shape for _, shape in sorted(self.shapes.items())]
        expected = probe.packed(self._through(None))
        if not torch.equal(probe.in_slots(self._through(candidate), shapes, self._dtype), expected):
            log.warning("exact decoder layers run without fused kernels, which give other bits here")
            return False
        log.info("exact decoder layers run fused")
        return True

    def _near(self, candidate: LeanDecoder | FusedDecoder) -> bool:
        """Whether the candidate lies as near to transformers' layers as rounding does."""
        probe = Probe(_FUSED_LENGTHS, self._max_positions, self.vocabulary, self.device, False)
        plain, shapes = self._through(None), [shape for _, shape in sorted(self.shapes.items())]
        expected = probe.packed(plain)
        rounding = max(deviation(probe.shaken(plain, seed), expected) for seed in range(2))
        allowed = _ROUNDINGS * max(rounding, torch.finfo(self._dtype).eps)
        found = deviation(probe.in_slots(self._through(candidate), shapes, self._dtype), expected)
        if found > allowed:
            log.warning(
                "decoder layers run without fused kernels: hidden states differ by %.1e, rounding explains %.1e",
                found, allowed,
            )  # fmt: skip
            return False
        log.info("decoder layers run fused: hidden states differ by %.1e, rounding explains %.1e", found, allowed)
        return True

    def _through(self, lean: LeanDecoder | FusedDecoder | None) -> Run:
        """The hidden states by this way through the layers."""

        def run(tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
            with torch.autocast(self.device.type, enabled=False):
                if lean is not None:
                    return lean(tokens, positions, context)
                return run_decoder(self.model, tokens[None], positions[None], context)

        return run
