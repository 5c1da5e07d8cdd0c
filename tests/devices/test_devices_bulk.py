"""The compiled loop of reads and copies, with real files, and a driver of this test's own."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from streamload.devices.base import BulkFailure, Copy, Read, ReadTable
from streamload.devices.bulk import Loop, Team, libc_calls

_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p
)
_RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Driver:
    """A device in host memory. Copies are made when their event is waited for, or at the end.

    ``fail`` is "copy", "record" or "wait", and at which call of it, with which status.
    """

    def __init__(self, nbytes: int, fail: tuple[str, int, int] = ("", 0, 0)) -> None:
        self.memory = bytearray(nbytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.log: list[str] = []
        self._fail = fail
        self._begun: dict[int, list[tuple[int, int, int]]] = {}  # by stream, not recorded
        self._pending: dict[int, list[tuple[int, int, int]]] = {}  # by event
        self._functions = (_COPY(self._copy), _RECORD(self._record), _WAIT(self._wait))
        copy, record, wait = (
            ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions
        )
        self.loop = Loop(libc_calls() | {"copy": copy, "record": record, "wait": wait})

    def _status(self, call: str) -> int:
        self.log.append(call)
        name, at, status = self._fail
        return status if call == name and self.log.count(call) == at else 0

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self._begun.setdefault(stream, []).append((target, source, nbytes))
        return self._status("copy")

    def _record(self, event: int, stream: int) -> int:
        self._pending.setdefault(event, []).extend(self._begun.pop(stream, []))
        return self._status("record")

    def _wait(self, event: int) -> int:
        for target, source, nbytes in self._pending.pop(event, []):
            ctypes.memmove(target, source, nbytes)
        return self._status("wait")

    def finish(self) -> None:
        for event in list(self._pending):
            self._wait(event)


class Slots:
    def __init__(self, count: int, nbytes: int) -> None:
        self._memory = [bytearray(nbytes) for _ in range(count)]
        self.rows = [
            (ctypes.addressof(ctypes.c_char.from_buffer(memory)), 100 + i, 200 + i, False)
            for i, memory in enumerate(self._memory)
        ]


@pytest.fixture
def file(tmp_path: Path) -> Callable[[bytes], int]:
    def make(data: bytes) -> int:
        path = tmp_path / "data"
        path.write_bytes(data)
        return os.open(path, os.O_RDONLY)

    return make


def _reads(nbytes: int, step: int, base: int) -> list[Read]:
    return [
        Read(
            at,
            min(step, nbytes - at),
            min(step, nbytes - at),
            (Copy(0, min(step, nbytes - at), base + at),),
        )
        for at in range(0, nbytes, step)
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [1, 999, 1000, 1001, 12_345])
def test_a_file_arrives(file: Callable[[bytes], int], nbytes: int, count: int) -> None:
    """A slot is filled again when its own copies have ended, and not before."""
    data = random.Random(nbytes).randbytes(nbytes)
    driver, slots = Driver(nbytes), Slots(count, 1000)
    assert driver.loop(file(data), _reads(nbytes, 1000, driver.base), slots.rows) is None
    driver.finish()
    assert driver.memory == data


def test_slots_with_copies_under_way_are_waited_for(file: Callable[[bytes], int]) -> None:
    driver, slots = Driver(2000), Slots(2, 1000)
    rows = [slots.rows[0], (*slots.rows[1][:3], True)]
    driver.loop(file(bytes(2000)), _reads(2000, 1000, driver.base), rows)
    assert driver.log == ["copy", "record", "wait", "copy", "record"]


def test_one_read_has_several_copies(file: Callable[[bytes], int]) -> None:
    """Small neighbours share a read and go to places of their own; what is between is skipped."""
    data = bytes(range(200))
    driver, slots = Driver(300), Slots(2, 200)
    places = ((0, 50, driver.base + 200), (60, 40, driver.base), (199, 1, driver.base + 299))
    copies = tuple(Copy(*place) for place in places)
    reads = [Read(0, 200, 200, copies), Read(10, 5, 5, ())]
    assert driver.loop(file(data), reads, slots.rows) is None
    driver.finish()
    assert driver.memory[200:250] == data[:50]
    assert driver.memory[:40] == data[60:100]
    assert driver.memory[299] == data[199]


def test_a_read_past_the_end_needs_what_there_is(file: Callable[[bytes], int]) -> None:
    """Whole blocks may be asked for where the file ends in one."""
    driver, slots = Driver(100), Slots(2, 4096)
    fd = file(bytes(range(100)))
    assert driver.loop(fd, [Read(0, 4096, 100, (Copy(0, 100, driver.base),))], slots.rows) is None
    driver.finish()
    assert driver.memory == bytes(range(100))


def test_a_file_that_ends_early(file: Callable[[bytes], int]) -> None:
    driver, slots = Driver(3000), Slots(2, 1000)
    data = bytes([7]) * 2500
    failure = driver.loop(file(data), _reads(3000, 1000, driver.base), slots.rows)
    assert failure == BulkFailure(2, "end", 0)
    driver.finish()
    assert driver.memory == bytes([7]) * 2000 + bytes(1000)


def test_a_read_that_fails() -> None:
    """With its errno."""
    driver, slots = Driver(10), Slots(2, 10)
    (read,) = _reads(10, 10, driver.base)
    assert driver.loop(10_000, [read], slots.rows) == BulkFailure(0, "read", errno.EBADF)


@pytest.mark.parametrize(
    ("call", "at", "stage", "index"),
    [("copy", 3, "copy", 2), ("record", 2, "copy", 1), ("wait", 1, "wait", 2)],
)
def test_a_call_of_the_driver_that_fails(
    file: Callable[[bytes], int], call: str, at: int, stage: str, index: int
) -> None:
    """Its status is told, and nothing more is begun."""
    driver, slots = Driver(5000, (call, at, 719)), Slots(2, 1000)
    failure = driver.loop(file(bytes(5000)), _reads(5000, 1000, driver.base), slots.rows)
    assert failure is not None
    assert (failure.index, failure.stage, failure.code) == (index, stage, 719)
    assert driver.log[-1] == call


def test_nothing_to_do(file: Callable[[bytes], int]) -> None:
    """No reads are no failure."""
    driver, slots = Driver(1), Slots(2, 1)
    assert driver.loop(file(b""), [], slots.rows) is None
    assert driver.log == []


def _lanes() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("streamload-lane")]


def _team(driver: Driver, slots: Slots, count: int) -> Team:
    return Team(driver.loop, [row[:3] for row in slots.rows], count, nullcontext)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_threads_share_reads(file: Callable[[bytes], int], count: int) -> None:
    data = random.Random(count).randbytes(50_500)
    driver, slots = Driver(200_000), Slots(2 * count, 1000)
    fd, team = file(data), _team(driver, slots, count)
    whole = ReadTable.of(_reads(len(data), 1000, driver.base))
    few = ReadTable.of(_reads(500, 300, driver.base))
    assert len(_lanes()) == count - 1
    for shift in (0, 100_000, 60_000):
        reads = ReadTable.joined([(whole, shift), (few, 199_000)])
        assert team.run(fd, reads) is None
        driver.finish()
        assert driver.memory[shift : shift + len(data)] == data
        assert driver.memory[199_000:199_500] == data[:500]
        driver.memory[199_000:] = bytes(1000)
    assert team.run(fd, few) is None
    driver.finish()
    assert driver.memory[:500] == data[:500]
    team.close()
    assert not _lanes()


def test_the_first_failure_of_several_threads(file: Callable[[bytes], int]) -> None:
    """All reads before it are on their way; the threads can be used again."""
    driver, slots = Driver(9000), Slots(8, 1000)
    data = bytes([7]) * 2500
    team = _team(driver, slots, 4)
    for _ in range(3):
        driver.memory[:] = bytes(9000)
        reads = ReadTable.of(_reads(9000, 1000, driver.base))
        assert team.run(file(data), reads) == BulkFailure(2, "end", 0)
        driver.finish()
        assert driver.memory[:2000] == data[:2000]
    assert team.run(file(data), ReadTable.of(_reads(2500, 1000, driver.base))) is None
    team.close()
    assert not _lanes()


def test_threads_that_cannot_start(
    file: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, slots = Driver(5000), Slots(8, 1000)

    @contextmanager
    def refused() -> Iterator[None]:
        raise ValueError("not here")
        yield

    with pytest.raises(ValueError, match="not here"):
        Team(driver.loop, [row[:3] for row in slots.rows], 4, refused)
    assert not _lanes()
    start, left = threading.Thread.start, iter([True, True])

    def limited(self: threading.Thread) -> None:
        if not next(left, False):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    team = _team(driver, slots, 4)
    assert (team.count, _lanes()) == (1, [])
    data = random.Random(0).randbytes(5000)
    assert team.run(file(data), ReadTable.of(_reads(5000, 1000, driver.base))) is None
    driver.finish()
    assert driver.memory == data
    team.close()
