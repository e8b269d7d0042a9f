"""What is not trained: not sent to the engine again, and not written to checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lqrl.engines.base import Digests, NamedTensors
from lqrl.engines.digest import digest, tensor_digest
from lqrl.quant.weight_key import weights_stamp

if TYPE_CHECKING:
    from lqrl.learner.module import PolicyModule


@dataclass(frozen=True)
class SentOnce:
    """Tensors that an engine was sent and that have not changed since.

    Attributes:
        stamp: `frozen_stamp` when they were sent.
        digests: of each, as the learner exported it.
    """

    stamp: tuple[object, ...]
    digests: Digests


def frozen_stamp(policy: nn.Module) -> tuple[object, ...]:
    """`weights_stamp` of the frozen parameters: another, too, when one is frozen, thawed or replaced."""
    return weights_stamp(p for p in policy.parameters() if not p.requires_grad)


def note_frozen(weights: NamedTensors, policy: nn.Module, digests: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Pass ``weights`` on, and write down the digests of those that need not be sent again.

    These are matrices whose module trains nothing. Vectors (norms, biases, global scales) are always sent: they are
    small, and a stage may change them on their way.
    """
    trained = {
        name.rpartition(".")[0] for name, p in policy.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    for name, tensor in weights:
        if tensor.dim() >= 2 and name.rpartition(".")[0] not in trained:
            digests[name] = int(tensor_digest(tensor))
        yield name, tensor


def _frozen_parameters(module: PolicyModule) -> dict[str, Tensor]:
    named = module.policy.named_parameters(remove_duplicate=False)
    return {f"policy.{name}": p.detach() for name, p in named if not p.requires_grad}


def frozen_digest(module: PolicyModule) -> str | None:
    """Digest of the frozen parameters of a policy with adapters; ``None`` for one without."""
    return None if module.lora is None else digest(_frozen_parameters(module).items())


def without_frozen(module: PolicyModule, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors: with adapters, only what is trained, and buffers; the base comes from the model again."""
    frozen = {} if module.lora is None else _frozen_parameters(module)
    return {name: tensor for name, tensor in state_dict.items() if name not in frozen}


def add_frozen_(module: PolicyModule, checkpoint: dict[str, Any]) -> None:
    """Complete a checkpoint that was written without the frozen base with the configured model's.

    Raises:
        ValueError: when that base is another than the one that the adapters were trained on.
    """
    expected = checkpoint["lqrl"]["frozen"]
    if module.lora is None or expected is None:
        return
    if frozen_digest(module) != expected:
        raise ValueError(
            "the frozen weights under the adapters are not those that the checkpoint was written with; set "
            "model.init_args.model to the very model it was trained on, with the same master_dtype and transforms"
        )
    for name, tensor in _frozen_parameters(module).items():
        checkpoint["state_dict"].setdefault(name, tensor)
