"""Loading a causal language model and running its decoder on packed tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lqrl.modeling.attention import AttentionContext, KVHook, NoContextError, PackedContext, register_attention
from lqrl.modeling.dropout import check_dropout
from lqrl.modeling.mode import in_mode
from lqrl.modeling.sources import load_pretrained
from lqrl.quant.triton_use import on_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Types of rotary frequencies that are known not to follow the length."""
# Settings that change the logits after the output head, with the values that mean "off".
_LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
_SUPPORTED = "use a decoder whose layers all call the AttentionInterface (Llama, Mistral, Qwen2, Qwen3, Gemma)"


@dataclass(frozen=True)
class Packed:
    """Tokens without padding.

    Attributes:
        input_ids: ``[1, N]`` int64.
        position_ids: ``[1, N]`` int64, from 0 in each sequence.
        context: where the sequences begin.
        index: ``[N]`` int64, place of each token in the flattened ``[B * T]`` batch.
        predicting: int64, the packed tokens that are followed by another of their sequence.
    """

    input_ids: Tensor
    position_ids: Tensor
    context: AttentionContext
    index: Tensor
    predicting: Tensor


class AttentionShape(NamedTuple):
    """Key/value heads of a layer, the widths of a key and a value, the factor of the scores, and the window."""

    kv_heads: int
    key_width: int
    value_width: int
    scaling: float
    sliding_window: int | None


def load_model(
    source: str | Path | PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    seed: int | None = None,
) -> PreTrainedModel:
    """A causal language model whose attention is `lqrl.modeling.attention.lqrl_attention`.

    Args:
        source: a directory or hub name for trained weights, see `load_pretrained`; or a config. With a config and
            ``seed`` the weights are initialized at random; with a config alone they are left unset, for weights that
            come later.
        dtype: dtype of the parameters.
        device: where the model goes; ``None`` is the CPU.
        seed: of the random initialization; the global generator is left as it was.

    Raises:
        NotImplementedError: when the architecture does not send every layer's attention through the interface, changes
            its logits after the output head, has rotary frequencies that follow the length, or drops at random in
            training.
    """
    from transformers import AutoModelForCausalLM

    name = register_attention()
    try:
        if isinstance(source, (str, Path)):
            model = load_pretrained(str(source), dtype=dtype, attention=name)
        else:
            config = copy.deepcopy(source)  # transformers writes dtype and attention into the config it is given
            with torch.random.fork_rng(devices=[]), _weights_unset(seed is None):
                torch.manual_seed(seed or 0)
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=name)
            model.tie_weights()  # not done where the initialization is skipped
    except (KeyError, ValueError) as error:
        if name not in str(error):
            raise
        what = source if isinstance(source, (str, Path)) else source.model_type
        raise NotImplementedError(f"{what}: this architecture has no pluggable attention; {_SUPPORTED}") from error
    check_architecture(model)
    # Buffers such as rotary frequencies are computed on the CPU and moved, so that they are the same everywhere.
    return model if device is None else model.to(device)  # type: ignore[arg-type]


def check_architecture(model: PreTrainedModel) -> None:
    """Run two tokens through ``model`` and count whose attention came by.

    Raises:
        NotImplementedError: see `load_model`.
    """
    architecture, config = type(model).__name__, model.config.get_text_config(decoder=True)
    settings = config.to_dict()
    for key in _LOGIT_SETTINGS:
        if settings.get(key) not in (None, 1, 1.0):
            raise NotImplementedError(
                f"{architecture}: config.{key}={settings[key]} is not supported; the head must be a plain product"
            )
    _check_rope(architecture, settings.get("rope_parameters") or {})
    head = model.get_output_embeddings()
    if head is None or head.bias is not None:
        raise NotImplementedError(f"{architecture}: the output head must be a linear layer without bias")
    try:
        layers, shapes = config.num_hidden_layers, attention_shapes(model)
    except (NoContextError, AttributeError, TypeError) as error:
        reason = "it keeps attention_context from its attention" if isinstance(error, NoContextError) else str(error)
        raise NotImplementedError(
            f"{architecture}: its decoder does not run on packed tokens ({reason}); {_SUPPORTED}"
        ) from error
    if sorted(shapes) != list(range(layers)):
        raise NotImplementedError(
            f"{architecture}: {len(shapes)} of {layers} layers sent their attention through transformers' "
            f"AttentionInterface, so packed tokens cannot be kept apart; {_SUPPORTED}"
        )
    check_dropout(model, settings, lambda: _run_two_tokens(model, _Probe()))


def _check_rope(architecture: str, rope: dict[str, object]) -> None:
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):  # some have one a kind of layer
        kind = str(one.get("rope_type", "default"))
        if kind == "longrope" or "dynamic" in kind:
            raise NotImplementedError(
                f"{architecture}: rotary frequencies of type {kind!r} follow the longest sequence of a call, so a "
                "token's log-prob would depend on what it is packed with; set another rope_type, such as yarn"
            )


def attention_shapes(model: PreTrainedModel) -> dict[int, AttentionShape]:
    """Heads and widths of each layer that calls the shared attention, found by running two tokens through ``model``."""
    probe = _Probe()
    with in_mode(model, training=False):
        _run_two_tokens(model, probe)
    return probe.shapes


@torch.no_grad()
def _run_two_tokens(model: PreTrainedModel, probe: _Probe) -> None:
    positions = torch.arange(2, device=output_weight(model).device)[None]
    run_decoder(model, torch.zeros_like(positions), positions, probe)


def pack(input_ids: Tensor, attention_mask: Tensor, kv: KVHook | None = None, exact: bool = False) -> Packed:
    """Drop the padding of a batch; with a mask on the CPU the host does not wait for a GPU.

    Args:
        input_ids: ``[B, T]`` int64.
        attention_mask: ``[B, T]`` bool or 0/1, true on one run of tokens a row, on the CPU or where the tokens are.
        kv, exact: see `lqrl.modeling.attention.PackedContext`.

    Returns:
        The packed tokens; a row without tokens takes no room.
    """
    # numpy: torch wakes a thread on every core for each of these, which costs a many-core host more than the work.
    mask, device = attention_mask.bool().cpu().numpy(), input_ids.device
    kept = np.flatnonzero(mask)
    places = mask.cumsum(1, dtype=np.int64).ravel()[kept] - 1
    context = PackedContext(mask.sum(1).tolist(), device, kv, exact)
    arrays = (kept, places, np.flatnonzero(places[1:] > 0))
    index, positions, predicting = (on_device(torch.from_numpy(array), device) for array in arrays)
    return Packed(input_ids.flatten()[index][None], positions[None], context, index, predicting)


def hidden_states(model: PreTrainedModel, packed: Packed) -> Tensor:
    """Last hidden states of the decoder, after its final norm: ``[N, H]``.

    Runs in the precision and mode the caller has set (autocast, gradient checkpointing, training).
    """
    return run_decoder(model, packed.input_ids, packed.position_ids, packed.context)


def run_decoder(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
    """`hidden_states` for tokens ``[1, N]`` at any positions ``[1, N]``; ``context`` knows what they see."""
    output = model.get_decoder()(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=None,
        use_cache=False,
        attention_context=context,
    )
    return output.last_hidden_state[0]


def output_weight(model: PreTrainedModel) -> Tensor:
    """Weight of the output head ``[V, H]``; the embedding's where they are tied."""
    head: torch.nn.Linear = model.get_output_embeddings()  # type: ignore[assignment]
    return head.weight


class _Probe(AttentionContext):
    """Notes the layers whose attention was called, and with what."""

    def __init__(self) -> None:
        self.shapes: dict[int, AttentionShape] = {}

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        self.shapes[layer_idx] = AttentionShape(k.shape[1], k.shape[3], v.shape[3], scaling, sliding_window)
        return PackedContext([2], q.device).attend(layer_idx, q, k, v, scaling, sliding_window)


@contextmanager
def _weights_unset(active: bool) -> Iterator[None]:
    """Skip the random initialization of large models whose weights come later."""
    if not active:
        yield
        return
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield
