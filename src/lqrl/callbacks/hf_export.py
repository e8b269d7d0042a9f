"""`HFExport`: leave the trained policy as a directory that transformers loads."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import lightning as L
import torch
from torch import nn

from lqrl.callbacks.run_folder import keeps_files, run_folder
from lqrl.learner.module import PolicyModule
from lqrl.modeling.precision import parse_dtype
from lqrl.quant import QuantScheme
from lqrl.quant.checkpoint import check_exportable, save_quantized
from lqrl.quant.targets import target_modules


class HFExport(L.Callback):
    """Write the policy in full precision, with tokenizer and configs, when training ends; low-bit too on request.

    The names and shapes are those of the model that was loaded, so ``AutoModelForCausalLM.from_pretrained`` and lqrl
    itself read it back. Transforms stay folded in, and config.json names them; adapters are merged: the exported
    function is the trained one.

    Args:
        directory: where to; ``None`` is ``hf`` in the run folder.
        dtype: of the full-precision weights; ``None`` is the run's compute dtype.
        quantized: write the rollout engine's own codes too, as a compressed-tensors checkpoint beside ``directory``,
            with the scheme's name appended: ``hf-int8_w8a8``. vLLM, transformers and lqrl load it.
    """

    def __init__(self, directory: str | None = None, dtype: str | None = None, quantized: bool = False) -> None:
        self.directory, self.dtype = directory, None if dtype is None else parse_dtype(dtype)
        self.quantized = quantized

    def target(self, trainer: L.Trainer) -> Path:
        """Where the export in full precision goes."""
        return Path(self.directory) if self.directory else run_folder(trainer) / "hf"

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse before training what could not be exported after it, and name what others will not run.

        Raises:
            ValueError: when ``quantized`` is set and no checkpoint holds the scheme or the model.
        """
        assert isinstance(pl_module, PolicyModule)
        if self.quantized:
            check_exportable(pl_module.policy, pl_module.scheme)
            _warn_of_ragged_blocks(pl_module)

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Export once, on rank 0; not after a dry run."""
        assert isinstance(pl_module, PolicyModule)
        if not keeps_files(trainer):
            return
        target = self.target(trainer)  # a collective: before the gate
        if trainer.is_global_zero:
            export(pl_module, target, dtype=self.dtype or pl_module.compute_dtype)
            if self.quantized:
                export_quantized(pl_module, target.with_name(f"{target.name}-{pl_module.scheme.name}"))


def _warn_of_ragged_blocks(module: PolicyModule) -> None:
    """Say which export transformers cannot run: it has whole groups of activations only, lqrl fills up the last."""
    activation = module.scheme.activation
    size = activation.group_size if activation is not None and activation.dtype == "fp8_e4m3" else None
    if size is None:
        return
    layers = ((name, module.policy.get_submodule(name)) for name in target_modules(module.policy, module.scheme))
    ragged = [(n, m.in_features) for n, m in layers if isinstance(m, nn.Linear) and m.in_features % size]
    if ragged:
        name, width = ragged[0]
        warnings.warn(
            f"HFExport: {name} ({width} inputs) and {len(ragged) - 1} other layers have inputs that {size} does not "
            f"divide, so transformers will load the export in {module.scheme.name} and fail in its forward pass; load "
            "it there with quantization_config=CompressedTensorsConfig(dequantize=True), or take fp8_per_channel",
            stacklevel=1,
        )


def export(module: PolicyModule, directory: Path, *, dtype: torch.dtype) -> None:
    """Save ``module``'s policy, tokenizer and configs to ``directory``."""
    policy = module.policy
    weights = {name: tensor.to(dtype) for name, tensor in module.exported_weights(QuantScheme.preset("none"))}
    directory.mkdir(parents=True, exist_ok=True)
    policy.save_pretrained(directory, state_dict={n: t.contiguous() for n, t in weights.items()})
    config = copy.deepcopy(policy.config)
    config.dtype = dtype  # save_pretrained names that of the masters
    config.save_pretrained(directory)
    module.tokenizer.save_pretrained(directory)


def export_quantized(module: PolicyModule, directory: Path) -> None:
    """Save what ``module``'s rollout engine is sent to ``directory``, as a compressed-tensors checkpoint.

    Raises:
        ValueError: see `lqrl.quant.checkpoint.save_quantized`.
    """
    save_quantized(module.policy, module.scheme, directory, export_dtype=module.compute_dtype)
    module.tokenizer.save_pretrained(directory)
