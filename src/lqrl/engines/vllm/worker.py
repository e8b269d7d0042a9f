"""What the workers of a vLLM server do for `VLLMServerEngine`: methods that vLLM mixes into them.

A server that lqrl did not start needs ``--worker-extension-cls lqrl.engines.vllm.worker.ServedWorker`` and
``VLLM_SERVER_DEV_MODE=1``; then ``POST /collective_rpc`` reaches them.
"""

from __future__ import annotations

import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from lqrl.engines.vllm import reload
from lqrl.engines.vllm.connectors import check_connectors
from lqrl.engines.vllm.patches import install_patches
from lqrl.engines.vllm.served import described
from lqrl.engines.vllm.transfer import read_weights, this_machine
from lqrl.engines.vllm.versions import device_type

if "vllm" in sys.modules:  # whose worker imports this before it builds its model
    install_patches(import_module("vllm").__version__, device_type())


_PROCESS = uuid4().hex  # two URLs may lead to one server


class ServedWorker:
    """Mixed into vLLM's worker, whose attributes it reads. Arguments and results are JSON."""

    lqrl_has = ""

    def lqrl_facts(self) -> dict[str, Any]:
        """What is served, and by which vLLM."""
        config = _worker(self).vllm_config
        platform = device_type()
        return {
            "vllm": import_module("vllm").__version__,
            "machine": this_machine(),
            "process": _PROCESS,
            "platform": platform,
            "capability": torch.cuda.get_device_capability() if platform == "cuda" else None,
            "max_model_len": config.model_config.max_model_len,
            "connected": config.kv_transfer_config is not None,
            "keeps": _keeps(config.kv_transfer_config),
            "cuts_prompts": _cuts_prompts(config.scheduler_config, config.model_config.max_model_len),
            "served": described(config.model_config.hf_config)
            | {
                "dtype": str(config.model_config.dtype),
                "kv_cache_dtype": config.cache_config.cache_dtype,
                "logprobs_mode": config.model_config.logprobs_mode,
                "generation_config": config.model_config.generation_config,
                "data_parallel_size": config.parallel_config.data_parallel_size,
                "speculative": config.speculative_config is not None,
                "quantization": config.model_config.quantization,
            },
        }

    def lqrl_load(self, directory: str, version: str) -> dict[str, Any]:
        """Load the complete set of weights in ``directory``, which have ``version`` from its beginning on.

        Returns:
            ``missed`` parameters that were not loaded, ``moved`` ones, and a ``digest`` of what is held; or an
            ``error``, and whether the worker is ``broken``, so that no further load can succeed.
        """
        self.lqrl_has = version
        worker = _worker(self)
        before = reload.addresses(worker)
        try:
            # closed before the answer: the learner frees then what the worker may have open
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                closing(read_weights(Path(directory), worker.device)) as weights,
            ):
                missed = reload.reload_weights(worker, weights)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "broken": not _abandoned(worker)}
        after = reload.addresses(worker)
        moved = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        return {"missed": missed, "moved": moved, "digest": reload.model_digest(worker)}

    def lqrl_seal(self, loaded: str, version: str) -> dict[str, str]:
        """Call the weights ``version`` if they are still those that came as ``loaded``; what they are called then."""
        if self.lqrl_has == loaded:
            self.lqrl_has = version
        return self.lqrl_version()

    def lqrl_version(self) -> dict[str, str]:
        """What the weights are called; nothing before the first load."""
        return {"version": self.lqrl_has}


def _keeps(transfer: Any) -> str:
    """Why caches of its connector would outlive a refresh; nothing when they would not."""
    try:
        check_connectors(transfer)
    except ValueError as error:
        return str(error)
    return ""


def _cuts_prompts(scheduler: Any, longest: int) -> bool:
    """Whether a prompt may be computed in parts, because a batch has no room for the whole of it."""
    room = scheduler.max_num_batched_tokens >= scheduler.max_num_seqs * longest
    return bool(scheduler.long_prefill_token_threshold) or (scheduler.enable_chunked_prefill and not room)


def _worker(mixed: ServedWorker) -> Any:
    return mixed


def _abandoned(worker: Any) -> bool:
    try:
        with torch.inference_mode(False), torch.no_grad():
            reload.abandon_reload(worker)
    except Exception:
        return False  # what it says was caused by the first error, which is reported
    return True
