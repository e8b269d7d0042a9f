"""The seam between the learner and whatever generates: `RolloutEngine`, its factory, and the refresh contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lqrl.modeling.arithmetic import Arithmetic
from lqrl.quant.lora import Lora
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, RefreshReport, SamplingParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NamedTensors = Iterable[tuple[str, Tensor]]

Digests = Mapping[str, int]
"""Fingerprints (`lqrl.engines.digest.tensor_digest`) by tensor name."""


class RefreshError(RuntimeError):
    """A refresh did not complete; the engine refuses to generate until one does."""


class EngineUnavailableError(RuntimeError):
    """What the engine runs on is missing, does not start, is not what the recipe says, or has been lost."""


class StaleEngineError(RuntimeError):
    """The engine holds weights of another policy version than the caller expects."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine must know to be built; weights come with the first refresh.

    Attributes:
        config: architecture, as transformers describes it.
        scheme: the low-bit format; the learner reads the same object.
        dtype: compute dtype and export dtype of everything that is not quantized.
        device: where the engine lives.
        max_model_len: longest prompt plus completion.
        eos_token_ids: end a completion.
        lora: adapters that the engine holds beside its weights; ``None`` for a policy without, or one that is merged.
        exact: log-probs whose bits depend on nothing but the tokens, equal to the learner's (see
            `lqrl.modeling.exact`); an engine that cannot raises ``NotImplementedError``.
    """

    config: PretrainedConfig
    scheme: QuantScheme
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    lora: Lora | None = None
    exact: bool = False


class RolloutEngine(ABC):
    """Generates completions with its own copy of the weights.

    Attributes:
        policy_version: version of the weights that serve; -1 before the first refresh and after a failed one.
        takes: format that `update_weights` is sent, by an engine that quantizes what it is sent itself; ``None`` is
            that of its `EngineSpec`.
        arithmetic: where it rounds, which an aligned learner follows.
        collective: several ranks hold the engine together, and call `generate` together; one without prompts, too.
    """

    policy_version: int = -1
    takes: QuantScheme | None = None
    arithmetic: Arithmetic = Arithmetic()
    collective: bool = False

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int) -> list[list[Completion]]:
        """Draw ``params.n`` completions for each prompt, in the order of ``prompts``.

        The draw of a sample depends on ``seed``, the prompt's id and the sample's index, and on nothing else that
        the caller chooses (order, company, world size), as far as the logits do not: a product that rounds differently
        in another batch can turn a close draw, in bf16 more often than in fp32.

        Raises:
            StaleEngineError: when no refresh has succeeded yet, or the last one failed.
            ValueError: when a prompt is empty or too long for ``max_model_len``.
        """

    def generate_some(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int
    ) -> list[tuple[Prompt, list[Completion]]]:
        """Draw completions of ``prompts``, of which an engine with partial rollouts may leave some for a later call.

        Returns:
            Whole groups: those of ``prompts`` and of earlier calls that are finished, each once. By default all.

        Raises:
            StaleEngineError, ValueError: as `generate`.
        """
        return list(zip(prompts, self.generate(prompts, params, seed=seed), strict=True))

    def unfinished(self) -> list[dict[str, Any]]:
        """What `generate_some` left for later, as plain values for a checkpoint."""
        return []

    def take_up(self, unfinished: Sequence[Mapping[str, Any]]) -> None:
        """Have what `unfinished` said before be continued by this engine.

        Raises:
            ValueError: when it continues nothing.
        """
        if unfinished:
            raise ValueError(
                f"the checkpoint holds {len(unfinished)} groups of partial rollouts, which {type(self).__name__} "
                "cannot continue; resume with the engine that began them, partial set"
            )

    @abstractmethod
    def update_weights(
        self, weights: NamedTensors, *, policy_version: int, frozen: Digests | None = None
    ) -> RefreshReport:
        """Load a complete set of exported weights as one transaction.

        Every tensor of the engine is either written exactly once or declared in ``frozen``, counted by element; storage
        does not move; cached prefixes are dropped; the version is stamped last.

        Args:
            weights: the tensors.
            policy_version: what they are.
            frozen: tensors that are not sent because the engine holds them already, with the digest of what it must
                hold. The engine computes its own and compares.

        Raises:
            RefreshError: on a missing, unknown, doubled, misshapen, mistyped or non-finite tensor, one that is both
                sent and declared, or held with another digest, or when the stream raises. The engine then refuses to
                generate.
        """

    def wake(self) -> None:
        """Take back the memory that `sleep` gave up, at once or when it is needed; again is no error."""

    def sleep(self) -> None:
        """Give up memory that generation needs and training does not; again is no error.

        The learner calls it before it learns from rollouts. `generate` raises until `wake`.
        """


class EngineFactory(ABC):
    """Builds an engine; a frozen dataclass whose fields are the engine's options."""

    @property
    def max_lag(self) -> int:
        """Versions of the policy between the oldest token of a completion and the one that ends it, at most."""
        return 0

    @abstractmethod
    def __call__(self, spec: EngineSpec) -> RolloutEngine:
        """Build an engine for ``spec``."""
        ...


class WeightStage(ABC):
    """Changes the exported weights on their way to the engine (noise, scaling); the learner keeps its own."""

    @abstractmethod
    def __call__(self, weights: NamedTensors, *, policy_version: int) -> NamedTensors:
        """Yield the same names in the same order."""
        ...

    def begin(self, iterations: float) -> None:
        """Before training: how many iterations the run has in all, ``inf`` without a limit; nothing by default."""
        return None

    @property
    def metrics(self) -> dict[str, float]:
        """What is logged after a refresh that went through the stage; nothing by default."""
        return {}
