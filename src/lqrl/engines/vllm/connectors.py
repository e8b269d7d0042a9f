"""Caches of keys and values outside of vLLM's own: a connector must drop what old weights computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_HANDS_ON = frozenset(
    {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
)
"""Connectors of separate prefill and decode engines, which keep nothing themselves."""


def check_caches(engine_args: Mapping[str, Any]) -> None:
    """`check_connectors` of what ``engine_args`` ask for.

    Raises:
        ValueError: see there; and for the backend of offloading that becomes a connector of the kind.
    """
    if engine_args.get("kv_offloading_size") is not None and engine_args.get("kv_offloading_backend") == "lmcache":
        raise ValueError(
            "engine_args.kv_offloading_backend: lmcache cannot drop what it keeps, and would give back keys and values "
            "of old weights after a refresh; take native"
        )
    check_connectors(engine_args.get("kv_transfer_config"))


def check_connectors(transfer: Any) -> None:
    """Refuse a connector that would give back keys and values of weights that a refresh has replaced.

    vLLM takes one that cannot drop them for one that did.

    Args:
        transfer: ``engine_args.kv_transfer_config``; ``None`` for none.

    Raises:
        ValueError: naming it.
    """
    if transfer is None:
        return
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    config = transfer if isinstance(transfer, KVTransferConfig) else KVTransferConfig(**transfer)
    for each in _parts(config, KVTransferConfig):
        cls = KVConnectorFactory.get_connector_class(each)
        if each.kv_connector not in _HANDS_ON and cls.reset_cache is KVConnectorBase_V1.reset_cache:
            raise ValueError(
                f"engine_args.kv_transfer_config: {each.kv_connector} cannot drop what it keeps, and would give back "
                "keys and values of old weights after a refresh; take OffloadingConnector, MooncakeStoreConnector, or "
                "one that only hands on, such as NixlConnector"
            )


def _parts(config: Any, kind: Any) -> Iterator[Any]:
    """``config``, or what it is made of."""
    parts: list[Mapping[str, Any]] = (config.kv_connector_extra_config or {}).get("connectors", [])
    if config.kv_connector != "MultiConnector":
        yield config
        return
    for part in parts:
        yield from _parts(kind(**part), kind)
