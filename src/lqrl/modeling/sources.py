"""Names of models, directories, hub names and what ships with the package; and the weights behind them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lqrl import assets

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def resolve_source(name: str) -> str:
    """What transformers' ``from_pretrained`` takes for ``name``.

    Args:
        name: ``asset:<name>`` for a model shipped with lqrl, a directory, or a hub name.

    Raises:
        FileNotFoundError: for a path that does not exist, or is not a model directory.
    """
    if name.startswith(assets.PREFIX):
        return assets.resolve(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} holds no config.json; name a directory that save_pretrained has written")
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise FileNotFoundError(
            f"model {name!r} is neither a directory nor a hub name (owner/name); "
            f"use {assets.PREFIX}countdown_policy for the policy that ships with lqrl"
        )
    return name


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; see `resolve_source`.

    Raises:
        FileNotFoundError: when it is neither here nor on a hub that can be reached.
        ValueError: when it has no EOS token, so that no completion could end.
    """
    from transformers import AutoTokenizer

    source = resolve_source(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except OSError as error:
        raise FileNotFoundError(
            f"{name} is no directory in {Path.cwd()} and could not be fetched as a hub name "
            f"({str(error).splitlines()[0]})"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no EOS token; set eos_token in its tokenizer_config.json")
    return tokenizer


def load_pretrained(source: str, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """A causal language model with trained weights; those of a compressed-tensors checkpoint come dequantized.

    The masters are then the values that the codes stand for, as a run on a frozen quantized base has them. In the same
    scheme the first rollouts are those of the checkpoint where requantizing changes no code; the embedded engine can
    serve the codes themselves with `lqrl.quant.checkpoint.load_quantized`.

    Args:
        source: see `resolve_source`.
        dtype: of the parameters.
        attention: transformers' name of the attention.

    Raises:
        ValueError: when the checkpoint lacks weights or has formats that cannot be computed.
        NotImplementedError: for a compressed-tensors checkpoint under a hub name, and for other quantized ones.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    # The transforms of lqrl.quant import the backbone, which imports this module.
    from lqrl.quant.checkpoint import load_dequantized
    from lqrl.quant.checkpoint_reader import full_precision_config, holds_codes
    from lqrl.quant.compressed_format import METHOD

    if not holds_codes(source):
        settings = AutoConfig.from_pretrained(source).to_dict().get("quantization_config") or {}
        if settings.get("quant_method") == METHOD:
            raise NotImplementedError(
                f"{source} is a compressed-tensors checkpoint, which is read from a directory: download it "
                f"(hf download {source} --local-dir DIRECTORY) and name the directory"
            )
        if settings:
            raise NotImplementedError(
                f"{source} is quantized by {settings.get('quant_method', 'another library')}, and of quantized models "
                f"only those of {METHOD} are read; start from the full-precision model that it was made from"
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
        model, found = loaded
        if missing := sorted(found["missing_keys"]):  # transformers draws them at random
            raise ValueError(f"{source} does not hold the weights of its model: missing {missing[:3]}")
        _note_untied(model)
        return model
    with no_init_weights():
        config = full_precision_config(source)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    keys = model.load_state_dict(dict(load_dequantized(source, dtype=dtype)), strict=False)
    names = {name for name, _ in model.named_parameters()}  # tied weights have one of their names here
    wrong = [*keys.unexpected_keys, *(name for name in keys.missing_keys if name in names)]
    if wrong:
        raise ValueError(f"{source} does not hold the weights of its model: missing or unexpected {wrong[:3]}")
    if (Path(source) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def _note_untied(model: PreTrainedModel) -> None:
    """Say in the config that embedding and head are two, where a checkpoint holds two against its own config."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, nn.Linear) and isinstance(embedding, nn.Embedding) and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False
