"""Compressed-tensors checkpoints: what an engine is sent, saved for vLLM and transformers, and read back.

Codes and scales in the file are those of the training run, bit for bit; no scale is rounded to the model's dtype. (vLLM
and transformers round the fp32 scales of int8 weight-only to it when they load: they hold the scales of every
``pack-quantized`` weight so. int4's are in the export dtype already.)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lqrl.quant.compressed_format import (
    INSTEAD,
    METHOD,
    checkpoint_format,
    parse_quantization_config,
    quantization_config,
    shipped_tensors,
    stored_tensors,
)
from lqrl.quant.kv import SCALE_NAMES
from lqrl.quant.lora import AdaptedLinear
from lqrl.quant.methods import LinearMethod, linear_method
from lqrl.quant.moe import holds_stacked_weights
from lqrl.quant.prepare import export_weights
from lqrl.quant.scheme import PRESETS, QuantScheme, target_modules

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
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
    Weights of an earlier export in ``directory`` are removed; config.json comes last, so that a directory that holds
    one is whole.

    Args:
        model: the learner's, prepared or plain.
        scheme: see `lqrl.quant.compressed_format.checkpoint_format` for what can be held.
        directory: made if it is not there.
        export_dtype: of the weights that are not quantized.
        max_shard_bytes: a file is closed before it would exceed this; a tensor is never split.

    Raises:
        ValueError: see `check_exportable`, and `export_weights` for weights that are not finite.
    """
    check_exportable(model, scheme)
    target = Path(directory)
    targets = target_modules(model, scheme)
    ignored = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in set(targets)]
    head = [name for name in targets if model.get_submodule(name) is model.get_output_embeddings()]
    settings = quantization_config(scheme, ignored, [*head, "Linear"])  # vLLM's head is no "Linear": it needs its name
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], export_dtype
    config.quantization_config = settings
    if head:
        config.tie_word_embeddings = False
    target.mkdir(parents=True, exist_ok=True)
    for old in [target / "config.json", *target.glob("model*.safetensors"), target / _INDEX]:
        old.unlink(missing_ok=True)
    _write(_stored(model, scheme, frozenset(targets), export_dtype), target, max_shard_bytes)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(target)
    config.save_pretrained(target)


def check_exportable(model: nn.Module, scheme: QuantScheme) -> None:
    """Refuse before training what `save_quantized` could not write after it.

    Raises:
        ValueError: when no checkpoint holds the scheme, or the model has stacked experts or adapters beside its codes.
    """
    checkpoint_format(scheme)
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            raise ValueError(
                f"{name} computes with its codes and an adapter, of which such a checkpoint holds the codes alone; "
                f"train with Lora(refresh='merge'), or {INSTEAD}"
            )
        if holds_stacked_weights(module):
            raise ValueError(
                f"{name} stacks the weights of experts, which such a checkpoint names one by one; {INSTEAD}"
            )


def _stored(
    model: nn.Module, scheme: QuantScheme, targets: frozenset[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in export_weights(model, scheme, export_dtype=dtype):
        prefix, _, last = name.rpartition(".")
        if prefix in targets and last != "bias":
            for stored, value in stored_tensors(last, tensor, scheme):
                yield f"{prefix}.{stored}", value
        else:
            yield name, tensor


def _write(tensors: Iterator[tuple[str, Tensor]], directory: Path, limit: int) -> None:
    """One file, or several and an index; holds one file's tensors in memory."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def close() -> None:
        nonlocal size
        save_file(shard, directory / _part(len(files)), metadata={"format": "pt"})
        files.append(list(shard))
        shard.clear()
        size = 0

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            close()
        shard[name] = tensor.detach().to("cpu").contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    close()
    if len(files) == 1:
        (directory / _part(0)).rename(directory / _WEIGHTS)
        return
    weight_map = {}
    for number, names in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / _part(number)).rename(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _part(number: int) -> str:
    return f"model-part-{number:05d}.safetensors"


# ------------------------------------------------------------------------------------------------- reading


def holds_codes(directory: str | Path) -> bool:
    """Whether ``directory`` is a compressed-tensors checkpoint, by its config.json; false where there is none."""
    path = Path(directory) / "config.json"
    return path.is_file() and (_settings(directory) or {}).get("quant_method") == METHOD


def resolve_scheme(directory: str | Path) -> QuantScheme:
    """The scheme that a compressed-tensors checkpoint was written with.

    Which layers are quantized is read from the tensors. Layers that stay in high precision become ``skip``, by exact
    name. int3 comes back as int4, which holds the same codes. A cache with scales per token is no part of a checkpoint.

    Raises:
        ValueError: listing what cannot be computed here, or when the tensors do not fit the model.
        FileNotFoundError: without weights.
    """
    with _Checkpoint(directory) as checkpoint:
        return checkpoint.scheme


def load_quantized(
    directory: str | Path, *, dtype: torch.dtype | None = None
) -> tuple[QuantScheme, Iterator[tuple[str, Tensor]]]:
    """A checkpoint's scheme, and everything an engine of that scheme loads.

    The engine's own config may be the checkpoint's (`full_precision_config`) or that of the model it was exported from.

    Args:
        directory: what `save_quantized` wrote, or another checkpoint of the same formats.
        dtype: the engine's; weights that are not quantized and int4 scales are cast to it. ``None`` is the
            checkpoint's, which changes nothing.

    Returns:
        The scheme, and an iterator for `update_weights` that reads as it goes.

    Raises:
        ValueError: see `resolve_scheme`; also from the iterator, when a layer's tensors do not fit.
    """
    scheme = resolve_scheme(directory)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with _Checkpoint(directory) as checkpoint:
            wanted = dtype or checkpoint.dtype
            yield from checkpoint.plain(wanted)
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
    with _Checkpoint(directory) as checkpoint:
        for name, tensor in checkpoint.plain(dtype):
            if name.rpartition(".")[2] not in SCALE_NAMES:  # a cache's scales are calibrated anew
                yield name, tensor
        for layer in checkpoint.layers:
            # fp32: int4 scales are not rounded to the masters' dtype on the way.
            tensors = checkpoint.shipped(layer, torch.float32)
            yield f"{layer}.weight", checkpoint.method.dequantize(tensors, dtype)


def full_precision_config(directory: str | Path) -> PretrainedConfig:
    """The model's config without its ``quantization_config``."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(directory))
    vars(config).pop("quantization_config", None)
    return config


def _settings(directory: str | Path) -> dict[str, Any] | None:
    content = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    return cast("dict[str, Any] | None", content.get("quantization_config"))


class _Checkpoint:
    """An open directory: its files, its model's structure on the meta device, and what its config says."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}

    def __enter__(self) -> _Checkpoint:
        try:
            self._read()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _read(self) -> None:
        from safetensors import safe_open
        from transformers import AutoModelForCausalLM

        paths = sorted(self.directory.glob("model*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{self.directory} holds no model*.safetensors")
        for path in paths:
            file = self._open.enter_context(safe_open(path, framework="pt"))
            self._files[path.name] = file
            self._file_of.update(dict.fromkeys(file.keys(), path.name))
        self.layers = sorted(name.removesuffix(".weight_scale") for name in self._file_of if _is_scale(name))
        config = full_precision_config(self.directory)
        self.dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        self.scheme = self._scheme()
        self.method: LinearMethod = linear_method(self.scheme)

    def _scheme(self) -> QuantScheme:
        try:
            scheme = parse_quantization_config(_settings(self.directory) or {}, "compressed-tensors")
            linear_method(scheme)
        except ValueError as error:
            raise ValueError(
                f"{self.directory} cannot be computed here: {error}; start from the full-precision checkpoint"
            ) from error
        formats = (scheme.weight, scheme.activation)
        names = [n for n, preset in PRESETS.items() if (preset.weight, preset.activation) == formats]
        scheme = replace(
            scheme, name=(names or [scheme.name])[0] + ("" if scheme.kv_cache is None else "+kv_fp8_static")
        )
        head = [n for n, m in self.model.named_modules() if m is self.model.get_output_embeddings()]
        if set(head) & set(self.layers):
            scheme = replace(scheme, name=f"{scheme.name}+lm_head", lm_head=True)
        candidates = target_modules(self.model, scheme)
        strangers = sorted(set(self.layers) - set(candidates))
        if strangers or not self.layers:
            raise ValueError(
                f"{self.directory} quantizes {', '.join(strangers[:5]) or 'no layer'}, which "
                f"{type(self.model).__name__} has no quantizable linear layer for"
            )
        return replace(scheme, skip=tuple(name for name in candidates if name not in set(self.layers)))

    def _tensor(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get_tensor(name)

    def plain(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """What is not quantized; a second name of a tied weight is left out."""
        once = {name for name, _ in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        quantized = set(self.layers)
        for name in self._file_of:
            prefix, _, last = name.rpartition(".")
            if name in tied or (prefix in quantized and last != "bias"):
                continue
            tensor = self._tensor(name)
            yield name, tensor.to(dtype) if tensor.is_floating_point() and last not in SCALE_NAMES else tensor

    def shipped(self, layer: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a quantized layer as its method ships them."""
        linear = cast(nn.Linear, self.model.get_submodule(layer))
        like = torch.empty(linear.out_features, linear.in_features, dtype=dtype, device="meta")
        stored = {n.rpartition(".")[2]: self._tensor(n) for n in self._file_of if n.rpartition(".")[0] == layer}
        stored.pop("bias", None)
        assert self.scheme.weight is not None
        try:
            return shipped_tensors(stored, self.scheme.weight, self.method.quantize(like))
        except ValueError as error:
            raise ValueError(f"{layer} in {self.directory} does not fit: {error}") from error


def _is_scale(name: str) -> bool:
    return name.endswith(".weight_scale")
