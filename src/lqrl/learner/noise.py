"""`RolloutNoise`: Gaussian noise on the norm weights that the rollout engine gets, falling in stages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lqrl.engines.base import NamedTensors, WeightStage
from lqrl.learner.seeds import derive_seed

LINEAR_INPUT_NORMS = ("*.input_layernorm", "*.post_attention_layernorm")
"""The norms in front of q, k, v and of gate, up in Llama, Mistral, Qwen2, Qwen3 and Gemma."""


class RolloutNoise(WeightStage):
    """Adaptive Quantization Noise, AQN (QeRL, arXiv 2510.11696, eq. 8 and 10), as a stage of `EngineRefresh`.

    A norm weight ``w`` reaches the rollout engine as ``w + Z``, ``Z ~ N(0, sigma^2)``: a multiplicative noise
    ``1 + Z/w`` on the input channels of the linear layers behind the norm, which raises the entropy of the rollouts.
    It is drawn anew for each policy version. ``sigma`` falls exponentially over ``stages`` equal parts of the run: 0 in
    the first (quantization noise alone), then ``sigma_start`` to ``sigma_end``, at which the run ends. A run of fewer
    iterations than stages leaves stages out, and may end before ``sigma_end``.

    The learner is never written: what it keeps is the clean copy, each refresh starts from it, and a refresh without
    the stage brings back the clean engine bit for bit. Noise cannot pile up. The full-precision engine of validation
    gets clean weights; ``val/*``, from the rollout engine, has the noise. The learner scores rollouts with clean
    weights, so the noise is mismatch: keep a correction. Exact mode refuses it.

    The noise is a function of ``(seed, policy_version, tensor name)``, drawn on the CPU: equal on all ranks and in a
    resumed run.

    What differs: noise is added in fp32 and rounded once to the engine's dtype (the authors' code rounds it first).
    The steps of bf16 are 0.004 below 1 and 0.008 above, so a weight near 1 moves only where ``|Z|`` is over half of
    that: at ``sigma`` 1e-3 in 5% or 0.01% of the draws, at 1e-4 in none. ``refresh/noise_changed_fraction`` shows it.
    The noise is added to the stored weight: ``w`` where Gemma scales by ``1 + w``, and what was folded into it where
    UAQ scaled it, which makes the noise smaller relative to it.

    What was inferred: the sources disagree. ``sigma`` goes from 5e-2 to 5e-4 in the paper's text and the code's
    defaults, from 1e-2 to 5e-4 in its table, from 1e-2 to 1e-4 in all published scripts, whose values are the defaults
    here. The stages follow the code: eq. 8 read literally would have no stage of 0. The paper puts the noise into the
    norms of each block that feed q, k, v and gate, up; the code takes every RMSNorm of Llama or Qwen2, the final one
    too. The default is the paper's; the norms of heads (``q_norm``, ``k_norm``) feed no linear layer and get none.

    Args:
        total_iterations: of the whole run, a resumed one included; past it the last stage goes on. A run that is
            shorter is warned about when it begins.
        seed: of the noise.
        sigma_start, sigma_end: standard deviation in the second and in the last stage.
        stages: parts of the run, K.
        norms: fnmatch patterns of module names; ``("*norm",)`` is every norm.

    Raises:
        ValueError: when an option is out of range.
    """

    def __init__(
        self,
        total_iterations: int,
        seed: int = 0,
        sigma_start: float = 1e-2,
        sigma_end: float = 1e-4,
        stages: int = 10,
        norms: tuple[str, ...] = LINEAR_INPUT_NORMS,
    ) -> None:
        if total_iterations < 1:
            raise ValueError(f"RolloutNoise.total_iterations must be at least 1, got {total_iterations}")
        if stages < 3:
            raise ValueError(f"RolloutNoise.stages must be at least 3 (none, start, end), got {stages}")
        if not 0 < sigma_end <= sigma_start:
            raise ValueError(f"RolloutNoise needs 0 < sigma_end <= sigma_start, got {sigma_end} and {sigma_start}")
        if not norms:
            raise ValueError("RolloutNoise.norms is empty, so nothing would get noise; leave the stage out instead")
        self.total_iterations, self.seed, self.stages = total_iterations, seed, stages
        self.sigma_start, self.sigma_end, self.norms = sigma_start, sigma_end, tuple(norms)
        self._sigma, self._elements, self._changed = 0.0, 0, torch.zeros((), dtype=torch.int64)

    def begin(self, iterations: float) -> None:
        """Warn when the run ends before the noise has been through its stages."""
        if iterations < self.total_iterations:
            last = int(iterations) - 1
            warnings.warn(
                f"RolloutNoise.total_iterations is {self.total_iterations} and the run ends after {last + 1} "
                f"iterations, in stage {self.stage(last) + 1} of {self.stages} with sigma {self.sigma(last):g}"
                + (": its rollouts never get noise" if self.stage(last) == 0 else "")
                + f"; set total_iterations to {last + 1}, the run's max_epochs * iterations_per_epoch",
                stacklevel=2,
            )

    def stage(self, policy_version: int) -> int:
        """``floor(policy_version * stages / total_iterations)``, at most ``stages - 1``."""
        return min(policy_version * self.stages // self.total_iterations, self.stages - 1)

    def sigma(self, policy_version: int) -> float:
        """Standard deviation of the noise of a policy version."""
        stage = self.stage(policy_version)
        if stage == 0:
            return 0.0
        return self.sigma_start * (self.sigma_end / self.sigma_start) ** ((stage - 1) / (self.stages - 2))

    def __call__(self, weights: NamedTensors, *, policy_version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, the norms' with noise.

        Raises:
            ValueError: at the end of the stream, for a pattern that matched nothing; and for a match that is no
                norm's weight.
        """
        self._sigma, self._elements = self.sigma(policy_version), 0
        self._changed = torch.zeros((), dtype=torch.int64)
        unmatched = set(self.norms)
        for name, tensor in weights:
            matching = {pattern for pattern in self.norms if fnmatchcase(name, f"{pattern}.weight")}
            if not matching:
                yield name, tensor
                continue
            unmatched -= matching
            if tensor.dim() != 1 or not tensor.is_floating_point():
                raise ValueError(
                    f"RolloutNoise.norms matches {name}, {tuple(tensor.shape)} {tensor.dtype}, which is no norm's "
                    "weight; name norms only"
                )
            yield name, self._noisy(name, tensor, policy_version)
        if unmatched:
            raise ValueError(
                f"RolloutNoise.norms: no tensor is named {', '.join(f'{p}.weight' for p in sorted(unmatched))}; "
                "set norms to the module names of this model's norms"
            )

    @property
    def metrics(self) -> dict[str, float]:
        """``sigma`` of the last refresh, and the share of the norms' elements that the noise changed."""
        return {
            "refresh/noise_sigma": self._sigma,
            "refresh/noise_changed_fraction": float(self._changed) / max(self._elements, 1),
        }

    @torch.no_grad()
    def _noisy(self, name: str, tensor: Tensor, policy_version: int) -> Tensor:
        self._elements += tensor.numel()
        if self._sigma == 0.0:
            return tensor
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "rollout noise", policy_version, name))
        noise = torch.randn(tensor.shape, generator=generator) * self._sigma
        noisy = (tensor.float() + noise.to(tensor.device)).to(tensor.dtype)
        self._changed = self._changed.to(tensor.device) + (noisy != tensor).sum()
        return noisy
