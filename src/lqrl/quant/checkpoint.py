"""Compressed-tensors checkpoints: what an engine is sent, saved for vLLM and transformers, and read back.

Codes and scales in the file are those of the training run, bit for bit. vLLM and transformers hold the scales of
``pack-quantized`` weights in the model's dtype, which loses nothing: here they are in the export dtype already.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lqrl.quant.checkpoint_files import replace_export, unfinished_export, write_weights
from lqrl.quant.checkpoint_reader import CheckpointReader
from lqrl.quant.compressed_format import (
    INSTEAD,
    checkpoint_format,
    quantization_config,
    stored_tensors,
    unwritten_formats,
)
from lqrl.quant.export import export_weights
from lqrl.quant.kv import SCALE_NAMES
from lqrl.quant.lora import AdaptedLinear
from lqrl.quant.moe import PROJECTIONS, holds_stacked_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.stacks import named_by_expert, stack_of, unstacked
from lqrl.quant.targets import target_modules

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SHARD_BYTES = 5 * 10**9
"""Default size of a file of weights."""


# ------------------------------------------------------------------------------------------------- writing


def save_quantized(
    model: PreTrainedModel,
    scheme: QuantScheme,
    directory: str | Path,
    *,
    export_dtype: torch.dtype,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``model`` in ``scheme``'s format as a directory that vLLM, transformers and `load_quantized` read.

    Codes come from `export_weights`, so a prepared model's are those of its own forward; transforms stay folded in.
    Tied weights are written once, under the embedding's name; a quantized head of a tied model unties it in the config.
    Stacked experts are written one by one, as checkpoints of Qwen3-MoE have them. What no such checkpoint can describe
    (nvfp4's activations, a cache with scales per token and head) is named in config.json for lqrl; others read the
    checkpoint without.

    An earlier export in ``directory`` stays until all of this one is written, in a folder of its own. A process that is
    killed until then leaves the earlier export whole, beside that folder, which nobody reads and the next export
    removes. One that is killed while the files change places leaves no config.json, and every reader refuses the
    directory. config.json comes last: from then on the new export is whole.

    Args:
        model: the learner's, prepared or plain.
        scheme: see `lqrl.quant.compressed_format.checkpoint_format` for what can be held.
        directory: made if it is not there.
        export_dtype: of the weights that are not quantized.
        max_shard_bytes: a file is closed before it would exceed this; a tensor is never split.

    Raises:
        ValueError: see `check_exportable`, and `export_weights` for weights that are not finite.
    """
    config = checkpoint_config(model, scheme, export_dtype)
    with unfinished_export(Path(directory)) as folder:
        write_weights(_stored(model, scheme, export_dtype), folder, max_shard_bytes)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        config.save_pretrained(folder)
        replace_export(Path(directory), folder)


def checkpoint_config(model: PreTrainedModel, scheme: QuantScheme, export_dtype: torch.dtype) -> PretrainedConfig:
    """The config of what `save_quantized` writes, with its ``quantization_config``; ``model`` may be without weights.

    Raises:
        ValueError: see `check_exportable`.
    """
    check_exportable(model, scheme)
    targets = target_modules(model, scheme)
    head = [name for name in targets if model.get_submodule(name) is model.get_output_embeddings()]
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], export_dtype
    # vLLM's head is no "Linear": it needs its name
    config.quantization_config = quantization_config(scheme, _kept(model, frozenset(targets)), [*head, "Linear"])
    for key, arguments in unwritten_formats(scheme).items():
        setattr(config, key, arguments)
    if head:
        config.tie_word_embeddings = False
    return config


def checkpoint_tensors(
    weights: Iterable[tuple[str, Tensor]], scheme: QuantScheme, targets: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """What `export_weights` gives, under the names and in the layouts of a checkpoint; some are views.

    Args:
        weights: as they are shipped.
        scheme: their format.
        targets: names of the quantized layers.
    """
    for name, tensor in unstacked(weights):
        prefix, _, last = name.rpartition(".")
        if (stack_of(prefix) or prefix) in targets and last != "bias":
            for stored, value in stored_tensors(last, tensor, scheme):
                yield f"{prefix}.{stored}", value
        else:
            yield name, tensor


def check_exportable(model: PreTrainedModel, scheme: QuantScheme) -> None:
    """Refuse before training what `save_quantized` could not write after it.

    Raises:
        ValueError: when no checkpoint holds the scheme, or the model has adapters beside its codes or stacked experts
            whose names in a checkpoint are not known.
    """
    checkpoint_format(scheme)
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            raise ValueError(
                f"{name} computes with its codes and an adapter, of which such a checkpoint holds the codes alone; "
                f"train with Lora(refresh='merge'), or {INSTEAD}"
            )
        if holds_stacked_weights(module) and not (
            set(module._parameters) == set(PROJECTIONS) and name.endswith("mlp.experts") and named_by_expert(model)
        ):
            raise ValueError(
                f"{name} stacks the weights of experts, and checkpoints of {model.config.model_type} do not name them "
                f"one by one as those of Qwen3-MoE do; {INSTEAD}"
            )


def _kept(model: nn.Module, targets: Collection[str]) -> list[str]:
    """What stays in high precision, for ``ignore``: all matrices, since vLLM has a linear layer for a router too."""
    kept = []
    for name, module in model.named_modules():
        if name in targets or ".lora_" in name:
            continue
        if holds_stacked_weights(module):
            kept.append(f"re:{re.escape(name)}\\.\\d+\\..*")
            continue
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and not isinstance(module, nn.Embedding):
            kept.append(name)
    return kept


def _stored(model: nn.Module, scheme: QuantScheme, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    weights, targets = export_weights(model, scheme, export_dtype=dtype), frozenset(target_modules(model, scheme))
    for name, tensor in checkpoint_tensors(weights, scheme, targets):
        # a file's tensors share no memory
        yield name, tensor.clone() if stack_of(name.rpartition(".")[0]) else tensor


# ------------------------------------------------------------------------------------------------- reading


def resolve_scheme(directory: str | Path) -> QuantScheme:
    """The scheme that a compressed-tensors checkpoint was written with.

    Which layers are quantized is read from the tensors. Layers that stay in high precision become ``skip``, by exact
    name. int3 comes back as int4, which holds the same codes.

    Raises:
        ValueError: listing what cannot be computed here, or when files are missing or broken, or the tensors do not
            fit the model.
    """
    with CheckpointReader(directory) as checkpoint:
        return checkpoint.scheme


def load_quantized(
    directory: str | Path, *, dtype: torch.dtype | None = None
) -> tuple[QuantScheme, Iterator[tuple[str, Tensor]]]:
    """A checkpoint's scheme, and everything an engine of that scheme loads.

    The engine's own config may be the checkpoint's (`lqrl.quant.checkpoint_reader.full_precision_config`) or that of
    the model it was exported from.

    Args:
        directory: what `save_quantized` wrote, or another checkpoint of the same formats.
        dtype: the engine's; weights that are not quantized and int4 scales are cast to it. ``None`` is the
            checkpoint's, which changes nothing.

    Returns:
        The scheme, and an iterator for `update_weights` that reads as it goes.

    Raises:
        ValueError: see `resolve_scheme`; also from the iterator, when a layer's tensors do not fit or a cache's scale
            is not one positive finite number.
    """
    scheme = resolve_scheme(directory)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with CheckpointReader(directory) as checkpoint:
            wanted = dtype or checkpoint.dtype
            yield from checkpoint.plain(wanted)
            yield from checkpoint.cache_scales().items()
            for layer in checkpoint.layers:
                for name, tensor in checkpoint.shipped(layer, wanted).items():
                    yield f"{layer}.{name}", tensor

    return scheme, tensors()


def load_dequantized(directory: str | Path, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's weights as the values that its codes stand for, rounded once to ``dtype``: masters to train on.

    Quantizing them again gives the same codes where the scheme's rule is a fixed point and ``dtype`` and the export
    dtype hold the values.

    Raises:
        ValueError: see `load_quantized`.
    """
    with CheckpointReader(directory) as checkpoint:
        yield from checkpoint.plain(dtype)  # scales of a cache are no weights: `load_cache_scales_`
        for layer in checkpoint.layers:
            for name, tensor in checkpoint.dequantized(layer, dtype):
                yield f"{layer}.{name}", tensor


def load_cache_scales_(model: nn.Module, directory: str | Path) -> bool:
    """Set the calibrated scales of ``model``'s cache to those of a checkpoint, where it has one for every layer.

    Args:
        model: prepared by `lqrl.quant.kv.prepare_kv_` for a scheme with calibrated scales.
        directory: a compressed-tensors checkpoint.

    Returns:
        Whether it has; the model is unchanged otherwise.

    Raises:
        ValueError: naming a scale that is not one positive finite number.
    """
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in SCALE_NAMES}
    if not buffers:
        return False
    with CheckpointReader(directory) as checkpoint:
        saved = checkpoint.cache_scales()
    if not saved.keys() >= buffers.keys():
        return False
    for name, buffer in buffers.items():
        buffer.copy_(saved[name])
    return True
