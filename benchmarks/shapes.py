"""The shapes of Qwen3's dense models, and how many bytes a decode step must read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lqrl.quant.scheme import QuantScheme

if TYPE_CHECKING:
    from transformers import Qwen3Config

# Bits of a code where it is held, and of a scale that a group shares; the scales of channels weigh nothing beside.
_CODE_BITS = {"int8": 8, "fp8_e4m3": 8, "int4": 4, "int3": 4, "fp4_e2m1": 4, "nf4": 4}
_SCALE_BITS = {"float": 16, "fp8_e4m3": 8, "e8m0": 8}


@dataclass(frozen=True)
class Shape:
    """Widths of a dense Qwen3 decoder.

    Attributes:
        hidden, inner: widths of the stream and of the gated layer.
        heads, kv_heads, width: of the attention, and the width of a head.
        tied: the output head is the embedding.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    vocabulary: int
    tied: bool

    def config(self, positions: int) -> Qwen3Config:
        """For transformers; no token is special."""
        from transformers import Qwen3Config

        return Qwen3Config(
            architectures=["Qwen3ForCausalLM"],
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.width,
            max_position_embeddings=positions,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    @property
    def linear_weights(self) -> int:
        """Elements of the linear layers, without the head."""
        attention = self.hidden * self.width * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def cached_values(self) -> int:
        """Elements of the cache that a token takes."""
        return 2 * self.layers * self.kv_heads * self.width

    def step_bytes(self, scheme: QuantScheme, batch: int, context: float, bits: int = 16) -> float:
        """Bytes that a decode step cannot avoid: every weight once, and every cached token that is attended to.

        Args:
            scheme: format of the weights and of the cache.
            batch: samples.
            context: tokens that each of them attends to; a prefix that samples share is counted for each.
            bits: of what is not quantized.
        """
        head = self.vocabulary * self.hidden * (weight_bits(scheme, bits) if scheme.lm_head else bits)
        cached = bits if scheme.kv_cache is None else _CODE_BITS[scheme.kv_cache.dtype]
        kept = batch * context * self.cached_values * cached
        return (self.linear_weights * weight_bits(scheme, bits) + head + kept) / 8


def weight_bits(scheme: QuantScheme, plain: int = 16) -> float:
    """Bits of a weight with the scale of its group; ``plain`` where nothing is quantized."""
    if scheme.weight is None:
        return plain
    shared = _SCALE_BITS[scheme.weight.scale_dtype] / scheme.weight.group_size if scheme.weight.group_size else 0.0
    return _CODE_BITS[scheme.weight.dtype] + shared


SHAPES = {
    "tiny": Shape(128, 256, 2, 4, 2, 64, 512, True),
    "0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151936, True),
    "4B": Shape(2560, 9728, 36, 32, 8, 128, 151936, True),
    "8B": Shape(4096, 12288, 36, 32, 8, 128, 151936, False),
    "32B": Shape(5120, 25600, 64, 64, 8, 128, 151936, False),
}
