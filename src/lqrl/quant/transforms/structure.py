"""Who reads a norm, and which linear layers follow one another without a nonlinearity: found and checked by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Consumers of a block's norm, and the layers of the block that read something else.
_ATTENTION_READERS = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj"})
_MLP_READERS = frozenset({"gate_proj", "up_proj", "gate_up_proj"})
_WRITERS = frozenset({"o_proj", "down_proj"})
_OFF = "leave the transform out for this architecture"


@dataclass(frozen=True)
class NormSite:
    """An RMSNorm and every linear layer that reads its output.

    Attributes:
        name: full name of the norm.
        norm: its gain is ``weight + offset``.
        offset: 0, or 1 for gains stored as ``1 + w`` (Gemma).
        block: full name of the attention or MLP block behind it.
        readers: the linear layers by full name.
    """

    name: str
    norm: nn.Module
    offset: float
    block: str
    readers: dict[str, nn.Linear]

    @property
    def weight(self) -> nn.Parameter:
        """The stored parameter."""
        return self.norm.get_parameter("weight")

    def gain(self) -> Tensor:
        """What the norm multiplies by: ``[H]``, fp64."""
        return self.weight.detach().double() + self.offset

    def set_gain_(self, gain: Tensor) -> None:
        """Write a gain, rounded once."""
        with torch.no_grad():
            self.weight.copy_(gain - self.offset)


def norm_sites(model: nn.Module) -> list[NormSite]:
    """The norm before attention and the norm before the MLP of every decoder layer, in layer order.

    Raises:
        ValueError: when there is none, a norm is no RMSNorm, or something besides the known layers reads a norm's
            output (experts, parallel blocks).
    """
    modules = dict(model.named_modules())
    sites = []
    for layer in layer_names(model):
        dot = f"{layer}." if layer else ""
        mlp_norm = f"{dot}pre_feedforward_layernorm"
        if mlp_norm not in modules:
            mlp_norm = f"{dot}post_attention_layernorm"
        blocks = ((f"{dot}input_layernorm", "self_attn", _ATTENTION_READERS), (mlp_norm, "mlp", _MLP_READERS))
        for norm, block, readers in blocks:
            for needed in (norm, f"{dot}{block}"):
                if needed not in modules:
                    raise ValueError(
                        f"{layer} has no {needed}: invariant transforms know decoder layers with a norm before "
                        f"self_attn and one before mlp; {_OFF}"
                    )
            linears = _readers(f"{dot}{block}", modules[f"{dot}{block}"], readers)
            offset = gain_offset(norm, modules[norm])
            sites.append(NormSite(norm, modules[norm], offset, f"{dot}{block}", linears))
    return sites


def layer_names(model: nn.Module) -> list[str]:
    """Full names of the decoder layers: the modules that hold an ``input_layernorm``.

    Raises:
        ValueError: when there is none.
    """
    named = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "input_layernorm"]
    if not named:
        raise ValueError(f"no input_layernorm found in {type(model).__name__}: there is nothing to fold")
    return [name.rpartition(".")[0] for name in named]


def writers(model: nn.Module) -> dict[str, nn.Linear]:
    """``o_proj`` and ``down_proj`` of every decoder layer by full name: they add to the residual stream."""
    return {
        name: module
        for layer in layer_names(model)
        for name, module in _named_below(model, layer)
        if name.rpartition(".")[2] in _WRITERS and isinstance(module, nn.Linear)
    }


def linear_in(model: nn.Module, block: str, name: str) -> nn.Linear:
    """The linear layer ``block.name``.

    Raises:
        ValueError: when the block has none, for example because it is fused with its siblings.
    """
    module = dict(model.get_submodule(block).named_children()).get(name)
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{block} has no linear layer {name} of its own, which this transform needs; {_OFF}")
    return module


def gain_offset(name: str, norm: nn.Module) -> float:
    """0 when the norm multiplies by ``weight``, 1 when by ``1 + weight`` (Gemma): measured on a row of ones.

    Raises:
        ValueError: when it does neither.
    """
    weight = norm.get_parameter("weight").detach()
    with torch.no_grad():
        gain = norm(torch.ones_like(weight)[None])[0].float()  # a row of ones has RMS 1
    for offset in (0.0, 1.0):
        expected = weight.float() + offset
        if bool(((gain - expected).abs() <= 0.01 * expected.abs().clamp_min(1.0)).all()):
            return offset
    raise ValueError(f"{name} ({type(norm).__name__}) does not scale by weight or 1 + weight: it is no RMSNorm; {_OFF}")


def _named_below(model: nn.Module, layer: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.get_submodule(layer).named_modules():
        yield f"{layer}.{name}" if layer and name else layer or name, module


def _readers(block_name: str, block: nn.Module, readers: frozenset[str]) -> dict[str, nn.Linear]:
    """The block's linear layers named in ``readers``; refuses a block where something else may read the norm."""
    linears = {}
    for name, module in block.named_modules():
        if name in readers and isinstance(module, nn.Linear):
            linears[f"{block_name}.{name}"] = module
        elif name not in _WRITERS and any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"{block_name}.{name} holds weights that may read the norm before it: an invariant transform would "
                f"change the model; {_OFF}"
            )
    if not linears:
        raise ValueError(f"{block_name} has none of {sorted(readers)}: there is nothing to fold here; {_OFF}")
    return linears
