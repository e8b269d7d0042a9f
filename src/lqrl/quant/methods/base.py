"""`LinearMethod`: what a format does with a linear layer's weight and input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Operands = tuple[Tensor, ...]
"""A quantized weight as the kernel of its format reads it."""
TokenCodes = Literal["int8", "fp8_e4m3"]
"""Codes with one scale a token, by the rules of `quantize_int8_token` and `quantize_fp8_token`."""


class Coded(NamedTuple):
    """Quantized tokens: codes ``[M, K]``, int8 or e4m3, and scales fp32 ``[M, 1]``."""

    codes: Tensor
    scale: Tensor


class LinearMethod(ABC):
    """The operations that make a format; a new format is a new frozen dataclass of this kind.

    Learner and engine call the same `linear` on equal operands, so their outputs are equal bit for bit.
    """

    @property
    def shares_amax(self) -> bool:
        """Siblings that an engine fuses (q, k, v; gate, up) are quantized with their common magnitude."""
        return False

    @property
    def row_block(self) -> int:
        """Rows ``[N]`` of a weight that have scales in common, counted from the first."""
        return 1

    @property
    def format(self) -> LinearMethod:
        """The method whose codes these are; another one where only the product differs."""
        return self

    @abstractmethod
    def quantize(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """Quantize a weight ``[N, K]``, already rounded to the export dtype.

        Args:
            weight: floating point.
            amax: common magnitude of the siblings where the method shares it.

        Returns:
            The tensors that are shipped and stored, by the names that a compressed-tensors checkpoint gives them.

        Raises:
            ValueError: when the format cannot hold this shape.
        """

    def quantize_many(self, weights: Sequence[Tensor], export_dtype: torch.dtype) -> list[dict[str, Tensor]] | None:
        """`quantize` of each, rounded to ``export_dtype`` first, in fewer launches; ``None`` if there is no such way.

        A format that changes `quantize` changes this too.
        """
        return None

    @abstractmethod
    def operands(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, out: Operands | None = None) -> Operands:
        """Lay out shipped tensors for `linear`.

        Args:
            tensors: as `quantize` names them.
            dtype: compute dtype of the layer.
            out: earlier operands of the same shapes; those that are no shipped tensors are overwritten in place.

        Returns:
            The operands; some may be shipped tensors themselves.
        """

    @abstractmethod
    def linear(self, x: Tensor, operands: Operands, bias: Tensor | None) -> Tensor:
        """``x`` ``[..., K]`` times the weight, transposed, plus ``bias``: ``[..., N]`` in the dtype of ``x``."""

    @property
    def token_codes(self) -> TokenCodes | None:
        """What `linear` makes of its input first; `coded_linear` takes it ready made. ``None``: it takes none."""
        return None

    def coded_linear(self, x: Coded, operands: Operands, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`linear` of tokens that are quantized already: ``[M, N]`` in the dtype that they had, the same bits.

        Raises:
            NotImplementedError: for a method without `token_codes`.
        """
        raise NotImplementedError(f"{self} takes no ready codes: call linear")

    def coded_apart(
        self, x: Coded, operands: Operands, bias: Tensor | None, widths: Sequence[int], dtype: torch.dtype
    ) -> list[Tensor] | None:
        """`coded_linear` with the operands of several layers, whose outputs are tensors of their own.

        Args:
            x: the tokens ``[M, K]``.
            operands: of all layers, the rows of one behind those of the other.
            bias: of all layers likewise, or none.
            widths: outputs of each layer.
            dtype: of the result.

        Returns:
            ``[M, widths[i]]``, each contiguous, with the bits of `coded_linear`; ``None`` if no kernel does it in one.
        """
        return None

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight ``[N, K]`` that the shipped tensors stand for."""

    def logits(self, x: Tensor, operands: Operands) -> Tensor:
        """`linear` without bias and with an fp32 result, for an output head."""
        return self.linear(x.float(), operands, None)

    def round_input(self, x: Tensor) -> Tensor:
        """``x`` as the product sees it: quantized and dequantized where the format quantizes activations."""
        return x


def written(values: Operands, out: Operands | None) -> Operands:
    """``values``, or ``out`` after copying them into it."""
    if out is None:
        return values
    for target, value in zip(out, values, strict=True):
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)
    return out


def finished(y: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Rows ``y`` ``[M, N]`` plus ``bias``, in the dtype and the leading shape of the input ``x`` ``[..., K]``."""
    y = y.to(x.dtype)
    y = y if bias is None else y + bias.to(x.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])
