"""`CheckpointReader`: an open compressed-tensors checkpoint, and what its config says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lqrl.quant.checkpoint_files import AGAIN, CONFIG, INDEX, read_object, weight_files
from lqrl.quant.compressed_format import (
    ACTIVATIONS,
    CACHE,
    METHOD,
    parse_quantization_config,
    shipped_tensors,
    with_unwritten,
)
from lqrl.quant.kv import SCALE_NAMES, kv_method
from lqrl.quant.methods import LinearMethod, linear_method
from lqrl.quant.moe import PROJECTIONS
from lqrl.quant.scheme import ADDITIONS, PRESETS, QuantScheme
from lqrl.quant.stacks import CHILDREN, stack_of, stacked
from lqrl.quant.targets import target_modules

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SCALE = ".weight_scale"
_CODES = frozenset({torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn})


def holds_codes(directory: str | Path) -> bool:
    """Whether ``directory`` is a compressed-tensors checkpoint, by its config.json; false where there is none.

    Raises:
        ValueError: when config.json is broken.
    """
    path = Path(directory) / CONFIG
    return path.is_file() and (_config(directory)["quantization_config"] or {}).get("quant_method") == METHOD


def full_precision_config(directory: str | Path) -> PretrainedConfig:
    """The model's config without what says how it is quantized."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(directory))
    for key in ("quantization_config", ACTIVATIONS, CACHE):
        vars(config).pop(key, None)
    return config


def _config(directory: str | Path) -> dict[str, Any]:
    config = read_object(Path(directory) / CONFIG)
    settings = config.setdefault("quantization_config", None) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"quantization_config of {directory} is {settings!r}, where an object is needed; {AGAIN}")
    return config


class CheckpointReader:
    """An open directory: its files, its model's structure on the meta device, and what its config says.

    A context manager; tensors are read while it is open.

    Args:
        directory: a compressed-tensors checkpoint.

    Attributes:
        layers: names of the quantized layers as `target_modules` gives them: stacked experts are one.
        scheme: see `lqrl.quant.checkpoint.resolve_scheme`.
        method: the operations of the scheme.
        dtype: what is not quantized is in.
        model: the model, without weights.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._tensors_of: dict[str, dict[str, str]] = {}

    def __enter__(self) -> CheckpointReader:
        try:
            self._read()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _read(self) -> None:
        from transformers import AutoModelForCausalLM

        self._config = _config(self.directory)
        self._open_files()
        for name in self._file_of:
            prefix, _, last = name.rpartition(".")
            self._tensors_of.setdefault(prefix, {})[last] = name
        quantized = [name.removesuffix(_SCALE) for name in self._file_of if name.endswith(_SCALE)]
        self.layers = sorted({stack_of(name) or name for name in quantized})
        config = full_precision_config(self.directory)
        self.dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        self.model.tie_weights()  # not done on the meta device
        self.scheme = self._scheme()
        self.method: LinearMethod = linear_method(self.scheme)

    def _open_files(self) -> None:
        from safetensors import SafetensorError, safe_open

        names, indexed = weight_files(self.directory)
        for name in names:
            try:
                file = self._open.enter_context(safe_open(self.directory / name, framework="pt"))
            except SafetensorError as error:
                raise ValueError(
                    f"{self.directory / name} is broken ({error}), it may have been cut; {AGAIN}"
                ) from error
            self._files[name] = file
            held = dict.fromkeys(file.keys(), name)
            self._file_of.update({tensor: own for tensor, own in held.items() if indexed.get(tensor, own) == own})
        lost = sorted(indexed.keys() - self._file_of.keys())
        if lost:
            raise ValueError(
                f"{self.directory} lacks {lost[0]} and {len(lost) - 1} more tensors that {INDEX} names; {AGAIN}"
            )

    def _scheme(self) -> QuantScheme:
        try:
            scheme = parse_quantization_config(self._config["quantization_config"] or {}, METHOD)
            scheme = with_unwritten(scheme, self._config)
            linear_method(scheme)
            kv_method(scheme)
        except ValueError as error:
            raise ValueError(
                f"{self.directory} cannot be computed here: {error}; start from the full-precision checkpoint"
            ) from error
        formats = (scheme.weight, scheme.activation)
        names = [n for n, preset in PRESETS.items() if (preset.weight, preset.activation) == formats]
        head = [n for n, m in self.model.named_modules() if m is self.model.get_output_embeddings()]
        lm_head = bool(set(head) & set(self.layers))
        fields = {"lm_head": lm_head, "kv_cache": scheme.kv_cache}
        said = [n for n, sets in ADDITIONS.items() if all(value and fields[f] == value for f, value in sets.items())]
        scheme = replace(scheme, name="+".join([(names or [scheme.name])[0], *said]), lm_head=lm_head)
        candidates = target_modules(self.model, scheme)
        strangers = sorted(set(self.layers) - set(candidates))
        if strangers or not self.layers:
            raise ValueError(
                f"{self.directory} quantizes {', '.join(strangers[:5]) or 'no layer'}, which "
                f"{type(self.model).__name__} has no quantizable layer for"
            )
        return replace(scheme, skip=tuple(name for name in candidates if name not in set(self.layers)))

    def _tensor(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get_tensor(name)

    def plain(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """What is not quantized, in ``dtype`` but for integers; tied weights come once, scales of a cache do not.

        Raises:
            ValueError: when an expert lacks a tensor, a layer holds codes without their scale, or a tied weight comes
                twice with different values.
        """
        once = {name for name, _ in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        quantized, stacks = set(self.layers), set()
        for name in self._file_of:
            prefix, _, last = name.rpartition(".")
            stack = stack_of(prefix)
            if last in SCALE_NAMES or ((stack or prefix) in quantized and last != "bias"):
                continue
            if name in tied:
                self._check_tied(name)
                continue
            if stack is not None:
                stacks.add(stack)
                continue
            tensor = self._tensor(name)
            if tensor.dtype in _CODES and last.startswith("weight"):
                raise ValueError(f"{name} in {self.directory} holds codes, but {prefix}{_SCALE} is missing")
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
        for stack in sorted(stacks):
            experts = [
                {child: {"weight": self._expert_weight(f"{stack}.{e}.{child}").to(dtype)} for child in CHILDREN}
                for e in range(self._count(stack))
            ]
            for name, tensor in stacked(experts).items():
                yield f"{stack}.{name.removesuffix('_weight')}", tensor

    def _check_tied(self, name: str) -> None:
        parameter = self.model.get_parameter(name)
        first = next(n for n, p in self.model.named_parameters() if p is parameter)
        if first in self._file_of and not torch.equal(self._tensor(name), self._tensor(first)):
            raise ValueError(
                f"config.json in {self.directory} ties {name} to {first}, but the checkpoint holds another {name}; set "
                "tie_word_embeddings to false there"
            )

    def _expert_weight(self, layer: str) -> Tensor:
        if "weight" not in self._tensors_of.get(layer, {}):
            raise ValueError(f"{self.directory} does not hold {layer}.weight")
        return self._tensor(f"{layer}.weight")

    def _count(self, stack: str) -> int:
        return len(self.model.get_submodule(stack).get_parameter(PROJECTIONS[0]))

    def cache_scales(self) -> dict[str, Tensor]:
        """Calibrated scales of a key/value cache, by name, fp32 ``[1]``.

        Raises:
            ValueError: naming a scale that is not one positive finite number.
        """
        scales: dict[str, Tensor] = {}
        for name in self._file_of:
            if name.rpartition(".")[2] in SCALE_NAMES:
                scale = self._tensor(name).float().reshape(-1)
                if scale.numel() != 1 or not 0 < float(scale) < torch.inf:
                    raise ValueError(
                        f"{name} in {self.directory} is {scale.tolist()}, not one positive finite scale of a layer"
                    )
                scales[name] = scale
        return scales

    def shipped(self, layer: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a quantized layer as an engine is sent them, by last names.

        Args:
            layer: one of ``layers``.
            dtype: of int4 scales.

        Raises:
            ValueError: when they do not fit.
        """
        module = self.model.get_submodule(layer)
        if isinstance(module, nn.Linear):
            return self._matrix(layer, (module.out_features, module.in_features), dtype)
        inner, hidden = module.get_parameter("down_proj").shape[:0:-1]
        shapes = {child: (hidden, inner) if child == "down_proj" else (inner, hidden) for child in CHILDREN}
        experts = [
            {child: self._matrix(f"{layer}.{e}.{child}", shape, dtype) for child, shape in shapes.items()}
            for e in range(self._count(layer))
        ]
        try:
            return stacked(experts)
        except ValueError as error:
            raise ValueError(f"{layer} in {self.directory} does not fit: {error}") from error

    def _matrix(self, layer: str, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        stored = {last: self._tensor(name) for last, name in self._tensors_of.get(layer, {}).items() if last != "bias"}
        assert self.scheme.weight is not None
        like = self.method.quantize(torch.empty(shape, dtype=dtype, device="meta"))
        try:
            return shipped_tensors(stored, self.scheme.weight, like)
        except ValueError as error:
            raise ValueError(f"{layer} in {self.directory} does not fit: {error}") from error

    def dequantized(self, layer: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights of a quantized layer as the values of its codes, rounded once to ``dtype``, by last names."""
        # fp32: int4 scales are not rounded to the masters' dtype on the way.
        tensors = self.shipped(layer, torch.float32)
        if isinstance(self.model.get_submodule(layer), nn.Linear):
            yield "weight", self.method.dequantize(tensors, dtype)
            return
        for projection in PROJECTIONS:
            prefix = f"{projection}_"
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            experts = ({name: t[e] for name, t in own.items()} for e in range(self._count(layer)))
            yield projection, torch.stack([self.method.dequantize(expert, dtype) for expert in experts])
