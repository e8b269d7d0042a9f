"""Tiny decoders in fp64 throughout: transformers' own norms compute in fp32, which would hide an error of 1e-7."""

from __future__ import annotations

import torch
from quant_families import tiny_model, tokens
from torch import Tensor, nn
from transformers import PreTrainedModel

from lqrl.modeling.attention import register_attention
from lqrl.modeling.backbone import hidden_states, pack


class ExactRMSNorm(nn.Module):
    """RMSNorm in the dtype of its input; the gain is ``weight + offset``."""

    def __init__(self, weight: nn.Parameter, offset: float) -> None:
        super().__init__()
        self.weight, self.offset = weight, offset

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (self.weight + self.offset)


def packed_model(family: str, *, tied: bool | None = None) -> PreTrainedModel:
    """`tiny_model` with the packed attention, as `load_model` gives it."""
    model = tiny_model(family, tied=tied)
    model.set_attn_implementation(register_attention())
    return model


def exact_model(family: str, *, tied: bool | None = None) -> PreTrainedModel:
    """The same in fp64."""
    model = packed_model(family, tied=tied).double()
    for name, module in list(model.named_modules()):
        if "norm" in name.rpartition(".")[2] and not isinstance(module, ExactRMSNorm):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ExactRMSNorm(module.weight, float(family == "gemma")))
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Of `tokens`, packed: ``[N, V]``."""
    ids = tokens()
    return model.get_output_embeddings()(hidden_states(model, pack(ids, torch.ones_like(ids))))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
