"""`OptimizerOffload`: the optimizer's state leaves the GPU while the engine generates."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L

from lqrl.learner.offload import StateOffload


class OptimizerOffload(L.Callback):
    """Keep the optimizer's state in main memory from the end of an iteration to its next step.

    The state is on the device while the optimizer steps, and neither while the engine generates nor during the forward
    and backward passes; gradients, which every step makes anew, are dropped with it. Samples, steps and checkpoints are
    the same, bit for bit. Two copies an iteration, over the bus, of 8 bytes a parameter with AdamW: `PhaseTimer` says
    what they cost as ``time/memory``. Put it before `EngineRefresh` in the list of callbacks, and the refresh has the
    room, too.

    Logged: ``memory/optimizer_bytes``, what this rank moved.

    Args:
        pin_memory: pin main memory for it, see `lqrl.learner.offload.StateOffload`.
    """

    def __init__(self, pin_memory: bool = True) -> None:
        self.pin_memory = pin_memory
        self._states: list[StateOffload] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What a checkpoint restored goes at once; without a GPU say that nothing has to."""
        if pl_module.device.type == "cpu":
            warnings.warn(
                "OptimizerOffload: the policy trains on the CPU, so the optimizer's state is in main memory already "
                "and offloading it only copies; remove the callback, or set trainer.accelerator to a GPU's",
                stacklevel=1,
            )
        self._states = [StateOffload(optimizer, self.pin_memory) for optimizer in trainer.optimizers]
        self._offload()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The last step of the iteration is taken."""
        for optimizer in trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
        pl_module.log("memory/optimizer_bytes", float(self._offload()), batch_size=1)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Unpin."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """A run that fails is not torn down by callbacks."""
        self._close()

    def _close(self) -> None:
        for state in self._states:
            state.close()
        self._states = []

    def _offload(self) -> int:
        return sum(state.offload() for state in self._states)
