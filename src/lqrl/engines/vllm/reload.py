"""Loading weights into a vLLM model in place, and finding out what it holds: functions that run inside its worker.

vLLM reports weights that did not come for unquantized models only, and in its log; a layer that got none keeps its old
ones, one that got some is completed with memory that nobody wrote. So what is sent is complete before it is sent, and
here every parameter that was not loaded is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lqrl.engines.base import RefreshError
from lqrl.engines.digest import digest, tensor_digests
from lqrl.engines.transaction import all_tensors
from lqrl.engines.vllm.held import in_order


def reload_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Load a complete set of weights, by the names of a checkpoint.

    Args:
        worker: vLLM's.
        weights: all of them, layer by layer.

    Returns:
        Names of the parameters that vLLM did not load; see `check_loaded`.
    """
    wanted, loaded = _reload(worker, weights)
    return sorted(wanted - loaded)


def reload_some(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Load whole layers, by the names of a checkpoint; the others keep what they hold.

    Args:
        worker: vLLM's.
        weights: all of these layers.

    Returns:
        Names of the parameters that vLLM loaded.
    """
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of every layer that keeps what it holds
    try:
        _, loaded = _reload(worker, weights)
    finally:
        log.setLevel(level)
    return sorted(loaded)


def _reload(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> tuple[set[str], set[str]]:
    """Names of all parameters, and of those that were loaded."""
    model: Any = worker.get_model()
    load = model.load_weights
    wanted: set[str] = set()
    loaded: set[str] = set()

    def load_and_note(stream: Iterable[tuple[str, Tensor]]) -> Any:
        wanted.update(_without_wrapper(name) for name, _ in model.named_parameters())
        names = load(stream)
        loaded.update(_without_wrapper(name) for name in names)
        return names

    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=iter(weights))
    finally:
        del model.load_weights
    return wanted, loaded


def _without_wrapper(name: str) -> str:
    """A layer's name as it is without room for an adapter."""
    return name.replace(".base_layer.", ".")


def check_loaded(missed: Iterable[str], may_miss: Callable[[str], bool]) -> None:
    """Refuse what `reload_weights` left out.

    Args:
        missed: what it returned.
        may_miss: whether a parameter of this name need not be loaded.

    Raises:
        RefreshError: naming the others.
    """
    unloaded = [name for name in missed if not may_miss(name)]
    if unloaded:
        raise RefreshError(f"vLLM did not load {', '.join(unloaded[:5])}; its model has other names for them")


def check_some_loaded(sent: Iterable[str], loaded: Iterable[str]) -> None:
    """Refuse what `reload_some` left out.

    Args:
        sent: by the names of a checkpoint, where the scales of a cache belong to ``self_attn``.
        loaded: what it returned.

    Raises:
        RefreshError: naming the others.
    """
    names = {name.replace(".attn.", ".") for name in loaded}
    unloaded = [name for name in sent if name not in names]
    if unloaded:
        raise RefreshError(f"vLLM did not load {', '.join(unloaded[:5])}; its model has other names for them")


def abandon_reload(worker: Any) -> None:
    """End a reload that was interrupted, so that the next one starts afresh; what the model holds is undefined then."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.get_model(), worker.model_config)


def addresses(worker: Any) -> dict[str, int]:
    """Storage address of every parameter and buffer that has storage."""
    return {name: tensor.data_ptr() for name, tensor in all_tensors(worker.get_model()) if tensor.numel()}


def model_digest(worker: Any) -> str:
    """Digest of every parameter and buffer; not of what kernels keep in memory of their own, as on a CPU."""
    return digest((name, in_order(tensor)) for name, tensor in all_tensors(worker.get_model()))


def held_digests(worker: Any) -> dict[str, str]:
    """What `model_digest` is made of, by name; layers' names are those they have without room for an adapter."""
    named = [(_without_wrapper(name), in_order(tensor)) for name, tensor in all_tensors(worker.get_model())]
    values = tensor_digests([tensor for _, tensor in named])
    return {name: f"{tuple(t.shape)} {t.dtype} {v}" for (name, t), v in zip(named, values, strict=True)}
