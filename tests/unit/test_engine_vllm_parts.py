"""A refresh of servers that load each layer as it comes: order, memory, and whoever stops in the middle."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import test_engine_vllm_server
import torch
from test_engine_vllm_server import drawn, engine_on, wanted, weights
from torch import Tensor
from vllm_peers import PATIENCE, VLLMPeer, loading

from lqrl.engines.base import RefreshError, StaleEngineError
from lqrl.engines.digest import digest
from lqrl.engines.vllm import VLLMServerEngine, VLLMServerEngineFactory
from lqrl.engines.vllm.parts import ReadersEnded, announce_parts, layer_files, read_parts, send_parts
from lqrl.engines.vllm.transfer import read_weights

Start = Callable[..., VLLMPeer]
start = test_engine_vllm_server.start

LAYER = 1 << 22
LAYERS = 48


def layers(count: int = 4, size: int = 6) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors, each made when it is asked for."""
    yield "model.embed_tokens.weight", torch.randn(3, 2)
    for i in range(count):
        yield f"model.layers.{i}.b.weight", torch.full((size // 2,), i, dtype=torch.int8)
        yield f"model.layers.{i}.a.weight", torch.full((2, size // 4), i, dtype=torch.int8).t()
    yield "model.norm.weight", torch.ones(2)


def never() -> bool:
    return False


# ---------------------------------------------------------------- parts


def test_readers_get_every_tensor_in_order_and_the_directory_is_emptied(tmp_path: Path) -> None:
    sent = list(layers())
    announce_parts(tmp_path, PATIENCE)
    most = 0

    def watched() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for each in sent:
            most = max(most, len([p for p in tmp_path.iterdir() if p.suffix in (".part", ".writing")]))
            yield each

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(lambda: list(read_weights(tmp_path))) for _ in range(3)]
        send_parts(layer_files(watched()), tmp_path, readers=3, ended=never)
        found = [reader.result() for reader in readers]
    for each in found:
        assert [name for name, _ in each] == [name for name, _ in sent]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(each, sent, strict=True))
    assert 1 <= most <= 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["end", "parts.json"]


_READER = """
import sys
from pathlib import Path
from lqrl.engines.vllm.parts import read_parts
def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
def read(directory):
    total = 0
    for name, tensor in read_parts(Path(directory)):
        total += tensor.clone().nbytes
        del tensor
    return total
read(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
Path("/proc/self/clear_refs").write_text("5")  # what is resident is the peak again
before = resident("VmRSS")
total = read(sys.argv[2])
print(resident("VmHWM") - before, total)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not say what was used at most")
def test_each_side_has_a_few_layers_in_memory_at_most(tmp_path: Path) -> None:
    """Resident memory of a sender and a reader, of 48 layers of 4 MiB."""
    warm, measured = tmp_path / "warm", tmp_path / "measured"
    for directory in (warm, measured):
        directory.mkdir()
        announce_parts(directory, PATIENCE)
    held: list[int] = []

    def watched(stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for each in stream:
            held.append(sum(p.stat().st_size for p in measured.glob("*.*") if p.suffix != ".read"))
            yield each

    command = [sys.executable, "-c", _READER, str(warm), str(measured)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        ended = lambda: reader.poll() is not None  # noqa: E731
        send_parts(layer_files(layers(3, LAYER)), warm, readers=1, ended=ended)
        assert reader.stdout.readline() == "ready\n"
        reader.stdin.write("\n")
        reader.stdin.flush()
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        send_parts(layer_files(watched(layers(LAYERS, LAYER))), measured, readers=1, ended=ended)
        sender = _resident("VmHWM") - before
        received, total = map(int, reader.stdout.readline().split())
    assert total > LAYERS * LAYER
    assert max(held) < 2.1 * LAYER
    # 2 and 1 layers as a rule, and what the allocators keep
    assert sender < 7 * LAYER
    assert received < 7 * LAYER


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def test_a_sender_that_fails_ends_its_readers(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(layers())[:4]
        raise KeyboardInterrupt

    announce_parts(tmp_path, PATIENCE)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: list(read_parts(tmp_path)))
        with pytest.raises(KeyboardInterrupt):
            send_parts(layer_files(broken()), tmp_path, readers=1, ended=never)
        with pytest.raises(RefreshError, match="the learner stopped before part 2"):
            reader.result(timeout=PATIENCE)


def test_a_reader_waits_for_a_silent_sender_only_so_long(tmp_path: Path) -> None:
    announce_parts(tmp_path, 0.1)
    with pytest.raises(RefreshError, match=r"part 0 of the weights did not come in 0\.1 s"):
        list(read_parts(tmp_path))


def test_a_reader_that_ends_stops_the_sender(tmp_path: Path) -> None:
    announce_parts(tmp_path, PATIENCE)
    over = threading.Event()

    def read_two() -> None:
        stream = read_parts(tmp_path)
        next(stream), next(stream)
        over.set()

    thread = threading.Thread(target=read_two)
    thread.start()
    with pytest.raises(ReadersEnded, match="before it had read all"):
        send_parts(layer_files(layers()), tmp_path, readers=1, ended=over.is_set)
    thread.join()


def test_a_reader_that_fails_ends_the_sender_and_the_others(tmp_path: Path) -> None:
    """As workers of one server, which answers when all of them have ended."""
    announce_parts(tmp_path, 60)

    def fail() -> None:
        with closing(read_weights(tmp_path)) as stream:
            next(stream), next(stream)
            raise ZeroDivisionError

    with ThreadPoolExecutor(2) as pool:
        other, failing = pool.submit(lambda: list(read_weights(tmp_path))), pool.submit(fail)
        with pytest.raises(ReadersEnded, match="before it had read all"):
            send_parts(layer_files(layers()), tmp_path, readers=2, ended=never)
        assert isinstance(failing.exception(timeout=5), ZeroDivisionError)
        with pytest.raises(RefreshError, match="the learner stopped before part"):
            other.result(timeout=5)


# ---------------------------------------------------------------- engines


def streaming(*peers: VLLMPeer, **options: object) -> VLLMServerEngine:
    return engine_on(*peers, stream_refresh=True, count_changes=False, **options)


def test_a_streamed_refresh_is_the_same_refresh(start: Start) -> None:
    peers = start(), start()
    engine = streaming(*peers)
    report = engine.update_weights(weights().items(), policy_version=4)
    whole = engine_on(*peers).update_weights(weights().items(), policy_version=4)
    assert (report.digest, report.tensors, report.elements) == (whole.digest, whole.tensors, whole.elements)
    assert [peer.held for peer in peers] == [digest(weights().items())] * 2
    assert drawn(engine) == wanted()


def test_a_stream_that_lacks_something_fails_the_refresh_on_all(start: Start) -> None:
    peers = start(), start()
    engine = streaming(*peers)
    engine.update_weights(weights().items(), policy_version=4)
    with pytest.raises(RefreshError, match=r"elements came; missing: model\.norm\.weight"):
        engine.update_weights([w for w in weights(1).items() if w[0] != "model.norm.weight"], policy_version=5)
    assert all(map(loading, peers))
    with pytest.raises(StaleEngineError, match=r"missing: model\.norm\.weight"):
        drawn(engine)
    engine.update_weights(weights(1).items(), policy_version=6)
    assert len(engine.serving) == 2
    assert drawn(engine) == wanted()


def test_a_replica_that_dies_while_it_reads_fails_the_refresh_and_the_next_goes_without(start: Start) -> None:
    dying, good = start(), start()
    engine = streaming(dying, good)
    engine.update_weights(weights().items(), policy_version=4)
    dying.before = lambda route: (-1, None) if route == "/collective_rpc" and loading(dying) else None
    began = time.monotonic()
    with pytest.raises(RefreshError, match=rf"failed on [12] of 2 replicas: .*{dying.url}: /collective_rpc failed"):
        engine.update_weights(weights(1).items(), policy_version=5)
    assert time.monotonic() - began < PATIENCE  # less than the readers wait
    dying.die()
    dying.gone()
    engine.update_weights(weights(1).items(), policy_version=6)
    assert engine.serving == [good.url]
    assert drawn(engine) == wanted()


def test_counting_changes_needs_what_streaming_does_not_keep() -> None:
    with pytest.raises(ValueError, match="set count_changes: false"):
        VLLMServerEngineFactory(stream_refresh=True)
