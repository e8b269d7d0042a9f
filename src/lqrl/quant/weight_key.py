"""`weight_key` and `weights_stamp`: has a weight changed since something was made of it?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_invalidations = 0


def invalidations() -> int:
    """How often codes were declared stale by hand; a refresh takes a change of it for a change of weights."""
    return _invalidations


def count_invalidation() -> None:
    """Codes were declared stale by hand."""
    global _invalidations
    _invalidations += 1


# Optimizers that write through `.data` or raw pointers do not raise a weight's version; every step counts here.
_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


_NAME = "_lqrl_identity"


class Identity:
    """Of one tensor, by its ``id``: equal to itself alone. Deep copies and files hold an empty dict in its place."""

    __slots__ = ("of",)

    def __init__(self, tensor: Tensor) -> None:
        self.of = id(tensor)

    def __reduce__(self) -> tuple[type[OrderedDict[str, int]], tuple[()]]:
        return OrderedDict, ()  # a file can be read without this library, and with ``weights_only``


def identity(tensor: Tensor) -> Identity:
    """What no other tensor has: ids and addresses are used again, and every new tensor begins at version 0.

    The tensor carries it, since `torch.utils.swap_tensors` refuses tensors with weak references; what has come to
    carry another's gets one of its own.
    """
    own = getattr(tensor, _NAME, None)
    if not isinstance(own, Identity) or own.of != id(tensor):
        own = Identity(tensor)
        setattr(tensor, _NAME, own)
    return own


def check_counts_changes(weight: Tensor) -> None:
    """Refuse, by a RuntimeError, a weight that was made in inference mode: it counts no changes."""
    if weight.is_inference():
        raise RuntimeError("make the learner outside torch.inference_mode(), whose tensors count no changes")


def _state(tensor: Tensor) -> tuple[object, ...]:
    """Another value once ``tensor`` may hold something else, and for every other tensor."""
    return tensor._version, tensor.data_ptr(), identity(tensor)


def weight_key(weights: Sequence[Tensor]) -> tuple[object, ...]:
    """Another value once ``weights`` may have changed: which they are, their versions and addresses, and the steps.

    Optimizer steps do not count for frozen weights, whose codes are made once.
    """
    key: list[object] = []
    steps = 0
    for weight in weights:  # no generators: an export asks this for every layer
        key += _state(weight)
        if weight.requires_grad:
            steps = _optimizer_steps
    return (*key, steps)


def weights_stamp(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    """Changes with every write to one of ``tensors``, and with one that takes the place of another.

    Not with a write through ``tensor.data`` outside an optimizer, or to the local part of a DTensor, unless an aligned
    layer's ``invalidate`` follows.
    """
    stamp: list[object] = [invalidations()]
    for tensor in tensors:
        stamp += _state(tensor)
    return tuple(stamp)
