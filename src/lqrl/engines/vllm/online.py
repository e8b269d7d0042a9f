"""Formats that vLLM makes itself of unquantized weights, as it loads them: its online quantization."""

from __future__ import annotations

from lqrl.engines.base import EngineSpec
from lqrl.quant.scheme import QuantScheme

ONLINE = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
"""Schemes that vLLM makes of unquantized weights, by the same name; equal to ours. For fp8_per_block on a GPU the
last bit of scales may differ, and with it codes of weights halfway between two: see `lqrl.quant.numerics.fp8`."""


def check_online(spec: EngineSpec) -> None:
    """Refuse what vLLM does not make of unquantized weights, or makes otherwise than the learner.

    Raises:
        ValueError: naming the way out.
    """
    if spec.scheme not in [QuantScheme.preset(name) for name in ONLINE]:
        raise ValueError(
            f"VLLMEngineFactory.online: vLLM quantizes {', '.join(ONLINE)} itself, not {spec.scheme.name!r}; set "
            "online: false, and it gets the learner's codes"
        )
    if spec.lora is not None:
        raise ValueError("VLLMEngineFactory.online: a base under adapters is sent once, as codes; set online: false")
    config = spec.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError("VLLMEngineFactory.online: experts are sent as the learner's codes; set online: false")
    if spec.device.type == "cpu" and spec.scheme.name != "fp8_per_channel":
        raise ValueError(
            f"VLLMEngineFactory.online: vLLM's CPU build does not make {spec.scheme.name!r}; take fp8_per_channel"
        )
