"""Ranges of mapped memory against a driver that is replaced by `fake_cuda.c`: order of calls, faults, leaks."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_cuda import FakeCuda
from interrupts import each_line

from lqrl.engines.cuda_memory import Driver, DriverError, MappedRange, OutOfDeviceMemory

UNIT = 2**16


class Fake(FakeCuda):
    """The replaced driver, and what it counts."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.calls = Driver(str(library))

    @property
    def holds(self) -> tuple[int, int, int]:
        """Ranges, mappings, bytes."""
        gc.collect()
        return self._library.fake_ranges(), self._library.fake_mappings(), self._library.fake_live()

    def range(self, size: int, part: int = 4 * UNIT) -> MappedRange:
        return MappedRange(self.calls, 0, size, self.ready, part)


@pytest.fixture
def fake(fake_cuda: Path) -> Iterator[Fake]:
    fake = Fake(fake_cuda)
    fake.total(2**28)
    fake.fail("", 0)
    yield fake
    assert fake.holds == (0, 0, 0)  # whatever a test did, nothing is left


def test_memory_comes_and_goes_behind_one_address(fake: Fake) -> None:
    held = fake.range(10 * UNIT - 5)
    address = held.address
    assert (held.size, held.mapped, fake.holds) == (10 * UNIT, False, (1, 0, 0))
    for value in (1, 2):
        held.map()
        assert fake.holds == (1, 3, 10 * UNIT)  # parts of 4, 4 and 2 units
        ctypes.memset(address, value, held.size)
        assert ctypes.string_at(address + held.size - 1, 1) == bytes([value])
        held.unmap()
        assert (held.mapped, held.address, fake.holds) == (False, address, (1, 0, 0))


def test_mapping_twice_and_unmapping_twice_do_nothing(fake: Fake) -> None:
    held = fake.range(UNIT)
    held.unmap()
    for _ in range(2):
        held.map()
    assert fake.holds == (1, 1, UNIT)
    for _ in range(2):
        held.unmap()
    assert fake.holds == (1, 0, 0)


def test_fifty_cycles_leak_nothing(fake: Fake) -> None:
    held = fake.range(9 * UNIT)
    for _ in range(50):
        held.map()
        held.unmap()
    held.map()
    assert fake.holds == (1, 3, 9 * UNIT)
    del held  # mapped as it is
    assert fake.holds == (0, 0, 0)


def test_too_little_memory_is_told_in_numbers_and_leaves_nothing_behind(fake: Fake) -> None:
    fake.total(2**20)
    other, held = fake.range(4 * UNIT), fake.range(14 * UNIT)
    other.map()
    with pytest.raises(OutOfDeviceMemory, match=r"0\.00 GiB are asked .*free on cuda:0 .*cuMemCreate.*OUT_OF_MEMORY"):
        held.map()
    assert (held.mapped, fake.holds) == (False, (2, 1, 4 * UNIT))
    other.unmap()
    held.map()
    assert held.mapped


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_fault_in_the_middle_of_mapping_is_undone(fake: Fake, call: str, after: int) -> None:
    held = fake.range(10 * UNIT)
    fake.fail(call, 801, after if call != "cuMemSetAccess" else 0)
    with pytest.raises(DriverError, match=f"{call}: CUDA_ERROR_NOT_SUPPORTED; .*sleep_level to 0"):
        held.map()
    assert (held.mapped, fake.holds) == (False, (1, 0, 0))
    held.map()
    ctypes.memset(held.address, 7, held.size)


def test_an_interrupt_at_any_line_leaves_nothing_behind(fake: Fake) -> None:
    """Neither of mapping nor of unmapping: the next call finds its way, whatever was done and noted by then."""
    functions = {f.__code__ for f in (MappedRange.map, MappedRange.unmap, Driver.map, Driver.unmap)}
    for first in (MappedRange.map, MappedRange.unmap):
        for then in (MappedRange.map, MappedRange.unmap):

            def prepared(first=first) -> Callable[[], object]:
                nonlocal held
                held = fake.range(10 * UNIT)
                if first is MappedRange.unmap:
                    held.map()
                return lambda: first(held)

            held = fake.range(UNIT)
            for _ in each_line(functions, prepared):
                then(held)
                held.map()
                assert held.mapped
                ctypes.memset(held.address, 7, held.size)
                assert fake.holds[1:] == (3, 10 * UNIT)
                held.unmap()
                assert fake.holds[1:] == (0, 0)


def test_an_error_without_a_name_has_its_number(fake: Fake) -> None:
    fake.fail("cuMemAddressReserve", 999)
    with pytest.raises(DriverError, match="cuMemAddressReserve: error 999; set the engine's sleep_level to 0"):
        fake.range(UNIT)


def test_another_thread_gets_the_context_before_it_maps(fake: Fake) -> None:
    held, seen = fake.range(UNIT), []
    thread = threading.Thread(target=lambda: (held.map(), seen.append(held.mapped), held.unmap()))
    thread.start()
    thread.join()
    assert seen == [True]


def test_without_a_context_the_driver_says_what_is_missing(fake_cuda: Path) -> None:
    said: list[str] = []

    def ask() -> None:
        try:
            Driver(str(fake_cuda)).free_and_total()
        except DriverError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert said == ["cuMemGetInfo_v2: CUDA_ERROR_INVALID_CONTEXT; use the GPU through torch in this thread first"]


@pytest.mark.parametrize("library", ["libcuda_of_nobody.so.1", "libc.so.6"])
def test_a_library_that_is_no_driver_names_the_fix(library: str) -> None:
    with pytest.raises(DriverError, match=rf"{library} cannot be used .*install NVIDIA's driver"):
        Driver(library)
