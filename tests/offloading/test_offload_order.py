"""Copies into slots, and the work of the device that used them before."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import needs
import pytest

from streamload.devices.base import ReadTable
from streamload.errors import DeviceError

torch = needs.module("torch")
hf = needs.module("transformers")

import offloading_models as models  # noqa: E402
from bulk_stand_in import Bulk, Refills, Slot, Staged, staged  # noqa: E402

from streamload.offloading.prefetch import Rounds  # noqa: E402
from streamload.transformers import from_pretrained  # noqa: E402

__all__ = ["staged"]
pytestmark = pytest.mark.usefixtures("staged")


class Queued:
    """What a device has been asked to do, and does when it is waited for."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.ended, self.copies = False, list[tuple[int, bytes]]()
        self.number = next(self.numbers)
        self.stream = self.number % 2

    def wait(self) -> None:
        for target, data in self.copies:
            ctypes.memmove(target, data, len(data))
        self.ended, self.copies = True, []


class Late(Refills):
    """Copies come late, and each asserts that it waits for the work that used its memory."""

    uses: ClassVar[list[tuple[int, int, Queued]]] = []  # address, end, the last work
    threads: ClassVar[list[str]] = []
    locked = False
    faults = 0  # to raise in the thread that computes

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._all = [Queued()]

    @property
    def next(self) -> Any:
        return self._all[-1]

    @next.setter
    def next(self, ticket: Any) -> None:
        pass

    @classmethod
    def used(cls, start: int, stop: int) -> list[tuple[int, int, Queued]]:
        """The work that uses memory."""
        return [each for each in cls.uses if each[0] < stop and start < each[1]]

    def is_locked(self, reads: ReadTable) -> bool:
        return self.locked

    def run(self, fd: int, parts: Any, locks: bool, after: Sequence[Any] = ()) -> None:
        self.threads.append(threading.current_thread().name)
        if self.faults and threading.current_thread() is threading.main_thread():
            Late.faults -= 1
            raise OSError(5, "injected")
        reads = ReadTable.joined(parts)
        for offset, nbytes, _, first, count, shift in reads.rows.tolist():
            data = os.pread(fd, nbytes, offset)
            for at, size, address, *_ in reads.copies[first : first + count].tolist():
                target = address + shift
                used = self.used(target, target + size)
                assert all(
                    work.ended  # a thread has waited for it
                    or any(
                        work.stream == each.stream and work.number <= each.number for each in after
                    )
                    for _, _, work in used
                )
                self.uses[:] = [each for each in self.uses if each not in used]
                self.next.copies.append((target, data[at : at + size]))
        self._all.append(Queued())

    def wait(self) -> None:
        for each in self._all:
            each.wait()


@pytest.fixture
def late(staged: type[Staged], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that come late, and note of all work that uses slots."""
    release = Rounds._release

    def released(self: Any, numbers: Sequence[int], work: Any) -> bool:
        for number in {*numbers} & {*self.users} if work is not None else ():
            start = self.memory.views(number, self._held[number].first)[1][0].data_ptr()
            stop = start + self.memory._residency.slot_nbytes * self._layers[number].slots
            Late.uses.append((start, stop, work))
        return release(self, numbers, work)

    def follow(self: Staged, tickets: Sequence[Queued]) -> None:
        for ticket in tickets:
            ticket.wait()

    def refiller(self: Bulk, count: int, slots: int, nbytes: int) -> Late:
        return Late(self._loop, self._reads, [Slot(nbytes) for _ in range(count * slots)], count)

    monkeypatch.setattr(Rounds, "_release", released)
    monkeypatch.setattr(Bulk, "refiller", refiller)
    monkeypatch.setattr(staged, "follow", follow)

    def synchronized(self: Staged) -> None:
        for _, _, work in Late.uses:
            work.wait()

    monkeypatch.setattr(staged, "synchronize", synchronized)
    monkeypatch.setattr(staged, "mark", lambda self: Queued())
    Late.uses.clear()
    Late.threads.clear()


def _offloaded(path: Path, share: float, threads: int) -> tuple[Any, torch.Tensor]:
    models.built("llama").bfloat16().save_pretrained(path)
    whole: Any = from_pretrained(path, device="cpu", progress=False)
    budget = int(share * whole.streamload_report.resident_nbytes)
    model = from_pretrained(
        path, device="cpu", progress=False, budget=budget, offload=True, threads=threads
    )
    return model, models.logits(whole)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("locked", [False, True])
def test_copies_wait_on_the_device_for_what_it_computes(
    locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Late, "locked", locked)
    models.built("llama").bfloat16().save_pretrained(tmp_path)
    whole: Any = from_pretrained(tmp_path, device="cpu", progress=False)
    expected, nbytes = models.logits(whole), whole.streamload_report.resident_nbytes
    for part in (0.6, 0.7, 0.8):
        budget = int(nbytes * part)
        Late.uses.clear()
        model: Any = from_pretrained(
            tmp_path, device="cpu", progress=False, budget=budget, offload=True, threads=2
        )
        with model.streamload_offload as offloaded:
            assert offloaded.plan.residency.streams
            rounds = offloaded._rounds
            for turn in range(8):
                for _ in range(2):  # of two streams, before its slot is filled again
                    rounds.acquire(0)
                    rounds.release(0)
                faults = Late.faults = int(locked and turn == 6)
                for _ in range(20 if faults else 1):
                    try:
                        assert torch.equal(models.logits(model), expected)
                    except OSError:  # told once such a layer is waited for; it is read again
                        faults -= 1
                assert not Late.faults and faults >= 0
            mine = Late.threads.count(threading.current_thread().name)
            assert (mine > 0) == locked


@pytest.mark.usefixtures("late")
def test_copies_wait_where_no_thread_can_be_started(
    tmp_path: Path, staged: type[Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, run, runs = threading.Thread.start, Bulk.run, list[bool]()

    def started(self: threading.Thread) -> None:
        if self.name == "streamload-0":
            raise RuntimeError("can't start new thread")
        start(self)

    def ran(self: Bulk, *arguments: Any) -> Any:
        runs.append(all(work.ended for _, _, work in Late.uses[:-1]))  # two slots
        return run(self, *arguments)

    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(Bulk, "run", ran)
    model, expected = _offloaded(tmp_path, 0.7, threads=1)
    with model.streamload_offload:
        runs.clear()
        for _ in range(5):
            assert torch.equal(models.logits(model), expected)
    assert len(runs) > 5 and all(runs)


@pytest.mark.usefixtures("late")
def test_a_pause_as_a_layer_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is brought into slots that are gone."""
    monkeypatch.setattr(Late, "locked", True)
    model, _ = _offloaded(tmp_path, 0.7, threads=2)
    with model.streamload_offload as offloaded:
        models.logits(model)
        rounds = offloaded._rounds
        bring = Rounds._bring_next
        monkeypatch.setattr(
            Rounds, "_bring_next", lambda self, number: (rounds.pause(), bring(self, number))
        )
        rounds.acquire(0)
        rounds.release(0)
        assert not rounds.is_open and not rounds._held


class Timed(Slot):
    """A ticket of work that ends at a time."""

    def __init__(self, number: int, end_s: float) -> None:
        super().__init__(1)
        self.number, self.end_s = number, end_s

    def wait(self) -> None:
        time.sleep(max(self.end_s - time.monotonic(), 0))


class Slow(Refills):
    """Copies from locked pages, one after the other, of 4 ms each."""

    after: ClassVar[list[int]] = []  # numbers of the work that copies wait for
    end_s = 0.0

    def is_locked(self, reads: ReadTable) -> bool:
        return True

    def run(self, fd: int, parts: Any, locks: bool, after: Sequence[Any] = ()) -> None:
        """Copy at once, but say that it takes time."""
        ticket, _ = self.next, super().run(fd, parts, locks)
        begin_s = max([time.monotonic(), Slow.end_s, *(work.end_s for work in after)])
        Slow.end_s = begin_s + 0.004
        if isinstance(ticket, Timed):
            ticket.end_s = Slow.end_s
        self.next = Timed(0, 0.0)
        self.after += [work.number for work in after]


def test_a_copy_is_queued_while_another_runs(
    tmp_path: Path, staged: type[Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(
        Bulk,
        "refiller",
        lambda self, count, slots, nbytes: Slow(
            self._loop, self._reads, [Slot(nbytes) for _ in range(count * slots)], count
        ),
    )
    monkeypatch.setattr(staged, "mark", lambda self: Timed(next(numbers), 0.0))
    config = hf.LlamaConfig(**{**models.MODELS["llama"][2], "num_hidden_layers": 24})
    whole = hf.LlamaForCausalLM(config).bfloat16()
    whole.save_pretrained(tmp_path)
    budget = sum(parameter.nbytes for parameter in whole.parameters()) // 2
    model: Any = from_pretrained(
        tmp_path, device="cpu", progress=False, budget=budget, offload=True, threads=2
    )
    with model.streamload_offload as offloaded:
        assert offloaded.plan.residency.slots == 2
        models.logits(model)
        Slow.after.clear()
        for _ in range(5):
            models.logits(model)
        late = sum(later < earlier for earlier, later in itertools.pairwise(Slow.after))
        assert late < len(Slow.after) // 10, Slow.after


class Lossy(Late):
    """Copies of which some fail on the device, after they were started."""

    def run(self, fd: int, parts: Any, locks: bool, after: Sequence[Any] = ()) -> None:
        """Lose every seventh: its bytes are wrong, and a wait for it raises."""
        ticket = self.next
        super().run(fd, parts, locks, after)
        if len(self.threads) % 7 == 6:
            ticket.copies = [(target, b"\x3f" * len(data)) for target, data in ticket.copies]
            ticket.is_lost = True


@pytest.mark.usefixtures("late")
def test_a_pass_with_bytes_that_were_lost_raises(
    tmp_path: Path, staged: type[Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(self: Queued) -> None:
        ended(self)
        if getattr(self, "is_lost", False):
            raise DeviceError("cpu", "a copy was lost")

    def follow(self: Staged, tickets: Sequence[Queued]) -> None:
        for ticket in tickets:  # on the device: nobody is told
            ended(ticket)

    def refiller(self: Bulk, count: int, slots: int, nbytes: int) -> Lossy:
        return Lossy(self._loop, self._reads, [Slot(nbytes) for _ in range(count * slots)], count)

    ended = Queued.wait
    monkeypatch.setattr(Queued, "wait", wait)
    monkeypatch.setattr(Bulk, "refiller", refiller)
    monkeypatch.setattr(staged, "follow", follow)
    monkeypatch.setattr(Late, "locked", True)
    model, expected = _offloaded(tmp_path, 0.6, threads=2)
    raised = 0
    with model.streamload_offload:
        for _ in range(40):
            try:
                assert torch.equal(models.logits(model), expected)
            except DeviceError:
                raised += 1
    assert 0 < raised < 40


@pytest.mark.usefixtures("late")
def test_an_interrupt_while_a_layer_gets_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pass runs: no slot is held by a layer that was not brought."""
    monkeypatch.setattr(Late, "locked", True)
    model, expected = _offloaded(tmp_path, 0.75, threads=2)
    fills, interrupts = Rounds._fills, 0

    def interrupted(self: Any) -> bool:
        nonlocal interrupts
        caller = sys._getframe(1)
        takes = caller.f_code is Rounds._take.__code__ and caller.f_locals["number"] == 0
        if interrupts and takes and threading.current_thread() is threading.main_thread():
            interrupts = 0
            raise KeyboardInterrupt
        return fills(self)

    monkeypatch.setattr(Rounds, "_fills", interrupted)
    with model.streamload_offload as offloaded:
        assert offloaded.plan.residency.slots == 1
        for _ in range(3):
            assert torch.equal(models.logits(model), expected)
        interrupts = 1
        for _ in range(20):
            with suppress(KeyboardInterrupt):
                assert torch.equal(models.logits(model), expected)
        assert not interrupts


@pytest.mark.usefixtures("late")
def test_an_interrupt_while_a_layer_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pass runs: no layer is taken to be in use."""
    monkeypatch.setattr(Late, "locked", True)
    models.built("llama").bfloat16().save_pretrained(tmp_path)
    whole: Any = from_pretrained(tmp_path, device="cpu", progress=False)
    expected, budget = models.logits(whole), int(0.75 * whole.streamload_report.resident_nbytes)
    model: Any = from_pretrained(
        tmp_path, device="cpu", progress=False, budget=budget, offload=True, threads=2
    )
    reads, interrupts = Rounds._reads_here, 0

    def interrupted(self: Any) -> bool:
        nonlocal interrupts
        is_released = sys._getframe(1).f_code.co_name == "_release"
        interrupts -= is_released
        if is_released and not interrupts:
            raise KeyboardInterrupt
        return reads(self)

    monkeypatch.setattr(Rounds, "_reads_here", interrupted)
    with model.streamload_offload:
        for nth in (1, 2):
            models.logits(model)
            interrupts = nth
            with pytest.raises(KeyboardInterrupt):
                models.logits(model)
            assert torch.equal(models.logits(model), expected)
