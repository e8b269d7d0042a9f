"""What a vLLM shares with the process it runs in: variables, random numbers, distributed groups."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lqrl.engines.base import EngineSpec
from lqrl.quant.scheme import QuantScheme, TensorFormat

_MXFP4 = TensorFormat("fp4_e2m1", "group", group_size=32, scale_dtype="e8m0")

_shared: list[Any] = []
_open: list[Any] = []
_retired: list[Any] = []


def check_process(spec: EngineSpec, platform: str, ranks: int = 1) -> None:
    """Refuse a place where vLLM would run elsewhere than it was asked to, or not at all.

    Args:
        spec: its device is what was asked for.
        platform: the device type of the installed vLLM.
        ranks: how many hold it together.

    Raises:
        ValueError: when it is built for another device, its CPU kernels do not have the width of the heads, the card
            makes another function of the scheme, or the run has not as many ranks.
        NotImplementedError: of a single rank, on a GPU that is not the process's first, or in a run of several ranks.
    """
    if spec.device.type != platform:
        raise ValueError(
            f"the installed vLLM runs on {platform or 'no device here'}, the engine is asked for on {spec.device}; "
            "set trainer.accelerator, or install the other build of vLLM"
        )
    if ranks == 1 and spec.device.index not in (None, 0):
        raise NotImplementedError(
            f"vLLM in this process runs on its first GPU, the engine is asked for on {spec.device}; choose the card "
            "with CUDA_VISIBLE_DEVICES"
        )
    if platform == "cpu":
        check_cpu_attention(spec)
    elif spec.scheme.weight == _MXFP4:
        check_card(spec.scheme, torch.cuda.get_device_capability(spec.device))
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks == 1:
        check_ranks("vLLM in this process knows a single rank; set tensor_parallel_size to the number of ranks")
    elif ranks != world:
        raise ValueError(
            f"VLLMEngineFactory.tensor_parallel_size={ranks}: all ranks of the run hold one engine together, and there "
            f"are {world}; set it to that, or trainer.devices to {ranks}"
        )


def check_ranks(reason: str) -> None:
    """Refuse a run of several ranks.

    Args:
        reason: what the error says first.

    Raises:
        NotImplementedError: in a run of several.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise NotImplementedError(f"{reason}; train with trainer.devices: 1, or take lqrl.engines.TorchEngineFactory")


def check_card(scheme: QuantScheme, capability: Sequence[int]) -> None:
    """Refuse a card on which vLLM makes another function of ``scheme``.

    Args:
        scheme: the learner's.
        capability: major and minor number of the card.

    Raises:
        ValueError: for mxfp4 where there are products of it.
    """
    if scheme.weight == _MXFP4 and tuple(capability) >= (10, 0):
        raise ValueError(f"scheme {scheme.name!r}: on this card vLLM quantizes the activations too; take nvfp4_w4a16")


def check_dtype(scheme: QuantScheme, dtype: torch.dtype, platform: str) -> None:
    """Refuse numbers that vLLM's low-bit layers do not give.

    Args:
        scheme: the learner's.
        dtype: of the activations.
        platform: the device type of the vLLM that computes.

    Raises:
        ValueError: for fp32 with quantized weights on a GPU.
    """
    if platform == "cuda" and dtype == torch.float32 and scheme.weight is not None:
        raise ValueError(
            f"scheme {scheme.name!r}: vLLM's low-bit layers give no fp32 on a GPU; set model.init_args.dtype: bfloat16"
        )


def check_sleep(level: int) -> None:
    """Refuse a second engine that gives memory up in sleep: vLLM's allocator for it serves one a process.

    Args:
        level: of the engine that is to be built.

    Raises:
        ValueError: while this process holds another one, which it does until all its engines are closed.
    """
    if level > 0 and any(llm.llm_engine.model_config.enable_sleep_mode for llm in (*_shared, *_open, *_retired)):
        raise ValueError(
            f"VLLMEngineFactory.sleep_level={level}: vLLM takes one engine with sleep a process, and this one holds "
            "another until all its engines are closed; close them first, or set 0"
        )


def check_cpu_attention(spec: EngineSpec) -> None:
    """Refuse heads of a width that the CPU kernels of the installed vLLM do not have.

    Raises:
        ValueError: naming those they have.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = spec.config.get_text_config(decoder=True)
    width = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    widths = CPUAttentionBackend.get_supported_head_sizes()
    if width not in widths:
        raise ValueError(
            f"the model's heads are {width} wide, vLLM's CPU attention has kernels for {', '.join(map(str, widths))}; "
            "take lqrl.engines.TorchEngineFactory, or a GPU"
        )


def launch(arguments: Mapping[str, Any], variables: Mapping[str, str], device: torch.device) -> Any:
    """A ``vllm.LLM`` in this process, whose random numbers are left as they were.

    One that several ranks hold together is never shut down: vLLM would take the run's process group down with its own.

    Args:
        arguments: of the class.
        variables: of the environment, while it starts.
        device: where it runs.
    """
    from vllm import LLM

    starting = object()
    _open.append(starting)  # an engine that is collected meanwhile must not take the groups down
    try:
        with _environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables}), random_state(device):
            llm = LLM(**arguments)
        together = arguments.get("distributed_executor_backend") == "external_launcher"
        (_shared if together else _open).append(llm)
    finally:
        _open.remove(starting)
    return llm


def words_of(error: BaseException) -> str:
    """What ``error`` says; of an assertion without words, which it is and where it stands."""
    if str(error):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {where.line} ({where.filename}, line {where.lineno})"


def rank_variables(ranks: int, device: torch.device) -> dict[str, str]:
    """What vLLM reads of an external launcher, whatever started this process; nothing for a single rank."""
    if ranks == 1:
        return {}
    rank = torch.distributed.get_rank()
    return {"RANK": str(rank), "LOCAL_RANK": str(rank if device.index is None else device.index)}


def retire(llm: Any) -> None:
    """Shut ``llm`` down once it is the last of this process: with one engine vLLM takes the groups of all down."""
    if llm in _shared:
        return
    if llm in _open:
        _open.remove(llm)
        _retired.append(llm)
    if not _open:
        for each in _retired:
            each.llm_engine.engine_core.shutdown()
        _retired.clear()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def random_state(device: torch.device) -> Iterator[None]:
    """Put the generators back: vLLM seeds them when it starts, and on a CPU draws from torch's in every step."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
