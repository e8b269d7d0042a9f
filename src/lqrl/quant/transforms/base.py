"""`InvariantTransform`: another set of weights for the same function, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class InvariantTransform(ABC):
    """Changes weights in place so that the full-precision function stays the same, up to rounding.

    A transform is applied once, after loading and before the linear layers are swapped; training goes on with the
    folded weights. What `unfold_` needs besides the options is kept on the model in buffers that are not persistent,
    so names and shapes of a checkpoint do not change. Several transforms are undone in reverse order.

    Attributes:
        absorbs_gains: whether it moves the norms' gains into the weights, which would undo an earlier transform that
            had moved something from the weights into the gains.
    """

    absorbs_gains: ClassVar[bool] = False

    @abstractmethod
    def fold_(self, model: PreTrainedModel) -> int:
        """Apply it, in place; returns how many linear layers changed.

        Raises:
            ValueError: when there is nothing to fold or the architecture is not one that it leaves invariant; nothing
                has been written then.
        """

    @abstractmethod
    def unfold_(self, model: PreTrainedModel) -> int:
        """Undo `fold_`, in place, also after training: the function stays the same.

        Returns:
            How many linear layers changed.
        """


def fold_all_(model: PreTrainedModel, transforms: Sequence[InvariantTransform]) -> list[int]:
    """Apply ``transforms`` in their order; returns the number of changed linear layers of each.

    Raises:
        ValueError: when one that absorbs gains is not first, or as `InvariantTransform.fold_`.
    """
    for i, transform in enumerate(transforms):
        if i and transform.absorbs_gains:
            raise ValueError(
                f"{type(transform).__name__} absorbs the norm gains and would undo {type(transforms[i - 1]).__name__}: "
                f"put it first"
            )
    return [transform.fold_(model) for transform in transforms]
