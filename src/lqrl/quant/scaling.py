"""Update-aware quantization (UAQ): scale weights down and the norm before them up, leaving the function unchanged."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Consumers of a block's norm, and the layers of the block that read something else and stay as they are.
_ATTENTION_READERS = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj"})
_MLP_READERS = frozenset({"gate_proj", "up_proj", "gate_up_proj"})
_UNTOUCHED = frozenset({"o_proj", "down_proj"})


def fold_(model: nn.Module, s: float) -> int:
    """Fold the factor ``s`` into every norm that feeds linear layers: ``W x = (W / s)(s x)``, in place.

    QuRL (arXiv 2602.13953), invariant scaling; once before training, default of the paper ``s = 1.5``. Norm gains are
    multiplied by ``s`` (a gain stored as ``1 + w`` becomes ``s (1 + w) - 1``) and the weights of q, k, v and gate, up
    divided by it; biases, o_proj and down_proj have no part. A weight's relative quantization error does not change,
    an update of it weighs ``s`` times more. Sources disagree whether gate and up take part; here they do (inferred
    from the one public implementation). The arithmetic is fp32, rounded once to the parameter's dtype.

    Returns:
        How many linear layers were folded.

    Raises:
        ValueError: when ``s`` is not a positive finite number, nothing can be folded, a norm is no RMSNorm, or
            something besides the known layers reads a norm's output (experts, parallel blocks).
    """
    return _rescale_(model, s, inverse=False)


def unfold_(model: nn.Module, s: float) -> int:
    """Undo `fold_` with the same ``s``; exact when ``s`` is a power of two, else within rounding.

    Returns:
        How many linear layers were unfolded.

    Raises:
        ValueError: as `fold_`.
    """
    return _rescale_(model, s, inverse=True)


@torch.no_grad()
def _rescale_(model: nn.Module, s: float, *, inverse: bool) -> int:
    if not 0 < s < float("inf"):
        raise ValueError(f"the scaling factor must be positive and finite, got {s}; 1.5 is the published value")
    # Everything is found and checked before anything is written.
    pairs = _pairs(model)
    offsets = [_gain_offset(name, norm) for name, norm, _ in pairs]
    for (_, norm, linears), offset in zip(pairs, offsets, strict=True):
        _multiply_(norm.get_parameter("weight"), s, inverse=inverse, offset=offset)
        for linear in linears:
            _multiply_(linear.weight, s, inverse=not inverse, offset=0.0)
    return sum(len(linears) for _, _, linears in pairs)


def _multiply_(parameter: Tensor, s: float, *, inverse: bool, offset: float) -> None:
    gain = parameter.float() + offset
    parameter.copy_((gain / s if inverse else gain * s) - offset)


def _pairs(model: nn.Module) -> list[tuple[str, nn.Module, list[nn.Linear]]]:
    """Norms and the linear layers that read them, from the structure of the decoder layers."""
    modules = dict(model.named_modules())
    pairs = []
    for name in modules:
        if name.rpartition(".")[2] != "input_layernorm":
            continue
        layer = name.rpartition(".")[0]
        dot = f"{layer}." if layer else ""
        mlp_norm = f"{dot}pre_feedforward_layernorm"
        if mlp_norm not in modules:
            mlp_norm = f"{dot}post_attention_layernorm"
        for norm, block, readers in ((name, "self_attn", _ATTENTION_READERS), (mlp_norm, "mlp", _MLP_READERS)):
            for needed in (norm, f"{dot}{block}"):
                if needed not in modules:
                    raise ValueError(
                        f"{layer} has no {needed}: invariant scaling knows decoder layers with a norm before self_attn "
                        f"and one before mlp; switch it off for this architecture"
                    )
            pairs.append((norm, modules[norm], _readers(f"{dot}{block}", modules[f"{dot}{block}"], readers)))
    if not pairs:
        raise ValueError(f"no input_layernorm found in {type(model).__name__}: invariant scaling has nothing to fold")
    return pairs


def _readers(block_name: str, block: nn.Module, readers: frozenset[str]) -> list[nn.Linear]:
    """The block's linear layers named in ``readers``; refuses a block where something else may read the norm."""
    linears = []
    for name, module in block.named_modules():
        if name in readers and isinstance(module, nn.Linear):
            linears.append(module)
        elif name not in _UNTOUCHED and _is_matrix_holder(module):
            raise ValueError(
                f"{block_name}.{name} holds weights that may read the scaled norm: invariant scaling would change "
                f"the model; switch it off for this architecture"
            )
    if not linears:
        raise ValueError(f"{block_name} has none of {sorted(readers)}: invariant scaling has nothing to fold here")
    return linears


def _is_matrix_holder(module: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def _gain_offset(name: str, norm: nn.Module) -> float:
    """0 when the norm multiplies by ``weight``, 1 when by ``1 + weight`` (Gemma): measured on a row of ones."""
    weight = norm.get_parameter("weight")
    gain = norm(torch.ones_like(weight)[None])[0].float()  # a row of ones has RMS 1
    for offset in (0.0, 1.0):
        expected = weight.float() + offset
        if bool(((gain - expected).abs() <= 0.01 * expected.abs().clamp_min(1.0)).all()):
            return offset
    raise ValueError(
        f"{name} ({type(norm).__name__}) does not scale by weight or 1 + weight: invariant scaling needs RMSNorm; "
        f"switch it off for this architecture"
    )
