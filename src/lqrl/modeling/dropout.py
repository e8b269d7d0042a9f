"""Refusing models that compute at random in training mode: rollouts are drawn without, so log-probs would differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lqrl.modeling.mode import in_mode

_WORDS = ("drop", "jitter", "noise")  # of config keys
_OF_OTHER_HEADS = ("classifier", "summary")


def check_dropout(model: nn.Module, settings: Mapping[str, Any], run: Callable[[], None]) -> None:
    """Refuse dropout, and noise of a router, that training mode would switch on; one pass where there may be some.

    Args:
        model: as it was loaded, before adapters; its mode is left as it was.
        settings: of the decoder's config.
        run: a forward pass of ``model``.

    Raises:
        NotImplementedError: naming modules and options.
    """
    modules = {n: m.p for n, m in model.named_modules() if isinstance(m, _DropoutNd) and m.p > 0}
    keys = {key: value for key, value in settings.items() if _may_be_random(key, value)}
    if not (modules or keys) or not _is_random(model, run):
        return
    # Where modules drop, the keys that are set as they are; every key where the layers call functions.
    named = [key for key, value in keys.items() if not modules or value in modules.values()] or list(keys)
    where = f" ({next(iter(modules))} and {len(modules) - 1} more modules)" if modules else ""
    what = " and ".join(f"config.{key}={keys[key]}" for key in named) or "their p"
    raise NotImplementedError(
        f"{type(model).__name__}: dropout and noise are not supported{where}, since rollouts are drawn without; set "
        f"{what} to 0"
    )


def _may_be_random(key: str, value: object) -> bool:
    if not isinstance(value, float) or value <= 0:
        return False
    return any(word in key for word in _WORDS) and not any(word in key for word in _OF_OTHER_HEADS)


def _is_random(model: nn.Module, run: Callable[[], None]) -> bool:
    """Whether a pass in training mode draws random numbers, or is refused by `lqrl.modeling.attention`."""
    device = next(model.parameters()).device
    on_cuda = device.type == "cuda"

    def state() -> Tensor:
        return torch.cuda.get_rng_state(device) if on_cuda else torch.get_rng_state()

    with in_mode(model, training=True), torch.random.fork_rng(devices=[device] if on_cuda else []):
        before = state()
        try:
            run()
        except NotImplementedError:  # dropout of the attention
            return True
        return not torch.equal(before, state())
