"""The files of a checkpoint: which of a directory hold its weights, and how a new export takes the place of an old one.

An export is written into a folder of its own, `UNFINISHED`, and moved when it is whole. config.json goes first from the
old files and comes last of the new ones; nothing takes a directory without it for a model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor

INDEX, WEIGHTS, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
UNFINISHED = "unfinished-export"
"""Folder in which an export lies until it is whole; what one that was cut off has left is removed by the next."""
_OTHERS = "generation_config.json"
AGAIN = "copy it again from where it is whole, or export it again"
"""What to do about a checkpoint that misses something."""


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        ValueError: when the file is not there, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} holds no {path.name}, so it is no whole checkpoint; {AGAIN}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}), it may have been cut; {AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; {AGAIN}")
    return cast("dict[str, Any]", content)


def weight_files(directory: Path) -> tuple[list[str], dict[str, str]]:
    """The files that hold the weights: those that the index names, else one. What lies beside them is no part of it.

    Returns:
        Names of files in ``directory``, and the file of each tensor as the index has it; empty without one.

    Raises:
        ValueError: when there is neither an index nor the one file, or the index is broken or names a missing file.
    """
    index = directory / INDEX
    if not index.is_file():
        if not (directory / WEIGHTS).is_file():
            raise ValueError(f"{directory} holds neither {INDEX} nor {WEIGHTS}; {AGAIN}")
        return [WEIGHTS], {}
    weight_map = read_object(index).get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map and all(_is_name(file) for file in weight_map.values())):
        raise ValueError(f"{index} has no weight_map that gives each tensor a file beside it; {AGAIN}")
    names = sorted(set(weight_map.values()))
    lost = [name for name in names if not (directory / name).is_file()]
    if lost:
        raise ValueError(f"{directory} lacks {', '.join(lost[:5])}, which {INDEX} names; {AGAIN}")
    return names, weight_map


def _is_name(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file


@contextmanager
def unfinished_export(directory: Path) -> Iterator[Path]:
    """An empty folder in ``directory`` for the files of an export, which is removed in the end."""
    folder = directory / UNFINISHED
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def write_weights(tensors: Iterator[tuple[str, Tensor]], directory: Path, limit: int) -> None:
    """Write one file, or several and an index; one file's tensors are in memory at a time.

    Args:
        tensors: by name; contiguous copies are made on the CPU.
        directory: without other files of weights.
        limit: bytes that a file has at most, unless it holds a single tensor.
    """
    from safetensors.torch import save_file

    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def close() -> None:
        nonlocal size
        save_file(shard, directory / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(shard))
        shard.clear()
        size = 0

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            close()
        shard[name] = tensor.detach().to("cpu").contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    close()
    _name(files, total, directory)


def _name(files: list[list[str]], total: int, directory: Path) -> None:
    """Give the files their names, which say how many there are."""
    if len(files) == 1:
        (directory / "0.safetensors").rename(directory / WEIGHTS)
        return
    weight_map = {}
    for number, names in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"{number}.safetensors").rename(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def replace_export(directory: Path, folder: Path) -> None:
    """Put the files of ``folder``, a whole export, in the place of the model in ``directory``."""
    for old in [directory / CONFIG, directory / INDEX, *directory.glob("model*.safetensors"), directory / _OTHERS]:
        old.unlink(missing_ok=True)
    for new in sorted(folder.iterdir(), key=lambda path: path.name == CONFIG):
        os.replace(new, directory / new.name)
