"""A server's own account of itself, held against the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm.process import check_card
from lqrl.engines.vllm.served import ServedModel, described, kv_cache_dtype
from lqrl.engines.vllm.versions import check_version
from lqrl.quant.compressed_format import parse_quantization_config
from lqrl.quant.scheme import PRESETS


@dataclass(frozen=True)
class Inspection:
    """Whether a replica serves what it should.

    Attributes:
        spec: what the engine was built for; its device is the servers'.
        served: the policy as they hold it.
        allow_untested_version: as in `lqrl.engines.vllm.VLLMServerEngineFactory`.
        machine: the one that it must run on, by `lqrl.engines.vllm.transfer.this_machine`; ``None`` is any.
    """

    spec: EngineSpec
    served: ServedModel
    allow_untested_version: bool
    machine: str | None = None

    def __call__(self, facts: Mapping[str, Any]) -> None:
        """Look at what the replica says of itself.

        Raises:
            ValueError: when it holds another model, or another way to compute it.
            EngineUnavailableError: for a vLLM that is not tested.
        """
        if not self.allow_untested_version:
            check_version(facts["vllm"])
        if facts["capability"] is not None:
            check_card(self.spec.scheme, facts["capability"])
        if facts["platform"] != self.spec.device.type:
            raise ValueError(f"it runs on {facts['platform']}, another replica on {self.spec.device.type}")
        if self.machine not in (None, facts.get("machine")):
            raise ValueError(
                "it is on another machine than the learner, whose GPU it cannot read; set transport: files"
            )
        if self.spec.device.type == "cpu" and facts.get("cuts_prompts"):
            raise ValueError(
                "it cuts prompts, after which vLLM on a CPU cannot draw a sample with a seed; start it with "
                "--no-enable-chunked-prefill"
            )
        if facts.get("keeps"):
            raise ValueError(facts["keeps"])
        if facts["max_model_len"] < self.spec.max_model_len:
            raise ValueError(
                f"it has max_model_len {facts['max_model_len']}; start it with at least {self.spec.max_model_len}"
            )
        wanted = described(self.served.config) | {
            "dtype": str(self.spec.dtype),
            "kv_cache_dtype": kv_cache_dtype(self.spec.scheme, self.spec.device.type),
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "data_parallel_size": 1,
            "speculative": False,
        }
        theirs, platform = facts["served"], self.spec.device.type
        scheme = f"scheme {self.spec.scheme.name!r}"
        if self.served.scheme.weight != self.spec.scheme.weight:
            scheme += f", which vLLM holds as {_scheme_of(wanted['quantization_config'])}"
        said = [_difference(name, theirs.get(name), wanted[name], scheme, platform) for name in wanted]
        if wanted["quantization_config"] is None and theirs.get("quantization") is not None:
            said.append(f"it quantizes what it loads ({theirs['quantization']}): start it without --quantization")
        if any(said):
            raise ValueError(f"{'; '.join(filter(None, said))} (docs/vllm.md, Servers)")


_FLAGS = {
    "dtype": "--dtype {}",
    "kv_cache_dtype": "--kv-cache-dtype {}",
    "logprobs_mode": "--logprobs-mode {}",
    "generation_config": "--generation-config {}",
    "head_dtype": '--hf-overrides \'{{"head_dtype": "{}"}}\'',
    "data_parallel_size": "one copy of the model, and give the urls of several servers",
    "speculative": "no --speculative-config",
    "architectures": "the recipe's model",
    "tie_word_embeddings": "the recipe's model, whose config.json has it so",
}
"""What a server is started with to serve what the recipe has."""
_MOST_FIELDS = 4  # of a config that an error lists
_TIED_ON_CPU = (
    "its head is tied to the embedding, and vLLM's CPU kernels keep a copy of it that a refresh of the embedding does "
    "not reach: start it with a copy of MODEL that has tie_word_embeddings: false in its config.json"
)
_CHECKPOINT = {
    False: "the policy itself as MODEL",
    True: "a checkpoint of that scheme as MODEL (lqrl.quant.checkpoint.save_quantized)",
}


def _difference(name: str, theirs: Any, ours: Any, scheme: str, platform: str) -> str:
    """What is not as the recipe has it, and how it becomes so; nothing where nothing is."""
    if name == "quantization_config":
        return _difference_of_schemes(theirs, ours, scheme)
    if name == "model":
        return _difference_of_models(theirs, ours)
    if theirs == ours:
        return ""
    if name == "tie_word_embeddings" and theirs and platform == "cpu":
        return _TIED_ON_CPU
    if name == "head_dtype" and ours is None:
        return f"it computes logits in {theirs}: set fp32_head: true, or start it without head_dtype"
    words = f"it serves {name} {json.dumps(theirs)}, the recipe has {json.dumps(ours)}: "
    return words + "start it with " + _FLAGS[name].format(str(ours).removeprefix("torch."))


def _difference_of_models(theirs: Any, ours: Mapping[str, Any]) -> str:
    if not isinstance(theirs, dict):
        return "it does not say what its model computes: its workers need the learner's lqrl"
    # A field that only one side has comes from another release of transformers.
    unequal = [name for name in ours if name in theirs and not _alike(theirs[name], ours[name])]
    words = [
        f"{name} {json.dumps(theirs[name])} instead of {json.dumps(ours[name])}" for name in unequal[:_MOST_FIELDS]
    ]
    return f"its model has {', '.join(words)}: start it with the recipe's model" if words else ""


def _alike(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(_alike(theirs[name], ours[name]) for name in ours.keys() & theirs.keys())
    return theirs == ours


def _difference_of_schemes(theirs: Any, ours: Any, scheme: str) -> str:
    if isinstance(theirs, dict) and isinstance(ours, dict):  # vLLM adds entries of its own
        theirs = {key: theirs.get(key) for key in ours}
    if theirs == ours:
        return ""
    served = _scheme_of(theirs)
    if isinstance(theirs, dict) and served == _scheme_of(ours):
        return f"it serves {scheme} with {', '.join(_unequal(theirs, ours))}: start it with {_CHECKPOINT[True]}"
    return f"it serves {served}, the recipe has {scheme}: start it with {_CHECKPOINT[ours is not None]}"


def _scheme_of(config: Any) -> str:
    """The scheme that a ``quantization_config`` is of, in words."""
    if config is None:
        return "a model without quantization"
    if not isinstance(config, dict):
        return f"a quantization that lqrl cannot read ({str(config)[:60]})"
    try:
        found = parse_quantization_config(config, "")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return f"a quantization that lqrl does not have ({error})"
    formats = found.weight, found.activation
    for name, preset in PRESETS.items():
        if (preset.weight, preset.activation) == formats:
            return f"scheme '{name}{'+kv_fp8_static' if found.kv_cache else ''}'"
    return f"weights as {found.weight}, activations as {found.activation}"


def _unequal(theirs: Any, ours: Any, at: str = "") -> Iterator[str]:
    """The entries of two nested objects that differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            yield from _unequal(theirs.get(key), ours.get(key), f"{at}.{key}" if at else key)
    elif theirs != ours:
        yield f"{at} {json.dumps(theirs)} instead of {json.dumps(ours)}"
