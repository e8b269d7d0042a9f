"""A look of the host at the GPU that does not wait for what was launched after it."""

from __future__ import annotations

import torch
from torch import Tensor


class Look:
    """Whether anything in ``flags`` is true, asked when the look is made and answered when `found` is called.

    Args:
        flags: bool, any shape, on any device.
    """

    def __init__(self, flags: Tensor) -> None:
        self._any, self._made = flags.any(), None
        if flags.is_cuda:
            # A copy into pinned memory is a part of the stream; bool() would wait for all that follows, too.
            self._any = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(self._any, non_blocking=True)
            self._made = torch.cuda.Event()
            self._made.record()

    def found(self) -> bool:
        """The answer; waits until the look has been made."""
        if self._made is not None:
            self._made.synchronize()
        return bool(self._any)
