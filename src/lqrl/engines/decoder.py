"""The embedded engine's model: built from a config, quantized, and run on flat tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lqrl.engines.base import EngineSpec
from lqrl.modeling.attention import AttentionContext
from lqrl.modeling.backbone import attention_shapes, load_model, output_weight, run_decoder
from lqrl.quant.prepare import convert_, pack_


class Decoder:
    """A transformers model of ``spec.config`` with ``spec.scheme``'s linear layers; its weights come later.

    Attributes:
        model: the module; its parameters need no gradient.
        head: ``[V, H]`` weight of the output head as the head multiplies it: off CUDA a 16-bit weight is kept a
            second time in fp32, which the product would otherwise make in every step.
        shapes: heads and widths of each attention layer.
    """

    def __init__(self, spec: EngineSpec) -> None:
        with torch.no_grad():
            self.model = load_model(spec.config, dtype=spec.dtype, device=spec.device)
            convert_(self.model, spec.scheme)
            self.model.requires_grad_(False)
            self.model.eval()
            self.shapes = [shape for _, shape in sorted(attention_shapes(self.model).items())]
            weight = output_weight(self.model)
            self.head = weight if weight.is_cuda or weight.dtype == torch.float32 else weight.float()

    def __call__(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states ``[N, H]`` of ``tokens`` ``[N]`` at ``positions`` ``[N]``."""
        return run_decoder(self.model, tokens[None], positions[None], context)

    @property
    def vocabulary(self) -> int:
        """Rows of the output head."""
        return self.head.shape[0]

    @torch.no_grad()
    def refresh_derived(self) -> None:
        """Bring what is computed from the weights (packed codes, the fp32 head) up to date, in place."""
        pack_(self.model)
        weight = output_weight(self.model)
        if self.head is not weight:
            self.head.copy_(weight)
