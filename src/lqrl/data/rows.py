"""Where rows come from: a JSON-lines file, a Hugging Face dataset, or (``data.tasks``) a generator."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lqrl.extras import pip_install

Row = dict[str, Any]


class RowSource(ABC):
    """A sized, indexable source of rows."""

    @abstractmethod
    def identity(self) -> str:
        """Name of the source and its split; with the row number it makes a prompt's stable id."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Where row ``index`` is, for messages."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def __getitem__(self, index: int) -> Row:
        """Row ``index``."""


@dataclass(frozen=True)
class JsonLines(RowSource):
    """A file with one JSON object a line; blank lines are skipped.

    Attributes:
        path: the file.
        name: identity of the file; without it the file's name is used, so that a moved file keeps its prompt ids. Give
            two files of the same name different ones.
    """

    path: str
    name: str | None = None

    def identity(self) -> str:
        """``name``, or the file's name."""
        return self.name or Path(self.path).name

    def where(self, index: int) -> str:
        """Path and line number."""
        return f"{self.path}, line {self._rows[index][0]}"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index][1]

    @cached_property
    def _rows(self) -> list[tuple[int, Row]]:
        """Line numbers and rows, read at first use.

        Raises:
            FileNotFoundError: when there is no such file.
            ValueError: when it is empty, or a line is not a JSON object.
        """
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"data file {path} does not exist (looked in {Path.cwd()}); correct the path of JsonLines"
            )
        rows: list[tuple[int, Row]] = []
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number}: not JSON ({error.msg}, column {error.colno}); write one object a line"
                    ) from error
                if not isinstance(row, dict):
                    raise ValueError(
                        f"{path}, line {number}: a {type(row).__name__} instead of an object; write "
                        '{"prompt": ..., "answer": ...}'
                    )
                rows.append((number, row))
        if not rows:
            raise ValueError(f"data file {path} is empty; write one JSON object a line")
        return rows


@dataclass(frozen=True)
class HubDataset(RowSource):
    """A Hugging Face dataset, such as ``openai/gsm8k`` with config ``main``.

    Attributes:
        name: repository or local directory.
        config: configuration of the dataset.
        split: split, slices such as ``train[:100]`` included.
        revision: commit or tag; without it the newest.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def identity(self) -> str:
        """Name, config and split."""
        return f"{self.name}|{self.config}|{self.split}"

    def where(self, index: int) -> str:
        """Dataset, split and row number."""
        return f"dataset {self.name} ({self.config or 'default'}), split {self.split}, row {index}"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return dict(self._dataset[index])

    @cached_property
    def _dataset(self) -> Any:
        """The dataset, loaded at first use.

        Raises:
            ImportError: when ``datasets`` is not installed.
            ValueError: when the split has no rows.
        """
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ImportError(
                f"dataset {self.name} needs the package datasets: {pip_install('datasets')}, or save the rows as a "
                "file and use JsonLines"
            ) from error
        dataset = load_dataset(self.name, self.config, split=self.split, revision=self.revision)
        if len(dataset) == 0:
            raise ValueError(f"dataset {self.name}, split {self.split} has no rows; choose another split")
        return dataset
