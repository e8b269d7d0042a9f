"""The embedded engine's model: built from a config, quantized, and run on flat tokens."""

from __future__ import annotations

import itertools
import logging

import torch
from torch import Tensor

from lqrl.algorithms.logprobs import head_logits
from lqrl.engines.base import EngineSpec
from lqrl.engines.lean import LeanDecoder, fuse_projections_
from lqrl.modeling.attention import AttentionContext, PackedContext
from lqrl.modeling.backbone import attention_shapes, load_model, output_weight, run_decoder
from lqrl.modeling.exact import exact_engine_
from lqrl.quant import exact
from lqrl.quant.adapters import attach_adapters_
from lqrl.quant.codes import CodeModule
from lqrl.quant.kv import prepare_kv_
from lqrl.quant.linear import QuantizedLinear
from lqrl.quant.prepare import convert_
from lqrl.quant.walk import walk

log = logging.getLogger(__name__)


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
        lean: the short cut through the layers that gives the same bits, or ``None``; chosen at the first refresh.
    """

    def __init__(self, spec: EngineSpec) -> None:
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
        self.lean: LeanDecoder | None = None
        self._max_positions = spec.max_model_len
        self._chosen = False

    def __call__(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states ``[N, H]`` of ``tokens`` ``[N]`` at ``positions`` ``[N]``."""
        if self.lean is not None:
            return self.lean(tokens, positions, context)
        return run_decoder(self.model, tokens[None], positions[None], context)

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
        """Bring what is computed from the weights (packed codes, the fp32 head) up to date, in place."""
        for layer in self._coded:
            layer.pack()
        if self.head is not None and self.exact:
            exact.pack(output_weight(self.model), self.head)
        elif self.head is not None:
            self.head.copy_(output_weight(self.model))
        if not self._chosen:
            self._choose()

    def _choose(self) -> None:
        """Take the fastest way through the layers that equals transformers' bit for bit on these weights."""
        device = self.device
        lengths = [n for n in (5, 1, 3) if n <= self._max_positions]
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        tokens = (torch.arange(len(positions), device=device) * 7919 + 1) % self.vocabulary

        def run(decoder: LeanDecoder | None) -> Tensor:
            self.lean = decoder
            with torch.autocast(device.type, enabled=False):
                return self(tokens, positions, PackedContext(lengths, device, exact=self.exact))

        expected = run(None)
        if not bool(expected.isfinite().all()):
            return  # weights that compute nothing decide nothing
        self._chosen, reason = True, "another result"
        norms = (False,) if self.exact else (True, False)
        for fused_norms, fused in itertools.product(norms, (self._fused, {}) if self._fused else ({},)):
            try:
                candidate = LeanDecoder(self.model, self.shapes, self._max_positions, fused_norms, fused)
            except NotImplementedError as error:
                reason = str(error)
                break
            if torch.equal(run(candidate), expected):
                log.info("decoder layers run lean, fused norms %s, fused products %d", fused_norms, len(fused))
                return
        self.lean = None
        log.info("decoder layers run as transformers has them: %s", reason)
