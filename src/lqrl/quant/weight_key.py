"""`weight_key` and `weights_stamp`: has a weight changed since something was made of it?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
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


_NAME = "_lqrl_serial"
_serials = count(1)


def serial(tensor: Tensor) -> int:
    """A number that no other tensor has: ids and addresses are used again, and every new tensor begins at version 0.

    The tensor carries it, since `torch.utils.swap_tensors` refuses what has weak references; it swaps numbers too. A
    copy may carry its original's, and then has what that had at version 0.
    """
    number: int | None = getattr(tensor, _NAME, None)
    if number is None:
        number = next(_serials)
        setattr(tensor, _NAME, number)
    return number


def weight_key(weights: Sequence[Tensor]) -> tuple[int, ...]:
    """Another value once ``weights`` may have changed: which they are, their versions and addresses, and the steps.

    Optimizer steps do not count for frozen weights, whose codes are made once.
    """
    key, steps = [], 0
    for weight in weights:  # no generators: an export asks this for every layer
        key += (weight._version, weight.data_ptr(), serial(weight))
        if weight.requires_grad:
            steps = _optimizer_steps
    return (*key, steps)


def weights_stamp(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Changes with every write to one of ``tensors``, and with one that takes the place of another.

    Not with a write through ``tensor.data`` outside an optimizer, unless an aligned layer's ``invalidate`` follows.
    """
    stamp = [invalidations()]
    for tensor in tensors:
        stamp += (tensor._version, tensor.data_ptr(), serial(tensor))
    return tuple(stamp)
