"""A policy as the log-probs of given tokens: the one forward pass of the learner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lqrl.algorithms.logprobs import chunked_logprobs
from lqrl.modeling.arithmetic import Arithmetic, use_arithmetic_
from lqrl.modeling.attention import KVHook
from lqrl.modeling.backbone import hidden_states, pack
from lqrl.modeling.head import head_kernels, output_head
from lqrl.modeling.precision import cast_parameters
from lqrl.quant.linear import quantize_stale

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scorer(nn.Module):
    """Log-probs of tokens under a policy and a sampling temperature.

    Args:
        policy: loaded by `modeling.load_model`.
        temperature: of the rollouts.
        compute_dtype: dtype of the forward pass; parameters of another dtype are cast on the way in.
        kv: the rounding of the engine's key/value cache, or ``None``.
        exact: the bits of a log-prob depend on its tokens alone and are those of an exact engine. The policy must have
            gone through `lqrl.modeling.exact.exact_learner_`.

    Raises:
        ValueError: when ``exact`` is set and the output head was not made exact.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        temperature: float,
        compute_dtype: torch.dtype,
        kv: KVHook | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.policy, self.temperature, self.compute_dtype = policy, temperature, compute_dtype
        self.kv, self.exact, self.rounds_logits = kv, exact, False
        if exact and output_head(policy).product is None:
            raise ValueError("an exact Scorer needs an exact policy: call modeling.exact.exact_learner_ on it first")

    def follow_(self, arithmetic: Arithmetic) -> int:
        """Round where an engine does from here on, in place; call it once.

        Returns:
            How many modules of the policy were replaced or changed, see `lqrl.modeling.arithmetic.use_arithmetic_`.

        Raises:
            ValueError: for an exact scorer, whose arithmetic is its own.
        """
        if self.exact:
            raise ValueError("an exact Scorer has the arithmetic of an exact engine and follows no other")
        self.rounds_logits = arithmetic.rounds_logits
        return use_arithmetic_(self.policy, arithmetic)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *, layers_only: bool = False) -> Tensor:
        """``[B, T]`` log-probs of ``input_ids`` given what precedes them; no padding is computed.

        The hidden state of token ``t - 1`` predicts token ``t``; the last token of a row predicts nothing.
        ``layers_only``: for what `kv` sees, without the output head; all log-probs are 0.
        """
        quantize_stale(self.policy)
        packed = pack(input_ids, attention_mask, self.kv, self.exact)
        hidden = hidden_states(self.policy, packed)
        if layers_only:
            return hidden.new_zeros(input_ids.shape, dtype=torch.float32)
        source, targets = packed.predicting, packed.input_ids[0][packed.predicting + 1]
        head = output_head(self.policy, rounds_logits=self.rounds_logits)
        kernels = head_kernels(hidden.device, exact=self.exact)
        values = chunked_logprobs(
            hidden[source],
            head.weight,
            targets,
            temperature=self.temperature,
            product=head.product,
            normalize=kernels.normalize,
            slope=kernels.slope,
        )
        return values.new_zeros(input_ids.numel()).index_copy(0, packed.index[source] + 1, values).view_as(input_ids)

    def score(self, input_ids: Tensor, attention_mask: Tensor, *, layers_only: bool = False) -> Tensor:
        """`forward` in the compute dtype."""
        options = {"layers_only": layers_only}
        if all(p.dtype == self.compute_dtype for p in self.policy.parameters()):
            return self(input_ids, attention_mask, **options)
        cast = {f"policy.{n}": p for n, p in cast_parameters(self.policy, self.compute_dtype).items()}
        # Tied names are all in `cast`; tying them again would give an aligned head the embedding's cast copy.
        return torch.func.functional_call(self, cast, (input_ids, attention_mask), options, tie_weights=False)
