"""A gated decoder (Llama, Qwen) part by part, as the learner computes it and as a vLLM in this process does.

A part takes rows of tokens and gives rows of tokens. `walk` runs a decoder from one function of parts, so parts of both
sides can be mixed, and given the same inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lqrl.modeling.arithmetic import Arithmetic
from lqrl.modeling.attention import PackedContext
from lqrl.quant import AlignedLinear
from lqrl.quant.methods import Fp8Block, Fp8Channel, IntegerGemm, LinearMethod
from lqrl.quant.rows import quantize_fp8_group, quantize_int8_token

Rows = tuple[Tensor, ...]
Parts = Callable[..., Rows]
"""Layer, name of a part and its inputs, to its outputs."""

# In the order of a layer; the last one comes after all layers. The path is that of vLLM's module in its layer.
PATHS = {
    "input norm": "input_layernorm",
    "qkv": "self_attn.qkv_proj",
    "q norm": "self_attn.q_norm",
    "k norm": "self_attn.k_norm",
    "rotary": "self_attn.rotary_emb",
    "attention": "self_attn.attn",
    "o_proj": "self_attn.o_proj",
    "post norm": "post_attention_layernorm",
    "gate_up": "mlp.gate_up_proj",
    "activation": "mlp.act_fn",
    "down": "mlp.down_proj",
    "final norm": "norm",
}
NORMS = ("input norm", "q norm", "k norm", "post norm", "final norm")
STREAMS = ("input norm", "post norm", "final norm")
"""Parts that add to the stream first: output and stream to the normed stream and the stream."""
LINEAR = {"qkv": "self_attn.q_proj", "o_proj": "self_attn.o_proj", "gate_up": "mlp.gate_proj", "down": "mlp.down_proj"}
"""The learner's layer whose input is that of the part."""


class Call(NamedTuple):
    """What a part was given, and what it gave."""

    inputs: Rows
    outputs: Rows


Calls = dict[tuple[int, str], Call]
"""By layer and part; the final norm's layer is the number of layers."""


class LearnerParts:
    """The policy's own modules.

    Args:
        policy: loaded by `load_model`.
        lengths: tokens of the sequences that the rows are, in order.
        arithmetic: that the policy has, see `use_arithmetic_`.
    """

    def __init__(self, policy: PreTrainedModel, lengths: Sequence[int], arithmetic: Arithmetic) -> None:
        self._decoder: Any = policy.get_decoder()
        self._context = PackedContext(lengths, policy.device)
        self._wide_sums = not arithmetic.rounds_sums

    def __call__(self, layer: int, part: str, *given: Tensor) -> Rows:
        block: Any = self._decoder if part == "final norm" else self._decoder.layers[layer]
        if part in STREAMS:
            norm = block.get_submodule(PATHS[part])
            total = given[0] if len(given) == 1 else given[1].float() + given[0]
            stream = total.to(given[0].dtype)
            return _one(norm, total if self._wide_sums else stream), stream
        attention, mlp = block.self_attn, block.mlp
        match part:
            case "qkv":
                return (torch.cat([_one(attention.get_submodule(f"{n}_proj"), *given) for n in "qkv"], -1),)
            case "q norm" | "k norm":
                return (_one(block.get_submodule(PATHS[part]), *given),)
            case "rotary":
                return self._rotary(attention, *given)
            case "attention":
                q, k, v = (x.view(len(x), -1, attention.head_dim).transpose(0, 1)[None] for x in given)
                window = getattr(attention, "sliding_window", None)
                return (self._context.attend(layer, q, k, v, attention.scaling, window)[0].flatten(1),)
            case "gate_up":
                return (torch.cat([_one(mlp.gate_proj, *given), _one(mlp.up_proj, *given)], -1),)
            case "activation":
                gate, up = given[0].chunk(2, -1)
                return (mlp.act_fn(gate) * up,)
        return (_one(attention.o_proj if part == "o_proj" else mlp.down_proj, *given),)

    def _rotary(self, attention: Any, positions: Tensor, q: Tensor, k: Tensor) -> Rows:
        heads = [x.view(len(x), -1, attention.head_dim).transpose(0, 1)[None] for x in (q, k)]
        cos, sin = self._decoder.rotary_emb(q, positions[None])
        turned = sys.modules[type(attention).__module__].apply_rotary_pos_emb(*heads, cos, sin)
        return tuple(x[0].transpose(0, 1).flatten(1).to(q.dtype) for x in turned)


def _one(module: nn.Module, x: Tensor) -> Tensor:
    """``module`` on ``x`` as one batch, which is how the learner calls it."""
    return module(x[None])[0]


class VllmParts:
    """The modules of a vLLM in this process, but for attention, which needs its cache.

    Args:
        model: vLLM's, with weights.
        config: its ``VllmConfig``.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        self._model: Any = model
        self._decoder, self._config = model.get_submodule("model"), config

    def __call__(self, layer: int, part: str, *given: Tensor) -> Rows:
        from vllm.config import set_current_vllm_config

        path = PATHS[part] if part == "final norm" else f"layers.{layer}.{PATHS[part]}"
        module = self._decoder.get_submodule(path)
        with set_current_vllm_config(self._config):
            # Copies: its kernels write where they read.
            return as_rows(part, given, module(*(x.clone(memory_format=torch.contiguous_format) for x in given)))

    def logits(self, hidden: Tensor) -> Tensor:
        """``[N, V]`` of last hidden states."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config):
            return self._model.compute_logits(hidden)


def as_rows(part: str, given: Rows, output: Any) -> Rows:
    """The outputs of vLLM's module: a linear layer gives its bias too, a norm of the first layer no stream."""
    outputs = tuple(x for x in (output if isinstance(output, tuple) else (output,)) if isinstance(x, Tensor))
    return (*outputs, given[0]) if part in STREAMS and len(outputs) == 1 else outputs


def walk(parts: Parts, embedded: Tensor, positions: Tensor, layers: int, head_width: int | None, q_rows: int) -> Calls:
    """Run a decoder.

    Args:
        parts: of one side, or of both.
        embedded: ``[N, H]`` tokens.
        positions: ``[N]``.
        layers: how many.
        head_width: of the norms of heads, where there are some.
        q_rows: width of all queries of a token.

    Returns:
        What every part was given and gave.
    """
    calls: Calls = {}

    def run(layer: int, part: str, *given: Tensor) -> Rows:
        calls[layer, part] = Call(given, parts(layer, part, *given))
        return calls[layer, part].outputs

    stream: Rows = (embedded,)
    for layer in range(layers):
        x, residual = run(layer, "input norm", *stream)
        (qkv,) = run(layer, "qkv", x)
        kv_rows = (qkv.shape[1] - q_rows) // 2
        q, k, v = qkv.split([q_rows, kv_rows, kv_rows], -1)
        if head_width is not None:
            (q,), (k,) = (
                run(layer, f"{name} norm", x.reshape(len(x), -1, head_width)) for name, x in (("q", q), ("k", k))
            )
        q, k = run(layer, "rotary", positions, q.flatten(1), k.flatten(1))
        (x,) = run(layer, "attention", q, k, v)
        (x,) = run(layer, "o_proj", x)
        x, residual = run(layer, "post norm", x, residual)
        (x,) = run(layer, "gate_up", x)
        (x,) = run(layer, "activation", x)
        (x,) = run(layer, "down", x)
        stream = x, residual
    run(layers, "final norm", *stream)
    return calls


def walk_policy(policy: PreTrainedModel, parts: Parts, ids: Tensor, positions: Tensor) -> Calls:
    """`walk` with the sizes and the embedding of ``policy``."""
    decoder: Any = policy.get_decoder()
    attention = decoder.layers[0].self_attn
    norms_heads = any(name == "q_norm" for name, _ in attention.named_children())
    width = attention.head_dim if norms_heads else None
    sizes = len(decoder.layers), width, attention.q_proj.out_features
    return walk(parts, decoder.embed_tokens(ids[None])[0], positions, *sizes)


# ---------------------------------------------------------------- comparisons


def compared(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Share of equal elements, and the difference relative to ``theirs``: of the whole, and the largest to the rms."""
    ours, theirs = ours.double().flatten(), theirs.double().flatten()
    difference, size = ours - theirs, theirs.norm().clamp_min(1e-30)
    return {
        "equal": float((difference == 0).double().mean()),
        "relative": float(difference.norm() / size),
        "largest": float(difference.abs().max() / size * len(theirs) ** 0.5),
    }


def pooled(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Rows of `compared` as one: mean share, root mean square of the relative errors, largest of the largest."""
    return {
        "equal": sum(row["equal"] for row in rows) / len(rows),
        "relative": (sum(row["relative"] ** 2 for row in rows) / len(rows)) ** 0.5,
        "largest": max(row["largest"] for row in rows),
    }


def input_codes(method: LinearMethod, x: Tensor) -> Tensor | None:
    """The codes that ``method`` makes of its input ``[N, K]``; ``None`` where it takes it as it is."""
    if isinstance(method, IntegerGemm):
        return quantize_int8_token(x, method.activation_max)[0]
    if isinstance(method, Fp8Channel):
        return method.quantize_input(x)[0]
    return quantize_fp8_group(x)[0] if isinstance(method, Fp8Block) else None


def vllm_codes(method: LinearMethod, x: Tensor) -> Tensor | None:
    """The codes that the quantizer of vLLM's linear layers makes of ``x``; ``None`` where it cannot be called alone."""
    import vllm._custom_ops as ops

    x = x.contiguous()
    if isinstance(method, IntegerGemm):
        return (ops.scaled_int8_quant if x.is_cuda else ops.onednn_scaled_int8_quant)(x)[0]
    if isinstance(method, Fp8Channel) and x.is_cuda:
        return ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)[0]
    if isinstance(method, Fp8Block) and x.is_cuda:
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        return per_token_group_quant_fp8(x, 128)[0]
    return None


def equal_share(a: Tensor | None, b: Tensor | None) -> float | None:
    """Share of equal codes; ``None`` where one side has none."""
    if a is None or b is None:
        return None
    return float((a.float() == b.float()).double().mean())


def method_of(policy: PreTrainedModel, layer: int, part: str) -> LinearMethod | None:
    """The format of a linear part of an aligned policy."""
    if part not in LINEAR:
        return None
    decoder: Any = policy.get_decoder()
    linear = decoder.layers[layer].get_submodule(LINEAR[part])
    return linear.method if isinstance(linear, AlignedLinear) else None
