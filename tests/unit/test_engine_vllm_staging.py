"""Weights through buffers that both sides reach: layout, reuse, and whoever ends in the middle."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import test_engine_vllm_server
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared_reader import Fake
from test_engine_vllm_server import SPEC, engine_on, weights
from torch import Tensor
from vllm_peers import VLLMPeer, loading

from lqrl.engines.base import RefreshError
from lqrl.engines.cuda_ipc import ALIGNMENT, exported, opened
from lqrl.engines.digest import digest
from lqrl.engines.vllm import VLLMServerEngineFactory, transfer
from lqrl.engines.vllm.fleet import ReplicasGoneError
from lqrl.engines.vllm.parts import ReadersEnded, announce_parts, read_parts, send_parts
from lqrl.engines.vllm.staging import Unpacker, packed
from lqrl.engines.vllm.transfer import Route, under_way
from lqrl.quant.cuda_driver import DriverError, OutOfDeviceMemory

Start = Callable[..., VLLMPeer]
start = test_engine_vllm_server.start
Sent = Sequence[tuple[str, Tensor]]

CPU = torch.device("cpu")
DTYPES = [
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.uint8,
    torch.int32, torch.int64, torch.bool,
]  # fmt: skip


class MainMemory:
    """Buffers of this process, whose copies arrive when they are waited for."""

    def __init__(self, size: int, count: int = 2, pause_s: float = 0.0) -> None:
        self.size, self.pause_s = size, pause_s
        self._held = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        self.addresses = [each.data_ptr() for each in self._held]
        self._queue: list[tuple[int, bytes]] = []

    def reader(self, pause_s: float = 0.0) -> MainMemory:
        """The same buffers for somebody else, who pauses before each copy."""
        other = MainMemory(0, 0, pause_s)
        other.size, other.addresses, other._held = self.size, self.addresses, self._held
        return other

    def copy(self, target: int, source: int, size: int) -> None:
        time.sleep(self.pause_s)
        self._queue.append((target, ctypes.string_at(source, size)))

    def wait(self) -> None:
        for target, data in self._queue:
            ctypes.memmove(target, data, len(data))
        self._queue.clear()


def bits(shape: Sequence[int], dtype: torch.dtype, generator: random.Random) -> Tensor:
    """Any bits that a dtype may have."""
    flat = torch.frombuffer(
        bytearray(generator.randbytes(max(1, dtype.itemsize * torch.Size(shape).numel()))), dtype=torch.uint8
    )
    flat = flat[: dtype.itemsize * torch.Size(shape).numel()]
    return (flat % 2 if dtype is torch.bool else flat).view(dtype).reshape(shape)


def model(generator: random.Random, count: int = 12, most: int = 700) -> Sent:
    """Tensors of all dtypes and of shapes with 0 to 3 dimensions, empty ones among them."""
    sent = [("one", bits([], torch.float32, generator)), ("none", bits([3, 0], torch.int8, generator))]
    for i in range(count):
        shape = [generator.randint(0, round(most ** (1 / 2))) for _ in range(generator.randint(0, 2))]
        tensor = bits(shape, DTYPES[i % len(DTYPES)], generator)
        sent.append((f"model.layers.{i // 4}.{i}", tensor.t() if tensor.dim() == 2 else tensor))
    sent.append(("large", bits([3 * most], torch.bfloat16, generator)))
    return sent


def check_same(found: Sent, sent: Sent) -> None:
    assert [(n, t.dtype, t.shape) for n, t in found] == [(n, t.dtype, t.shape) for n, t in sent]
    for (name, a), (_, b) in zip(found, sent, strict=True):
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)), name
        assert digest([(name, a)]) == digest([(name, b)])


def never() -> bool:
    return False


# ---------------------------------------------------------------- layout


@given(seed=st.integers(0, 2**32), units=st.integers(1, 12), most=st.sampled_from([10, 700, 3000]))
def test_what_is_packed_is_unpacked_bit_for_bit(seed: int, units: int, most: int) -> None:
    sent, memory = model(random.Random(seed), most=most), MainMemory(256 * units)
    unpacker, found, used = Unpacker(memory.reader(), CPU), [], []
    with tempfile.TemporaryDirectory() as name:
        for number, part in enumerate(packed(sent, memory, CPU)):
            path = Path(name) / str(number)
            part(path)
            said = json.loads(path.read_text())
            assert said["buffer"] == number % 2
            ends = [0, *(offset + size for *_, size, offset in said["pieces"])]
            assert all(end <= offset for end, (*_, offset) in zip(ends, said["pieces"], strict=False))
            assert ends[-1] <= memory.size
            assert all(offset % 256 == 0 for *_, offset in said["pieces"])
            used.append(sum(size for *_, size, _ in said["pieces"]))
            found += unpacker(path)
            for held in memory._held[number % 2 : number % 2 + 1]:
                held.fill_(0xEE)  # nothing that was read lies there
    check_same(found, sent)
    assert sum(used) == sum(t.nbytes for _, t in sent)
    assert len(used) <= -(-sum(used) // memory.size) + len(sent)  # no part is begun while there is room


def test_without_tensors_there_is_no_part() -> None:
    assert not list(packed([], MainMemory(256), CPU))


@pytest.mark.parametrize(
    ("index", "value"),
    [(3, 256), (5, -256), (5, 4096), (4, 10**6), (2, [1])],
    ids=["gap", "before", "behind", "size", "shape"],
)
def test_a_description_that_is_not_the_senders_is_refused(tmp_path: Path, index: int, value: object) -> None:
    memory = MainMemory(1024)
    (part,) = packed([("a.weight", torch.ones(4, 8))], memory, CPU)
    part(tmp_path / "part")
    said = json.loads((tmp_path / "part").read_text())
    said["pieces"][0][index] = value
    (tmp_path / "part").write_text(json.dumps(said))
    with pytest.raises(RefreshError, match=r"a\.weight: its bytes do not come in order"):
        list(Unpacker(memory.reader(), CPU)(tmp_path / "part"))


# ---------------------------------------------------------------- reuse


def test_a_buffer_is_used_again_when_the_slowest_reader_has_read_it(tmp_path: Path) -> None:
    sent, memory = model(random.Random(5), count=30), MainMemory(1024)
    announce_parts(tmp_path, 30)
    with ThreadPoolExecutor(3) as pool:
        readers = [
            pool.submit(lambda pause_s: list(read_parts(tmp_path, Unpacker(memory.reader(pause_s), CPU))), pause_s)
            for pause_s in (0.0, 0.004, 0.001)
        ]
        send_parts(packed(sent, memory, CPU), tmp_path, readers=3, ended=never)
        for reader in readers:
            check_same(reader.result(), sent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end", "parts.json"]


def test_a_sender_that_fails_ends_its_readers_in_the_middle_of_a_tensor(tmp_path: Path) -> None:
    memory = MainMemory(256)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "large", torch.ones(150)
        raise KeyboardInterrupt

    announce_parts(tmp_path, 30)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: list(read_parts(tmp_path, Unpacker(memory.reader(), CPU))))
        with pytest.raises(KeyboardInterrupt):
            send_parts(packed(broken(), memory, CPU), tmp_path, readers=1, ended=never)
        with pytest.raises(RefreshError, match="the learner stopped before part 2"):
            reader.result(timeout=5)


# ---------------------------------------------------------------- two processes


@pytest.fixture
def fake(fake_cuda: Path) -> Iterator[Fake]:
    fake = Fake(fake_cuda)
    fake.total(2**28)
    fake.fail("", 0)
    yield fake
    assert fake.holds == (0, 0)


def reading(library: object, directory: Path, stop: int = -1) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("shared_reader.py"))
    return subprocess.Popen(
        [sys.executable, script, str(library), str(directory), str(stop)], stdout=subprocess.PIPE, text=True
    )


def said_of(sent: Sent) -> list[list[object]]:
    return [[name, str(t.dtype), list(t.shape), digest([(name, t.cpu())])] for name, t in sent]


def send_shared(fake: Fake, library: Path, directory: Path, sent: Sent, stops: Sequence[int]) -> list[object]:
    """What processes that open the buffers got; one that is to stop is killed then."""
    with exported(fake.calls, fake.place, 2, 2**20) as buffers, ExitStack() as stack:
        announce_parts(directory, 60, handles=[h.hex() for h in buffers.handles], buffer_bytes=buffers.size)
        readers = [stack.enter_context(reading(library, directory, stop)) for stop in stops]
        stack.callback(lambda: [reader.kill() for reader in readers])
        watcher = ThreadPoolExecutor(1)
        stack.callback(watcher.shutdown)

        def kill_the_stopped() -> None:
            for reader, stop in zip(readers, stops, strict=True):
                if stop > 0:
                    assert reader.stdout is not None
                    assert reader.stdout.readline() == "stopped\n"
                    reader.kill()

        watcher.submit(kill_the_stopped)
        ended = lambda: any(reader.poll() is not None for reader in readers)  # noqa: E731
        send_parts(packed(sent, buffers, CPU), directory, readers=len(readers), ended=ended)
        return [json.loads(reader.communicate(timeout=60)[0]) for reader in readers]


def test_other_processes_get_the_bits_out_of_shared_memory(fake: Fake, fake_cuda: Path, tmp_path: Path) -> None:
    generator = random.Random(1)
    sent = [*model(generator), ("huge", bits([5 * 2**20 + 3], torch.int8, generator)), *model(generator)[:1]]
    got = send_shared(fake, fake_cuda, tmp_path, sent, stops=[-1, -1])
    assert got == [said_of(sent)] * 2


def test_a_process_that_is_killed_while_it_reads_keeps_nothing(fake: Fake, fake_cuda: Path, tmp_path: Path) -> None:
    generator = random.Random(2)
    sent = [(f"model.layers.{i}.weight", bits([2**19], torch.int8, generator)) for i in range(16)]
    with pytest.raises(ReadersEnded, match="before it had read all"):
        send_shared(fake, fake_cuda, tmp_path, sent, stops=[-1, 6])
    assert fake.holds == (0, 0)


# ---------------------------------------------------------------- faults of the driver


def test_a_process_cannot_open_its_own_buffers(fake: Fake) -> None:
    with exported(fake.calls, fake.place, 2, 1) as buffers:
        assert (buffers.size, fake.holds) == (ALIGNMENT, (2 * ALIGNMENT, 0))
        with (
            pytest.raises(DriverError, match="cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE; set transport: files"),
            opened(fake.calls, fake.place, buffers.handles, buffers.size),
        ):
            raise AssertionError


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuIpcGetMemHandle"])
def test_a_fault_leaves_nothing_behind(fake: Fake, call: str) -> None:
    fake.fail(call, 801, 1)  # of the second buffer
    with (
        pytest.raises(DriverError, match=f"{call}: CUDA_ERROR_NOT_SUPPORTED; set transport: files"),
        exported(fake.calls, fake.place, 2, 1),
    ):
        raise AssertionError
    assert fake.holds == (0, 0)


def test_too_little_memory_is_told_in_numbers(fake: Fake) -> None:
    fake.total(3 * ALIGNMENT)
    with (
        pytest.raises(OutOfDeviceMemory, match=r"no 4 MiB for weights on their way .*set transport: files"),
        exported(fake.calls, fake.place, 2, 2 * ALIGNMENT),
    ):
        raise AssertionError


# ---------------------------------------------------------------- the engine


def test_a_learner_on_the_cpu_has_no_memory_to_share(start: Start) -> None:
    with pytest.raises(ValueError, match="the learner is on cpu and the servers on cuda; set transport: files"):
        engine_on(start(), transport="cuda_ipc")
    with pytest.raises(ValueError, match="transport is files or cuda_ipc, got 'nccl'"):
        VLLMServerEngineFactory(transport="nccl")  # pyright: ignore[reportArgumentType]


def test_servers_without_a_gpu_and_on_another_machine_are_refused(start: Start) -> None:
    spec = replace(SPEC, device=torch.device("cuda"))
    for facts, error, said in (
        ({"platform": "cpu", "capability": None}, ValueError, "on cuda and the servers on cpu; set transport: files"),
        ({"machine": "another"}, RuntimeError, "1 of 1 .* on another machine than the learner.*set transport: files"),
        ({"machine": None}, RuntimeError, "on another machine than the learner"),
    ):
        factory = VLLMServerEngineFactory(urls=[start(**facts).url], transport="cuda_ipc", timeout_s=5)
        with pytest.raises(error, match=said):
            factory(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_a_refresh_names_the_other_transport(start: Start) -> None:
    factory = VLLMServerEngineFactory(urls=[start().url], transport="cuda_ipc", timeout_s=5)
    engine = factory(replace(SPEC, device=torch.device("cuda")))
    with pytest.raises(RefreshError, match=r"cannot go through the GPU's memory: .*set transport: files"):
        engine.update_weights(weights().items(), policy_version=1)


def test_a_worker_without_a_gpu_says_so(tmp_path: Path) -> None:
    announce_parts(tmp_path, 5, handles=["00" * 64] * 2, buffer_bytes=ALIGNMENT)
    with pytest.raises(RefreshError, match="the weights are on a GPU, the worker is on cpu; set transport: files"):
        list(transfer.read_weights(tmp_path, CPU))


def test_one_that_dies_while_it_reads_is_gone_and_the_others_may_try_again(start: Start) -> None:
    """What the engine does a refresh again for, when it still has the weights."""
    dying, good = start(), start()
    engine = engine_on(dying, good)
    engine.update_weights(weights().items(), policy_version=4)
    dying.before = lambda route: (-1, None) if route == "/collective_rpc" and loading(dying) else None
    with pytest.raises(ReplicasGoneError, match=rf"{dying.url}: /collective_rpc failed"):
        engine._fleet.load(weights(1).items(), engine._probe, Route(streams=True))
    assert engine.serving == [good.url]
    engine._fleet.load(weights(1).items(), engine._probe, Route(streams=True))
    assert good.held == digest(weights(1).items())


# ---------------------------------------------------------------- a GPU


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BUFFER_BYTES", ALIGNMENT)


def on_gpu(generator: random.Random) -> Sent:
    sent = [*model(generator), ("huge", bits([5 * 2**20 + 3], torch.int8, generator))]
    sent += [(f"model.layers.{i}.weight", bits([2**20], torch.bfloat16, generator)) for i in range(8)]
    return [(name, tensor.cuda() if name != "one" else tensor) for name, tensor in sent]


@pytest.mark.gpu
@pytest.mark.parametrize("readers", [1, 2])
def test_other_processes_get_the_bits_out_of_the_gpus_memory(tmp_path: Path, small_buffers: None, readers: int) -> None:
    sent, route = on_gpu(random.Random(3)), Route(device=torch.device("cuda"))
    with under_way(sent, tmp_path, route, readers=readers, patience_s=60) as send, ExitStack() as stack:
        assert send is not None
        processes = [stack.enter_context(reading("gpu", tmp_path)) for _ in range(readers)]
        stack.callback(lambda: [process.kill() for process in processes])
        send(ended=lambda: any(process.poll() is not None for process in processes))
        got = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert got == [said_of(sent)] * readers


def send_to_one_that_is_killed(sent: Sent, directory: Path) -> None:
    directory.mkdir()
    route = Route(device=torch.device("cuda"))
    with (
        under_way(sent, directory, route, readers=1, patience_s=60) as send,
        reading("gpu", directory, stop=18) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        assert send is not None
        assert process.stdout is not None
        pool.submit(lambda line: (line(), process.kill()), process.stdout.readline)
        send(ended=lambda: process.poll() is not None)


@pytest.mark.gpu
def test_a_reader_that_is_killed_leaves_the_gpu_its_memory(
    tmp_path: Path, small_buffers: None, whole_card: None
) -> None:
    sent, free = on_gpu(random.Random(4)), []
    for attempt in range(4):
        with pytest.raises(ReadersEnded, match="before it had read all"):
            send_to_one_that_is_killed(sent, tmp_path / str(attempt))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[0] - ALIGNMENT  # a buffer that stayed would take this much each time
