"""The other process of tests of shared memory: reads what a test sends, and says what it got.

``python shared_reader.py LIBRARY DIRECTORY STOP``: LIBRARY is the replaced driver, or ``gpu``; after STOP tensors the
process hangs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from fake_cuda import FakeCuda
from torch import Tensor

from lqrl.engines.cuda_ipc import IpcDriver, Place, opened
from lqrl.engines.digest import digest
from lqrl.engines.vllm.parts import announced, read_parts
from lqrl.engines.vllm.staging import Unpacker
from lqrl.engines.vllm.transfer import read_weights


class Fake(FakeCuda):
    """The driver of `fake_cuda.c`, and what it counts."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.calls = IpcDriver(str(library))

    @property
    def place(self) -> Place:
        """Makes the thread's context current, and nothing longer than the block."""

        @contextmanager
        def place() -> Iterator[int]:
            self.ready()
            yield 0

        return place

    @property
    def holds(self) -> tuple[int, int]:
        """Bytes that are its own, and buffers of others."""
        return self._library.fake_live(), self._library.fake_opened()


def received(library: str, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """What is sent through ``directory``."""
    if library == "gpu":
        yield from read_weights(directory, torch.device("cuda"))
        return
    fake, plan = Fake(Path(library)), announced(directory)
    assert plan is not None
    handles = [bytes.fromhex(handle) for handle in plan["handles"]]
    with opened(fake.calls, fake.place, handles, plan["buffer_bytes"]) as buffers:
        yield from read_parts(directory, Unpacker(buffers, torch.device("cpu")))
    assert fake.holds == (0, 0)


def main(library: str, directory: Path, stop: int) -> None:
    tensors: list[tuple[str, Tensor]] = []
    for each in received(library, directory):
        tensors.append(each)
        if len(tensors) == stop:
            print("stopped", flush=True)
            time.sleep(600)
    said = [[name, str(t.dtype), list(t.shape), digest([(name, t.cpu())])] for name, t in tensors]
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
