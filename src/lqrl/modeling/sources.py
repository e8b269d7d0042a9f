"""Names of models: directories, hub names, and what ships with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lqrl import assets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
