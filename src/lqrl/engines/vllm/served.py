"""A policy as vLLM holds it: which formats it has, the config it reads, the tensors it is sent and their names."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lqrl.engines.base import EngineSpec
from lqrl.engines.transaction import loadable_tensors
from lqrl.modeling.backbone import output_weight
from lqrl.quant.checkpoint import checkpoint_config, checkpoint_tensors
from lqrl.quant.compressed_format import KV_STATIC
from lqrl.quant.kv import SCALE_NAMES, calibrates_kv, prepare_kv_
from lqrl.quant.moe import holds_stacked_weights
from lqrl.quant.prepare import convert_
from lqrl.quant.scheme import QuantScheme, TensorFormat
from lqrl.quant.targets import target_modules

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_TOKEN_HEAD = {
    TensorFormat("int8", "token_head", dynamic=True): "int8_per_token_head",
    TensorFormat("fp8_e4m3", "token_head", dynamic=True): "fp8_per_token_head",
}


_DESCRIBED = ("architectures", "quantization_config", "tie_word_embeddings", "head_dtype")
# Fields of a config that no log-prob depends on, or that are compared elsewhere.
_NOT_COMPUTED_WITH = (
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range", "return_dict",
    "id2label", "label2id", "problem_type", "output_hidden_states", "output_attentions", "output_router_logits",
    "router_aux_loss_coef", "attention_dropout", "max_position_embeddings", "_attn_implementation",
)  # fmt: skip
# What vLLM's attention has beside the scales of a calibrated cache; 1 and 0 where nothing is loaded.
_ATTENTION_SCALES = frozenset({"q_scale", "prob_scale", "q_zero_point", "k_zero_point", "v_zero_point"})
_WITH_CACHE_SCALES = _ATTENTION_SCALES | set(SCALE_NAMES)


def check_spec(spec: EngineSpec) -> None:
    """Refuse what no vLLM does.

    Raises:
        NotImplementedError: for exact mode, or adapters beside the weights.
    """
    if spec.exact:
        raise NotImplementedError("vLLM's log-probs depend on the batch; exact: true needs TorchEngineFactory")
    if spec.lora is not None:
        raise NotImplementedError("the vLLM engine holds no adapters; set lora.refresh to merge")


def served_scheme(scheme: QuantScheme) -> QuantScheme:
    """The scheme in whose layout vLLM holds the codes of ``scheme``; the numbers are the same.

    fp8 with one scale a tensor is held with that scale for every channel: vLLM would round the codes of fused layers
    again, through fp16.

    Raises:
        ValueError: when vLLM has no such format, or computes another function with it.
    """
    if scheme.weight is None:
        return scheme
    reason = _refusal(scheme.weight, scheme.activation)
    if reason is not None:
        raise ValueError(
            f"vLLM does not run scheme {scheme.name!r}: {reason}; take another one, or lqrl.engines.TorchEngineFactory"
        )
    if scheme.weight.granularity == "tensor":
        return replace(scheme, weight=replace(scheme.weight, granularity="channel"))
    return scheme


def _refusal(weight: TensorFormat, activation: TensorFormat | None) -> str | None:
    if weight.dtype == "nf4":
        return "nf4 is a format of bitsandbytes, which is no part of vLLM"
    if weight.dtype == "fp8_e4m3" and weight.scale_dtype == "e8m0":
        return "where the card has no block-scaled product it leaves the activations of mxfp8 as they are"
    if activation is None:
        return None
    if activation.dtype == "fp4_e2m1":
        return "its nvfp4 activations have a calibrated global scale, here it is the token's"
    if activation.granularity == "tensor":
        return "its activations with one scale a tensor are calibrated, here the scale is that of the batch"
    if weight.dtype == "int4":
        return f"it has no product of int4 weights with {activation.dtype} activations"
    return None


def kv_cache_dtype(scheme: QuantScheme, device_type: str) -> str:
    """The cache format by the name it has in vLLM.

    Raises:
        ValueError: when vLLM has no such cache there.
    """
    kept = scheme.kv_cache
    if kept is None:
        return "auto"
    if kept == KV_STATIC and scheme.weight is not None:
        return "fp8_e4m3"
    if kept == KV_STATIC:
        raise ValueError(
            f"scheme {scheme.name!r}: vLLM reads calibrated cache scales with quantized weights only; quantize them "
            "too, or take +kv_fp8 on a GPU"
        )
    if kept not in _TOKEN_HEAD:
        raise ValueError(f"scheme {scheme.name!r}: vLLM has no cache that holds keys and values as {kept}")
    if device_type == "cpu":
        raise ValueError(
            f"scheme {scheme.name!r}: vLLM's CPU attention takes {_TOKEN_HEAD[kept]} and computes with a plain cache "
            "of the wrong type; take +kv_fp8_static or no cache format on the CPU"
        )
    return _TOKEN_HEAD[kept]


class ServedModel:
    """The policy of ``spec`` without weights.

    Attributes:
        config: what vLLM reads as config.json.
        tensors: everything that `update_weights` is sent, by the names of `export_weights`; on the meta device.
        aliases: other names of tied tensors, and the name they are sent under.
        vocabulary: rows of the output head.

    Args:
        spec: what to serve.
        unties: hold the head apart from a tied embedding, for a vLLM whose kernels keep a copy of the head that a
            refresh of the embedding does not reach.
        fp32_head: compute the logits in fp32.

    Raises:
        ValueError: see `served_scheme`; or for a model whose layers the scheme cannot hold.
    """

    def __init__(self, spec: EngineSpec, *, unties: bool, fp32_head: bool = False) -> None:
        self.scheme = served_scheme(spec.scheme)
        self._shares_scale = self.scheme.weight != spec.scheme.weight
        model = _without_weights(spec)
        self.targets = frozenset(target_modules(model, spec.scheme))
        if self._shares_scale and any(holds_stacked_weights(model.get_submodule(name)) for name in self.targets):
            raise ValueError(
                f"scheme {spec.scheme.name!r}: vLLM's experts have no weights with one scale and activations with one "
                "a token; use fp8_per_channel"
            )
        self.config = _config(model, self.scheme, spec.dtype)
        self.vocabulary = output_weight(model).shape[0]
        convert_(model, spec.scheme)
        prepare_kv_(model, spec.scheme)
        self.tensors, self.aliases = loadable_tensors(model)
        self._copies: dict[str, str] = {}
        if unties and self.aliases:
            self._copies = self.aliases
            self.config.tie_word_embeddings = False
        if fp32_head:
            self.config.head_dtype = "float32"

    def write_config(self, directory: Path) -> None:
        """Write config.json, all that vLLM needs of a model directory when weights and tokens come from elsewhere."""
        self.config.save_pretrained(directory)

    def checkpoint_stream(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """``weights``, a complete set of `tensors`, under the names and in the layouts that vLLM loads."""
        yield from checkpoint_tensors(self._channel_scales(weights), self.scheme, self.targets)
        for name, source in self._copies.items():
            yield name, weights[source]

    def may_miss(self, name: str) -> bool:
        """Whether vLLM need not load its parameter ``name``: it is tied to another, or has a default."""
        if name in self.aliases and name not in self._copies:
            return True
        return name.rpartition(".")[2] in (_ATTENTION_SCALES if calibrates_kv(self.scheme) else _WITH_CACHE_SCALES)

    def _channel_scales(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            prefix, _, last = name.rpartition(".")
            if self._shares_scale and last == "weight_scale" and prefix in self.targets:
                tensor = tensor.reshape(1, 1).expand(self.tensors[f"{prefix}.weight"].shape[0], 1)
            yield name, tensor


def described(config: PretrainedConfig) -> dict[str, Any]:
    """What decides how a model of this config is held and computed, as JSON has it; sizes and the like as ``model``."""
    said: dict[str, Any] = {name: getattr(config, name, None) for name in _DESCRIBED}
    said["model"] = {
        name: value
        for name, value in config.to_dict().items()
        if name not in (*_DESCRIBED, *_NOT_COMPUTED_WITH) and not name.endswith("_token_id")
    }
    return json.loads(json.dumps(said, default=str))


def _without_weights(spec: EngineSpec) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(spec.config), dtype=spec.dtype)
    model.tie_weights()
    return model


def _config(model: PreTrainedModel, scheme: QuantScheme, dtype: torch.dtype) -> PretrainedConfig:
    if scheme.quantizes:
        return checkpoint_config(model, scheme, dtype)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], dtype
    return config
