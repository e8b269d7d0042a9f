"""`HFExport`: leave the trained policy as a directory that transformers loads."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch

from lqrl.callbacks.run_folder import run_folder
from lqrl.learner.module import PolicyModule
from lqrl.modeling.precision import parse_dtype
from lqrl.quant import QuantScheme


class HFExport(L.Callback):
    """Write the policy in full precision, with tokenizer and configs, when training ends.

    The names and shapes are those of the model that was loaded, so ``AutoModelForCausalLM.from_pretrained`` and lqrl
    itself read it back. UAQ's scaling stays folded in: the exported function is the trained one.

    Args:
        directory: where to; ``None`` is ``hf`` in the run folder.
        dtype: of the exported weights; ``None`` is the run's compute dtype.
    """

    def __init__(self, directory: str | None = None, dtype: str | None = None) -> None:
        self.directory, self.dtype = directory, None if dtype is None else parse_dtype(dtype)

    def target(self, trainer: L.Trainer) -> Path:
        """Where the export goes."""
        return Path(self.directory) if self.directory else run_folder(trainer) / "hf"

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Export once, on rank 0."""
        assert isinstance(pl_module, PolicyModule)
        target = self.target(trainer)  # a collective: before the gate
        if trainer.is_global_zero:
            export(pl_module, target, dtype=self.dtype or pl_module.compute_dtype)


def export(module: PolicyModule, directory: Path, *, dtype: torch.dtype) -> None:
    """Save ``module``'s policy, tokenizer and configs to ``directory``."""
    policy = module.policy
    weights = {name: tensor.to(dtype) for name, tensor in module.exported_weights(QuantScheme.preset("none"))}
    directory.mkdir(parents=True, exist_ok=True)
    policy.save_pretrained(directory, state_dict={n: t.contiguous() for n, t in weights.items()})
    module.tokenizer.save_pretrained(directory)
