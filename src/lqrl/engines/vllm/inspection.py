"""A server's own account of itself, held against the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lqrl.engines.base import EngineSpec
from lqrl.engines.vllm.process import check_card
from lqrl.engines.vllm.served import ServedModel, described, kv_cache_dtype
from lqrl.engines.vllm.versions import check_version


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
        for name, value in wanted.items():
            theirs = facts["served"][name]
            if isinstance(value, dict) and isinstance(theirs, dict):  # vLLM adds entries of its own
                theirs = {key: theirs.get(key) for key in value}
            if theirs != value:
                raise ValueError(
                    f"it serves {name} {json.dumps(theirs)}, the recipe has {json.dumps(value)}; start it with the "
                    "recipe's model, dtype and scheme, as docs/vllm.md says"
                )
