"""`offloading.prefetch`: layers that take turns in slots, over a device whose work ends late."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_helpers import plan_of
from recording import Faults, RecordingDevice, recorded
from safetensors.numpy import save_file

from streamload.checkpoint.open import open_checkpoint
from streamload.errors import OffloadError, StreamloadError
from streamload.offloading import prefetch
from streamload.offloading.prefetch import Rounds
from streamload.offloading.slots import Layer
from streamload.planning.match import wants_of
from streamload.planning.moves import DeviceSpec
from streamload.planning.sources import sources
from streamload.streaming.loop import Crew
from streamload.streaming.state import Transfer

_ALIGNMENT = 512


@dataclass(eq=False)
class _Part:
    """A piece of a slot."""

    data: memoryview


@dataclass(eq=False)
class _Work:
    device: _Late
    parts: Sequence[_Part]
    expected: Sequence[bytes]
    after: Sequence[Any]
    ended: bool = False

    def wait(self) -> None:
        with self.device.computing:
            if self.ended:
                return
            time.sleep(self.device.random.random() * self.device.slowness)
            try:
                for ticket in self.after:
                    ticket.wait()
                if [bytes(part.data) for part in self.parts] != list(self.expected):
                    self.device.wrongs.append("computed with other bytes")
            except StreamloadError:
                self.device.failed += 1
            finally:
                self.ended = True


@dataclass(eq=False)
class _Late(RecordingDevice):
    """Copies and work are ordered among themselves, and end when they are waited for."""

    slowness: float = 0.002  # the longest that work takes, in seconds
    failed: int = 0  # how much work followed a copy that was lost
    computing: Any = field(default_factory=threading.Lock)
    _after: list[Any] = field(default_factory=list)
    _reads: tuple[Sequence[_Part], Sequence[bytes]] = ((), ())

    def follow(self, tickets: Any) -> None:
        """The next work comes after a copy; the host waits for nothing."""
        self._after += tickets

    def compute(self, parts: Sequence[_Part], expected: Sequence[bytes]) -> None:
        self._reads = parts, expected

    def mark(self) -> _Work:
        parts, expected = self._reads
        after, self._after = self._after, []
        return _Work(self, parts, expected, after)


class _Slots:
    """Slots side by side in host memory."""

    def __init__(self, slots: int, slot_nbytes: int, layers: Sequence[Sequence[int]]) -> None:
        self.memory = memoryview(bytearray(slots * slot_nbytes))
        self.closed, self.count = False, slots
        self._slot_nbytes, self._layers = slot_nbytes, layers
        self.given: list[weakref.ref[_Part]] = []

    def views(self, layer: int, slot: int) -> tuple[Sequence[_Part], Sequence[_Part]]:
        at, found = slot * self._slot_nbytes, []
        for nbytes in self._layers[layer]:
            found.append(_Part(self.memory[at : at + nbytes]))
            self.given.append(weakref.ref(found[-1]))
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return found, found

    def again(self) -> _Slots:
        """As many, in other memory."""
        return _Slots(self.count, self._slot_nbytes, self._layers)

    def close(self) -> None:
        self.closed = True


@dataclass
class _Made:
    rounds: Rounds
    transfer: Transfer
    device: _Late
    slots: _Slots
    expected: list[list[bytes]]

    def use(self, number: int) -> None:
        parts = self.rounds.acquire(number)
        self.device.compute(parts, self.expected[number])
        self.rounds.release(number)

    def close(self) -> None:
        self.rounds.close("closed")
        assert self.slots.closed
        assert not [t for t in threading.enumerate() if t.name.startswith("streamload")]
        assert not self.device.wrongs
        assert all(staging.closed for staging in self.device.stagings)


def _made(
    path: Path, rng: random.Random, layers: int = 6, slots: int = 2, device: _Late | None = None
) -> _Made:
    """Layers of random sizes, the last of which takes two slots where there are as many."""
    device = device or _Late(seed=rng.randrange(999))
    sizes = [[rng.randrange(1, 4000) for _ in range(rng.randrange(1, 4))] for _ in range(layers)]
    tensors = {
        f"layer{n:02}.{at}": np.frombuffer(rng.randbytes(nbytes), np.uint8)
        for n, each in enumerate(sizes)
        for at, nbytes in enumerate(each)
    }
    save_file(tensors, path)
    checkpoint = open_checkpoint(path)
    fill, _, tied = sources(checkpoint, None, None, all_match=True)
    wants = wants_of(checkpoint, fill)
    plan = plan_of(
        checkpoint,
        DeviceSpec(device.info, 10**9),
        wants=wants,
        dtype=None,
        cast="numpy",
        readers=["pread"],
        tied=tied,
        chunk_nbytes=512,
        threads=3,
    )
    names = plan.placements.names
    order = sorted(range(len(names)), key=lambda at: names[at])
    plan = replace(plan, placements=plan.placements.chosen(order))
    found = [
        (layer, [at for at, _ in group])
        for layer, group in groupby(
            enumerate(plan.placements.names), key=lambda each: each[1].partition(".")[0]
        )
    ]
    nbytes = [[plan.placements[at].nbytes for at in places] for _, places in found]
    taken = [sum(-(-n // _ALIGNMENT) * _ALIGNMENT for n in each) for each in nbytes]
    slot_nbytes = -(-max(taken) // max(slots - 1, 1) // _ALIGNMENT) * _ALIGNMENT
    memory = _Slots(slots, slot_nbytes, nbytes)
    rounds = Rounds(
        device,
        [
            Layer(name, range(places[0], places[-1] + 1), -(-t // slot_nbytes), sum(n))
            for (name, places), n, t in zip(found, nbytes, taken, strict=True)
        ],
    )
    transfer = Transfer(plan, checkpoint, {plan.devices[0].device: device})
    rounds.open(transfer, memory)  # type: ignore[arg-type]
    expected = [
        [tensors[plan.placements.names[at]].tobytes() for at in places] for _, places in found
    ]
    return _Made(rounds, transfer, device, memory, expected)


@pytest.fixture(autouse=True)
def _no_deadlock() -> Iterator[None]:
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def _idle(seconds: float) -> Iterator[None]:
    """Threads end after so many seconds, and look often."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefetch, "_IDLE_S", seconds)
        patched.setattr(prefetch, "_LOOK_S", 0.005)
        yield


@pytest.mark.parametrize("seed", range(12))
def test_layers_are_right_in_any_order(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    made = _made(tmp_path / "x.safetensors", rng, slots=rng.randrange(1, 5))
    with _idle(rng.choice([0.0, 0.01, 2.0])):
        numbers = list(range(6))
        for _ in range(12):
            if rng.random() < 0.3:
                rng.shuffle(numbers)
            for number in numbers:
                for _ in range(rng.choice([1, 1, 1, 2])):
                    made.use(number)
                if rng.random() < 0.1:
                    time.sleep(rng.random() * 0.03)
        made.close()


@pytest.mark.parametrize("seed", range(12))
def test_slots_are_gone_between_a_pause_and_what_follows(seed: int, tmp_path: Path) -> None:
    """At any time: with copies under way, in other memory afterwards, with idle ends, or none."""
    rng = random.Random(seed)
    made, host = _made(tmp_path / "x.safetensors", rng, slots=rng.randrange(1, 5)), None
    with _idle(rng.choice([0.0, 0.02, 2.0])):
        for _ in range(8):
            for number in range(rng.randrange(7)):
                made.use(number)
            old = made.slots
            made.rounds.pause()
            assert old.closed and not made.rounds.is_open
            assert host is None or (host.closed and made.rounds._thread is None)
            with pytest.raises(OffloadError, match="turn on the device is over"):
                made.rounds.acquire(0)
            made.device.compute((), ())  # it keeps the last parts
            gc.collect()
            until = time.monotonic() + 10
            while any(part() for part in old.given):
                assert time.monotonic() < until
                time.sleep(0.001)
            time.sleep(rng.choice([0, 0, 0.03]))
            made.slots = old.again()
            host = old if rng.random() < 0.5 else None
            old.closed = False
            made.rounds.open(made.transfer, made.slots, None, host)  # type: ignore[arg-type]
        made.rounds.acquire(0)
        with pytest.raises(OffloadError, match="cannot be paused"):
            made.rounds.pause()
        made.rounds.release(0)
        if rng.random() < 0.5:
            made.rounds.pause()
        made.close()


@pytest.mark.parametrize("seed", range(16))
def test_errors_are_raised_and_the_next_pass_is_right(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    operation = rng.choice(["read", "staging", "copy", "wait"])
    faults = Faults({operation: rng.randrange(1, 60)}, OSError(5, "injected"))
    device = _Late(seed=seed, faults=Faults() if operation == "read" else faults)
    with recorded(tmp_path) as disk:
        if operation == "read":
            disk.faults = faults
        made = _made(tmp_path / "x.safetensors", rng, slots=rng.randrange(1, 5), device=device)
        raised = 0
        for _ in range(12):
            try:
                for number in range(6):
                    made.use(number)
            except (OSError, StreamloadError):
                raised += 1
        for number in range(6):  # nothing is left of it
            made.use(number)
        assert raised <= 2
        if faults.calls[operation] and operation == "wait":
            assert raised or not made.device.failed
        made.close()


def test_a_copy_that_is_lost_after_its_layer_was_handed_out_is_told(tmp_path: Path) -> None:
    """Nobody waits when the worker meets it; the next layer that is asked for raises."""
    made = _made(tmp_path / "x.safetensors", random.Random(1), slots=3)
    made.use(0)
    real, done = made.device.finish, threading.Event()

    def lose(copy: Any) -> None:
        if not copy.done:
            made.device.lost.add(copy)
            made.device.pending.remove(copy)
            copy.done = True  # nobody makes it when it is waited for again
            done.set()

    made.device.finish = lose  # type: ignore[method-assign]
    with pytest.raises(StreamloadError, match="a copy was lost"):
        for _ in range(20):
            for number in range(6):
                made.use(number)
    assert done.is_set()
    made.device.finish = real  # type: ignore[method-assign]
    for _ in range(3):
        for number in range(6):
            made.use(number)
    made.close()


def test_an_error_that_nobody_waited_for_is_not_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that failed is still ending as the model waits again: it gets its layer."""
    at: dict[str, int] = {}
    faults = Faults(error=OSError(5, "injected"))
    faults._at = at
    made = _made(tmp_path / "x", random.Random(1), slots=3, device=_Late(faults=faults))
    real, ends = Crew.join, threading.Event()

    def join(crew: Crew) -> None:
        until = time.monotonic() + 20
        while at and not made.rounds._wanted and time.monotonic() < until:
            time.sleep(0.001)
        if at and made.rounds._wanted:
            ends.set()
        at.clear()
        real(crew)

    monkeypatch.setattr(Crew, "join", join)
    made.use(0)
    until = time.monotonic() + 10
    while len(made.rounds._held) < 3 or any(map(made.rounds._is_unsure, range(6))):
        assert time.monotonic() < until
        time.sleep(0.001)
    at["copy"] = faults.calls["copy"] + 1
    made.use(0)
    made.use(1)  # what comes in its place fails
    while faults.calls["copy"] < at["copy"]:
        assert time.monotonic() < until
        time.sleep(0.001)
    for _ in range(3):
        for number in range(6):
            made.use(number)
    assert ends.is_set()
    made.close()


@pytest.mark.parametrize("seed", range(6))
def test_close_and_a_second_thread_never_wait_forever(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    made = _made(tmp_path / "x.safetensors", rng, slots=rng.randrange(1, 4))
    problems: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                for number in range(6):
                    made.use(number)
        except OffloadError as error:
            problems.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(rng.random() * 0.1)
    while True:
        try:
            made.close()
            break
        except OffloadError:
            time.sleep(0.001)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert all("two threads" in str(p) or "closed" in str(p) for p in problems)
    assert len(problems) == 3
    with pytest.raises(OffloadError, match="closed"):
        made.rounds.acquire(0)


def test_a_layer_inside_another_is_brought_where_there_is_room(tmp_path: Path) -> None:
    """What computes keeps its slots meanwhile; without room it is refused, and all goes on."""
    for slots in (1, 4):
        made = _made(tmp_path / "x.safetensors", random.Random(2), slots=slots)
        for _ in range(3):
            parts = made.rounds.acquire(0)
            if slots == 1:
                with pytest.raises(OffloadError, match="no room for both"):
                    made.rounds.acquire(3)
            else:
                made.use(3)
                made.use(0)
            made.device.compute(parts, made.expected[0])  # it kept its slot
            made.rounds.release(0)
            made.use(1)
        made.close()


def test_what_was_offloaded_before_a_fork_says_so(tmp_path: Path) -> None:
    """The child has no threads and other threads' locks: it is refused, at once."""
    made = _made(tmp_path / "x.safetensors", random.Random(3))
    made.use(0)
    child = os.fork()
    if not child:
        try:
            made.rounds.acquire(1)
        except OffloadError as error:
            made.rounds.close("closed")
            os._exit(3 if "forked" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    made.use(1)
    made.close()


def test_what_was_paused_before_a_fork_is_opened_in_the_child(tmp_path: Path) -> None:
    made = _made(tmp_path / "x.safetensors", random.Random(4))
    made.use(0)
    made.rounds.pause()
    child = os.fork()
    if not child:
        made.slots = made.slots.again()
        made.rounds.open(made.transfer, made.slots)  # type: ignore[arg-type]
        for number in range(6):
            made.use(number)
        made.rounds.close("closed")
        os._exit(3 if made.slots.closed and not made.device.wrongs else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    made.slots = made.slots.again()
    made.rounds.open(made.transfer, made.slots)  # type: ignore[arg-type]
    made.use(1)
    made.close()
