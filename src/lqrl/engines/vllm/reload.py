"""Loading weights into a vLLM model in place, and finding out what it holds: functions that run inside its worker.

vLLM reports weights that did not come for unquantized models only, and in its log; a layer that got none keeps its old
ones, one that got some is completed with memory that nobody wrote. So what is sent is complete before it is sent, and
here every parameter that was not loaded is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lqrl.engines.base import RefreshError
from lqrl.engines.digest import digest
from lqrl.engines.transaction import all_tensors


def reload_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Load a complete set of weights, by the names of a checkpoint.

    Args:
        worker: vLLM's.
        weights: all of them, layer by layer.

    Returns:
        Names of the parameters that vLLM did not load; see `check_loaded`.
    """
    model: Any = worker.get_model()
    load = model.load_weights
    wanted: set[str] = set()
    loaded: set[str] = set()

    def load_and_note(stream: Iterable[tuple[str, Tensor]]) -> Any:
        wanted.update(name for name, _ in model.named_parameters())
        names = load(stream)
        loaded.update(names)
        return names

    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=iter(weights))
    finally:
        del model.load_weights
    return sorted(wanted - loaded)


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
    return digest((name, _in_order(tensor)) for name, tensor in all_tensors(worker.get_model()))


def _in_order(tensor: Tensor) -> Tensor:
    """A transposed matrix as it lies in memory, which is hashed without a copy."""
    return tensor.t() if tensor.dim() == 2 and tensor.t().is_contiguous() else tensor
