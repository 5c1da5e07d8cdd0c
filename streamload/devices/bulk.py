"""The compiled copy loop: many reads, copies and casts in one call, without the interpreter.

Between two reads the interpreter works for some tens of microseconds, under a lock that all threads
share: docs/measurements.md, "The copy loop". The loop is LLVM IR, compiled like the casts. If it
cannot be compiled, streaming uses its loop in Python.

A slot is filled by pread(2). Without a file (-1), copies begin at host addresses that the device
can read. A cast is a kernel on the copy's stream. Several threads can run one call (`Team`).
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from streamload.codecs import llvm
from streamload.codecs.ptx import BLOCK_THREADS
from streamload.core.disk_cache import keep, read_kept
from streamload.core.system import PLACES_CODE, libc, place_code
from streamload.devices.base import BulkFailure, BulkStage, Read, ReadTable

if TYPE_CHECKING:
    Words = array[int]
else:  # Python 3.11 has no array[int]
    Words = array

_STAGES: tuple[BulkStage, ...] = ("wait", "read", "end", "copy")

#: The functions that the loop calls, in the order of their addresses: pread(2), __errno_location,
#: the driver's copy to the device, recording of an event, wait for one, and kernel launch, and
#: sem_post(3) and sem_wait(3).
CALLS = ("pread", "errno", "copy", "record", "wait", "launch", "post", "pend")

_SYMBOL = "streamload_bulk"
_SEMAPHORE_NBYTES = 64  # sem_t has 32; one for each line of the cache

# job:    the fields of `_JOB`
# reads:  {offset, bytes to ask for, bytes needed, first copy, copies, shift of addresses} each
# copies: the fields of a `Copy` each
# slots:  {address, stream, event, busy} each; lane i has slot i, and each that is a multiple of the
#         number of lanes further, one after the other
# lanes:  {index of the read, a call's result, 0 or the stage's number from 1 on, reads so far} each
# Lane 0 is the caller's thread: it posts the semaphores of the others, works, and waits for its own
# once for each; the others return if there are -1 reads. Each takes the next read that none has.
_JOB = (
    *("calls", "semaphores", "count"),
    *("fd", "reads", "n", "copies", "slots", "nslots", "lanes", "taken"),
)


def _words(base: str, fields: str) -> str:
    """Return LLVM IR that loads a row's fields to ``%name``; their addresses are ``%name.p``.

    ``base`` is the row's address; ``fields`` lists its 8-byte fields: "name" (i64) or "ptr name".
    """
    lines = []
    for index, field in enumerate(fields.split(", ")):
        kind, _, name = field.rpartition(" ")
        lines.append(f"%{name}.p = getelementptr i64, ptr {base}, i64 {index}")
        lines.append(f"%{name} = load {kind or 'i64'}, ptr %{name}.p")
    return "\n  ".join(lines)


def _parameters(*names: str) -> str:
    lines = []
    for index, name in enumerate(names):
        lines.append(f"%parameters.{index} = getelementptr ptr, ptr %parameters, i64 {index}")
        lines.append(f"store ptr %{name}.p, ptr %parameters.{index}")
    return "\n  ".join(lines)


def _failed(name: str, stage: BulkStage, code: str) -> str:
    """Return LLVM IR at ``failed.name``: it stores a call's ``code`` and ends with ``stage``."""
    return f"""
failed.{name}:
  %code.{name} = sext i32 {code} to i64
  store i64 %code.{name}, ptr %code.p
  store i64 {_STAGES.index(stage) + 1}, ptr %stage.p
  br label %ended
"""


def _checked(name: str, stage: BulkStage, following: str) -> str:
    """Return LLVM IR that jumps to ``following`` if ``%name.code`` is 0, else to `_failed`."""
    return f"""%{name}.failed = icmp ne i32 %{name}.code, 0
  br i1 %{name}.failed, label %failed.{name}, label %{following}
{_failed(name, stage, f"%{name}.code")}"""


def _semaphore(lane: str) -> str:
    return f"getelementptr [{_SEMAPHORE_NBYTES} x i8], ptr %semaphores, i64 {lane}"


_FIELDS = [f"ptr {n}" if n not in ("count", "fd", "n", "nslots", "taken") else n for n in _JOB]
_IR = f"""
define void @{_SYMBOL}(ptr %job, i64 %lane) {{
entry:
  {_words("%job", ", ".join(_FIELDS[:3]))}
  {_words("%calls", ", ".join(f"ptr {name}" for name in CALLS))}
  %parameters = alloca [6 x ptr]
  %own = {_semaphore("%lane")}
  %leads = icmp eq i64 %lane, 0
  br i1 %leads, label %wake, label %idle

wake:
  %w = phi i64 [ 1, %entry ], [ %w1, %wake.one ]
  %asleep = icmp ult i64 %w, %count
  br i1 %asleep, label %wake.one, label %start

wake.one:
  %other = {_semaphore("%w")}
  call i32 %post(ptr %other)
  %w1 = add i64 %w, 1
  br label %wake

idle:
  %idle.code = call i32 %pend(ptr %own)
  %interrupted = icmp ne i32 %idle.code, 0
  br i1 %interrupted, label %idle, label %start

start:
  %rest = getelementptr i64, ptr %job, i64 3
  {_words("%rest", ", ".join(_FIELDS[3:]))}
  %fd32 = trunc i64 %fd to i32
  %state = getelementptr [4 x i64], ptr %lanes, i64 %lane
  %code.p = getelementptr i64, ptr %state, i64 1
  %stage.p = getelementptr i64, ptr %state, i64 2
  %turn.p = getelementptr i64, ptr %state, i64 3
  %mine = udiv i64 %nslots, %count
  %closes = icmp eq i64 %n, -1
  br i1 %closes, label %out, label %next

next:
  %i = atomicrmw add ptr %taken.p, i64 1 monotonic
  %more = icmp ult i64 %i, %n
  br i1 %more, label %begin, label %ended

begin:
  store i64 %i, ptr %state
  %r = getelementptr [6 x i64], ptr %reads, i64 %i
  {_words("%r", "offset, asked, needed, first, copies.n, shift")}
  %turn = load i64, ptr %turn.p
  %turn1 = add i64 %turn, 1
  store i64 %turn1, ptr %turn.p
  %at.mine = urem i64 %turn, %mine
  %further = mul i64 %at.mine, %count
  %which = add i64 %lane, %further
  %slot = getelementptr [4 x i64], ptr %slots, i64 %which
  {_words("%slot", "ptr memory, ptr stream, ptr event, busy")}
  %direct = icmp eq i32 %fd32, -1
  br i1 %direct, label %copying, label %filling

filling:
  %is.busy = icmp ne i64 %busy, 0
  br i1 %is.busy, label %waiting, label %reading

waiting:
  %wait.code = call i32 %wait(ptr %event)
  store i64 0, ptr %busy.p
  {_checked("wait", "wait", "reading")}

reading:
  %done = phi i64 [ 0, %filling ], [ 0, %waiting ], [ %done1, %got.some ], [ %done, %erred ]
  %enough = icmp uge i64 %done, %needed
  br i1 %enough, label %copying, label %read

read:
  %to = getelementptr i8, ptr %memory, i64 %done
  %left = sub i64 %asked, %done
  %from = add i64 %offset, %done
  %got = call i64 %pread(i32 %fd32, ptr %to, i64 %left, i64 %from)
  %none = icmp sle i64 %got, 0
  br i1 %none, label %got.none, label %got.some

got.some:
  %done1 = add i64 %done, %got
  br label %reading

got.none:
  %end = icmp eq i64 %got, 0
  br i1 %end, label %failed.end, label %erred

erred:
  %code.at = call ptr %errno()
  %code = load i32, ptr %code.at
  %is.eintr = icmp eq i32 %code, 4
  br i1 %is.eintr, label %reading, label %failed.read

copying:
  %base = phi ptr [ null, %begin ], [ %memory, %reading ]
  store i64 1, ptr %busy.p
  br label %copy.next

copy.next:
  %k = phi i64 [ 0, %copying ], [ %k1, %copied ]
  %more.copies = icmp ult i64 %k, %copies.n
  br i1 %more.copies, label %copy.one, label %copies.done

copy.one:
  %c.i = add i64 %first, %k
  %c = getelementptr [10 x i64], ptr %copies, i64 %c.i
  {_words("%c", "at, size, target, ptr kernel, numel, cast, tally, blocks64, statistics, unit")}
  %source = getelementptr i8, ptr %base, i64 %at
  %address = add i64 %target, %shift
  %copy.code = call i32 %copy(i64 %address, ptr %source, i64 %size, ptr %stream)
  {_checked("copy", "copy", "is.there")}

is.there:
  %casts = icmp ne ptr %kernel, null
  br i1 %casts, label %casting, label %copied

casting:
  %blocks = trunc i64 %blocks64 to i32
  {_parameters("target", "cast", "numel", "tally", "statistics", "unit")}
  %launch.code = call i32 %launch(ptr %kernel, i32 %blocks, i32 1, i32 1, i32 {BLOCK_THREADS},
                                  i32 1, i32 1, i32 0, ptr %stream, ptr %parameters, ptr null)
  {_checked("launch", "copy", "copied")}

copied:
  %k1 = add i64 %k, 1
  br label %copy.next

copies.done:
  %record.code = call i32 %record(ptr %event, ptr %stream)
  {_checked("record", "copy", "recorded")}

recorded:
  br label %next

{_failed("read", "read", "%code")}
{_failed("end", "end", "0")}

ended:
  br i1 %leads, label %join, label %ready

ready:
  call i32 %post(ptr %semaphores)
  br label %idle

join:
  %j = phi i64 [ 1, %ended ], [ %j, %join.one ], [ %j1, %joined ]
  %working = icmp ult i64 %j, %count
  br i1 %working, label %join.one, label %out

join.one:
  %join.code = call i32 %pend(ptr %semaphores)
  %woken = icmp eq i32 %join.code, 0
  br i1 %woken, label %joined, label %join

joined:
  %j1 = add i64 %j, 1
  br label %join

out:
  ret void
}}
"""


class Loop:
    """The compiled loop of reads and copies, over the addresses of the functions in `CALLS`."""

    def __init__(self, calls: dict[str, int]) -> None:
        self._function = _compiled()
        self._calls = array("Q", [calls.get(name, 0) for name in CALLS])

    def job(self, semaphores: int = 0, count: int = 1) -> Words:
        """Return a job for ``count`` threads; ``semaphores``: the address of theirs."""
        return array("Q", [_address(self._calls), semaphores, count, *bytes(len(_JOB) - 3)])

    def serve(self, job: Words, lane: int) -> None:
        """Work at a job whenever lane 0 does, until it has -1 reads; ``lane``: 1 or more."""
        self._function(_address(job), lane)

    def run(
        self, job: Words, fd: int, reads: ReadTable, slots: Words, lanes: Words
    ) -> BulkFailure | None:
        """Run a job as lane 0; all reads before one that failed are done, and perhaps others."""
        rows, copies = (_address_of(each) for each in (reads.rows, reads.copies))
        places = (copies, _address(slots), len(slots) // 4, _address(lanes), 0)
        job[3:] = array("Q", (fd % 2**64, rows, len(reads.rows), *places))
        self._function(_address(job), 0)
        found = []
        for at in range(0, len(lanes), 4):
            index, code, stage, _ = lanes[at : at + 4]
            if stage:
                found.append(BulkFailure(index, _STAGES[stage - 1], code))
                lanes[at + 2] = 0
        return min(found, key=lambda failure: failure.index, default=None)

    def __call__(
        self, fd: int, reads: Sequence[Read], slots: Sequence[tuple[int, int, int, bool]]
    ) -> BulkFailure | None:
        """Read into the slots and start the copies; return the failure, or None.

        Read ``i`` goes to slot ``i % len(slots)``. Each slot is (address, stream, event, whether
        copies from it may be running).
        """
        flat = array("Q", [int(value) for slot in slots for value in slot])
        return self.run(self.job(), fd, ReadTable.of(reads), flat, array("q", bytes(32)))


class Team:
    """Threads that share the reads of each call; between calls they wait without the GIL.

    `count`: number of threads, with the caller's.
    """

    def __init__(
        self,
        loop: Loop,
        slots: Sequence[tuple[int, int, int]],
        count: int,
        inside: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Start ``count`` - 1 threads, each within ``inside()``; none if the system has no more.

        ``slots``: (address, stream, event) each, as many for each thread.
        """
        self._loop, self._inside, self.count = loop, inside, count
        self._slots = array("Q", [value for slot in slots for value in (*slot, 0)])
        self._lanes = array("q", bytes(8 * 4 * count))
        self._semaphores = array("Q", bytes(_SEMAPHORE_NBYTES * count))
        for lane in range(count):
            libc().sem_init(self._semaphore(lane), 0, 0)
        self._alone = loop.job()
        self._job = loop.job(self._semaphore(0), count)
        self._begun: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for lane in range(1, count):
                name = f"streamload-lane-{lane}"
                thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.close()
        for failure in [self._begun.get() for _ in self._threads]:
            if failure is not None:
                self.close()
                raise failure

    def run(self, fd: int, reads: ReadTable, *, alone: bool = False) -> BulkFailure | None:
        """Read into the slots and start the copies; return the first failure, or None.

        ``alone``: the calling thread does it, and wakes no other.
        """
        job = self._alone if alone else self._job
        return self._loop.run(job, fd, reads, self._slots, self._lanes)

    def _semaphore(self, lane: int) -> int:
        return _address(self._semaphores) + _SEMAPHORE_NBYTES * lane

    def _serve(self, lane: int) -> None:
        try:
            with self._inside():
                self._begun.put(None)
                self._loop.serve(self._job, lane)
        except BaseException as failure:
            self._begun.put(failure)

    def close(self) -> None:
        """End the threads; `run` then works alone, and none may be under way."""
        self._job[_JOB.index("n")] = 2**64 - 1
        for lane in range(1, len(self._threads) + 1):
            libc().sem_post(self._semaphore(lane))
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.count, self._job = 1, self._alone


def _address(values: Words) -> int:
    return values.buffer_info()[0]


def _address_of(rows: np.ndarray[Any, Any]) -> int:
    return int(rows.ctypes.data)


def libc_calls() -> dict[str, int]:
    """Return the addresses of the loop's calls of the C library: glibc and musl have them.

    Raises OSError: this C library has other names for them.
    """
    names = {"pread": "pread", "errno": "errno", "post": "sem_post", "pend": "sem_wait"}
    try:
        return addresses_of({name: getattr(libc(), own) for name, own in names.items()})
    except AttributeError as error:
        raise OSError(str(error)) from error


def addresses_of(functions: Mapping[str, Any]) -> dict[str, int]:
    """Return the addresses of ctypes functions, by name."""
    return {
        name: ctypes.cast(function, ctypes.c_void_p).value or 0
        for name, function in functions.items()
    }


@cache
def _compiled() -> Any:
    """Return the loop's function, which releases the interpreter's lock.

    On x86-64 Linux its machine code, 1 kB, is cached for later processes, which then do not load
    llvmlite: that saves 35 to 69 ms of a first load (docs/measurements.md, "What is kept").

    Raises:
        ImportError: llvmlite is not installed, and nothing is cached.
        OSError: llvmlite's library does not load, or the system refuses executable memory.
        RuntimeError: LLVM cannot compile for this machine.
    """
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)
    # the machine's name implies its byte order
    depends_on = ("loop", os.uname().machine, _IR) if PLACES_CODE else None
    if depends_on is not None and (kept := read_kept(*depends_on)) is not None:
        return prototype(place_code(kept))
    # for the oldest CPU of the architecture: machines with other CPUs may share the cache folder
    target = replace(llvm.host_target(), cpu="", features="")
    image = llvm.compile_object(_IR, target)
    needed = llvm.undefined_symbols(image)
    if needed:
        raise RuntimeError(f"the compiled loop would call {', '.join(needed)}")
    if depends_on is not None and (code := llvm.movable_code(image)) is not None:
        keep(code, *depends_on)
    return llvm.link_object(image, target, _SYMBOL, prototype)
