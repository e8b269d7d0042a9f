"""Tiny policies with adapters, and engines that hold them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngine, TorchEngineFactory
from lqrl.modeling.backbone import load_model
from lqrl.quant import Lora, QuantScheme, add_adapters_, export_weights, prepare_
from lqrl.quant.adapters import adapter_layers
from lqrl.testing.models import tiny_config

CPU = torch.device("cpu")
PREFIX = "model.layers.0.self_attn.q_proj"  # one of the adapted layers


def perturb_(model: nn.Module, size: float = 0.02) -> None:
    """Adapters that are not zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in adapter_layers(model).values():
            noise = torch.randn(layer.lora_B.weight.shape, generator=generator) * size
            layer.lora_B.weight.copy_(noise)


def policy(
    scheme: str, lora: Lora, dtype: torch.dtype, device: torch.device = CPU, family: str = "qwen3", seed: int = 0
) -> nn.Module:
    model = load_model(tiny_config(family), dtype=torch.float32, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.linspace(-1, 1, len(parameter)))
    prepare_(model, QuantScheme.preset(scheme), export_dtype=dtype)
    add_adapters_(model, lora, export_dtype=dtype, seed=seed)
    return model.to(device)


def engine(model, scheme: str, lora: Lora, dtype: torch.dtype, device: torch.device = CPU) -> TorchEngine:
    apart = lora if lora.refresh == "adapter" else None
    spec = EngineSpec(model.config, QuantScheme.preset(scheme), dtype, device, 64, (), apart)
    return TorchEngineFactory()(spec)


def exported(model, scheme: str, lora: Lora, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    adapters = lora.refresh == "adapter"
    return list(export_weights(model, QuantScheme.preset(scheme), export_dtype=dtype, adapters=adapters))


def built(scheme: str, lora: Lora, dtype: torch.dtype, device: torch.device = CPU, family: str = "qwen3"):
    model = policy(scheme, lora, dtype, device, family)
    perturb_(model)
    rollout = engine(model, scheme, lora, dtype, device)
    rollout.update_weights(exported(model, scheme, lora, dtype), policy_version=0)
    return model, rollout
