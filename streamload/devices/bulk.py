"""Many reads, copies and casts in one call, without the interpreter: file to slot to device.

Between two reads of a few megabytes an interpreter has some tens of microseconds of work, in caches
that the read has just emptied, under a lock that every other thread wants as well. On one H200 with
16 cores a load of 16 GB streamed at 28 to 34 GB/s with the stream's own loop in Python and at 33 to
39 with this one; the same reads and copies alone, again and again into the same memory, reach 42 to
48. Loops in Python fell to 14 with more threads or smaller reads, this one did not. It is LLVM IR,
compiled as the casts are; where it cannot be compiled, the stream goes on in Python.

A slot is filled by pread, or is a window on a map of the file: pages of the page cache that the
driver locks, copies from, and lets go of again. A cast is a kernel on the copy's stream.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from streamload.cast.kernels import (
    PLACES_CODE,
    Code,
    compile_object,
    host_target,
    load_object,
    movable_code,
    place_code,
    undefined_symbols,
)
from streamload.devices.base import (
    BulkFailure,
    BulkStage,
    Copy,
    CopyTable,
    Read,
    keep,
    read_kept,
)
from streamload.devices.ptx import BLOCK_THREADS

_STAGES: tuple[BulkStage, ...] = ("wait", "read", "end", "copy", "lock")

#: What is called, in the order in which their addresses are passed: pread(2), __errno_location,
#: and of the driver a copy to the device, the recording of an event, and the wait for one; a
#: kernel's launch, where there are casts; madvise(2) and the driver's locking and unlocking of
#: pages, where there are windows.
CALLS = ("pread", "errno", "copy", "record", "wait", "launch", "madvise", "lock", "unlock")

_POPULATE_READ, _DONTNEED = 22, 4  # MADV_...
_READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY

_SYMBOL = "streamload_bulk"

# reads:  {fd, offset, bytes to ask for, bytes needed, first copy, copies} each
# copies: {offset in the slot, bytes, device address, kernel or 0, elements, address of the cast
#         elements, of their tally, blocks} each; a kernel takes (address, cast, elements, tally)
# slots:  {address, stream, event, busy, window or 0} each; read i goes to slot i modulo how many
# window: {address of the file's first byte, locked address, locked bytes}
# failed: {index of the read, what a call returned}; the result is 0 or the stage's number from 1 on
_IR = f"""
define i64 @{_SYMBOL}(ptr %reads, i64 %n, ptr %copies, ptr %slots, i64 %nslots, ptr %calls,
                      ptr %failed) {{
entry:
  %pread = load ptr, ptr %calls
  %errno.p = getelementptr ptr, ptr %calls, i64 1
  %errno = load ptr, ptr %errno.p
  %copy.p = getelementptr ptr, ptr %calls, i64 2
  %copy = load ptr, ptr %copy.p
  %record.p = getelementptr ptr, ptr %calls, i64 3
  %record = load ptr, ptr %record.p
  %wait.p = getelementptr ptr, ptr %calls, i64 4
  %wait = load ptr, ptr %wait.p
  %launch.p = getelementptr ptr, ptr %calls, i64 5
  %launch = load ptr, ptr %launch.p
  %madvise.p = getelementptr ptr, ptr %calls, i64 6
  %madvise = load ptr, ptr %madvise.p
  %lock.p = getelementptr ptr, ptr %calls, i64 7
  %lock = load ptr, ptr %lock.p
  %unlock.p = getelementptr ptr, ptr %calls, i64 8
  %unlock = load ptr, ptr %unlock.p
  %parameters = alloca [4 x ptr]
  %parameters.1 = getelementptr ptr, ptr %parameters, i64 1
  %parameters.2 = getelementptr ptr, ptr %parameters, i64 2
  %parameters.3 = getelementptr ptr, ptr %parameters, i64 3
  %code.p = getelementptr i64, ptr %failed, i64 1
  br label %next

next:
  %i = phi i64 [ 0, %entry ], [ %i1, %recorded ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %begin, label %ok

begin:
  store i64 %i, ptr %failed
  %r = getelementptr [6 x i64], ptr %reads, i64 %i
  %fd64 = load i64, ptr %r
  %fd = trunc i64 %fd64 to i32
  %offset.p = getelementptr i64, ptr %r, i64 1
  %offset = load i64, ptr %offset.p
  %asked.p = getelementptr i64, ptr %r, i64 2
  %asked = load i64, ptr %asked.p
  %needed.p = getelementptr i64, ptr %r, i64 3
  %needed = load i64, ptr %needed.p
  %first.p = getelementptr i64, ptr %r, i64 4
  %first = load i64, ptr %first.p
  %count.p = getelementptr i64, ptr %r, i64 5
  %count = load i64, ptr %count.p
  %which = urem i64 %i, %nslots
  %slot = getelementptr [5 x i64], ptr %slots, i64 %which
  %memory = load ptr, ptr %slot
  %stream.p = getelementptr i64, ptr %slot, i64 1
  %stream = load ptr, ptr %stream.p
  %event.p = getelementptr i64, ptr %slot, i64 2
  %event = load ptr, ptr %event.p
  %busy.p = getelementptr i64, ptr %slot, i64 3
  %busy = load i64, ptr %busy.p
  %window.p = getelementptr i64, ptr %slot, i64 4
  %window = load ptr, ptr %window.p
  %is.window = icmp ne ptr %window, null
  %is.busy = icmp ne i64 %busy, 0
  br i1 %is.busy, label %waiting, label %free

waiting:
  %waited = call i32 %wait(ptr %event)
  store i64 0, ptr %busy.p
  %wait.failed = icmp ne i32 %waited, 0
  br i1 %wait.failed, label %failed.wait, label %free

free:
  br i1 %is.window, label %letting.go, label %reading

letting.go:
  %locked.p = getelementptr i64, ptr %window, i64 1
  %locked = load ptr, ptr %locked.p
  %size.locked.p = getelementptr i64, ptr %window, i64 2
  %size.locked = load i64, ptr %size.locked.p
  %is.locked = icmp ne i64 %size.locked, 0
  br i1 %is.locked, label %let.go, label %showing

let.go:
  store i64 0, ptr %size.locked.p
  %unlocked = call i32 %unlock(ptr %locked)
  %dropped = call i32 %madvise(ptr %locked, i64 %size.locked, i32 {_DONTNEED})
  %unlock.failed = icmp ne i32 %unlocked, 0
  br i1 %unlock.failed, label %failed.unlock, label %showing

showing:
  %map = load ptr, ptr %window
  %shown = getelementptr i8, ptr %map, i64 %offset
  br label %populate

populate:
  %populated = call i32 %madvise(ptr %shown, i64 %asked, i32 {_POPULATE_READ})
  %is.populated = icmp eq i32 %populated, 0
  br i1 %is.populated, label %locking, label %not.populated

not.populated:
  %why.at = call ptr %errno()
  %why = load i32, ptr %why.at
  switch i32 %why, label %failed.populate [ i32 4, label %populate
                                            i32 {errno.EINVAL}, label %locking ]

locking:
  %lock.code = call i32 %lock(ptr %shown, i64 %asked, i32 {_READ_ONLY})
  %lock.failed = icmp ne i32 %lock.code, 0
  br i1 %lock.failed, label %failed.lock, label %is.locked.now

is.locked.now:
  store ptr %shown, ptr %locked.p
  store i64 %asked, ptr %size.locked.p
  br label %copying

reading:
  %done = phi i64 [ 0, %free ], [ %done1, %got.some ], [ %done, %interrupted ]
  %enough = icmp uge i64 %done, %needed
  br i1 %enough, label %copying, label %read

read:
  %to = getelementptr i8, ptr %memory, i64 %done
  %left = sub i64 %asked, %done
  %from = add i64 %offset, %done
  %got = call i64 %pread(i32 %fd, ptr %to, i64 %left, i64 %from)
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
  br i1 %is.eintr, label %interrupted, label %failed.read

interrupted:
  br label %reading

copying:
  %address = phi ptr [ %memory, %reading ], [ %shown, %is.locked.now ]
  store i64 1, ptr %busy.p
  br label %copy.next

copy.next:
  %k = phi i64 [ 0, %copying ], [ %k1, %copied ]
  %more.copies = icmp ult i64 %k, %count
  br i1 %more.copies, label %copy.one, label %copies.done

copy.one:
  %c.i = add i64 %first, %k
  %c = getelementptr [8 x i64], ptr %copies, i64 %c.i
  %at = load i64, ptr %c
  %size.p = getelementptr i64, ptr %c, i64 1
  %size = load i64, ptr %size.p
  %target.p = getelementptr i64, ptr %c, i64 2
  %target = load i64, ptr %target.p
  %source = getelementptr i8, ptr %address, i64 %at
  %copy.code = call i32 %copy(i64 %target, ptr %source, i64 %size, ptr %stream)
  %copy.failed = icmp ne i32 %copy.code, 0
  br i1 %copy.failed, label %failed.copy, label %is.there

is.there:
  %kernel.p = getelementptr i64, ptr %c, i64 3
  %kernel = load ptr, ptr %kernel.p
  %casts = icmp ne ptr %kernel, null
  br i1 %casts, label %casting, label %copied

casting:
  %numel.p = getelementptr i64, ptr %c, i64 4
  %cast.p = getelementptr i64, ptr %c, i64 5
  %tally.p = getelementptr i64, ptr %c, i64 6
  %blocks.p = getelementptr i64, ptr %c, i64 7
  %blocks64 = load i64, ptr %blocks.p
  %blocks = trunc i64 %blocks64 to i32
  store ptr %target.p, ptr %parameters
  store ptr %cast.p, ptr %parameters.1
  store ptr %numel.p, ptr %parameters.2
  store ptr %tally.p, ptr %parameters.3
  %launched = call i32 %launch(ptr %kernel, i32 %blocks, i32 1, i32 1, i32 {BLOCK_THREADS}, i32 1,
                               i32 1, i32 0, ptr %stream, ptr %parameters, ptr null)
  %launch.failed = icmp ne i32 %launched, 0
  br i1 %launch.failed, label %failed.launch, label %copied

copied:
  %k1 = add i64 %k, 1
  br label %copy.next

copies.done:
  %record.code = call i32 %record(ptr %event, ptr %stream)
  %record.failed = icmp ne i32 %record.code, 0
  br i1 %record.failed, label %failed.record, label %recorded

recorded:
  %i1 = add i64 %i, 1
  br label %next

ok:
  ret i64 0

failed.wait:
  %wait.code = sext i32 %waited to i64
  store i64 %wait.code, ptr %code.p
  ret i64 1

failed.read:
  %read.code = sext i32 %code to i64
  store i64 %read.code, ptr %code.p
  ret i64 2

failed.end:
  store i64 0, ptr %code.p
  ret i64 3

failed.copy:
  %copy.code64 = sext i32 %copy.code to i64
  store i64 %copy.code64, ptr %code.p
  ret i64 4

failed.launch:
  %launch.code64 = sext i32 %launched to i64
  store i64 %launch.code64, ptr %code.p
  ret i64 4

failed.unlock:
  %unlock.code64 = sext i32 %unlocked to i64
  store i64 %unlock.code64, ptr %code.p
  ret i64 5

failed.populate:
  %populate.code64 = sext i32 %why to i64
  store i64 %populate.code64, ptr %code.p
  ret i64 2

failed.lock:
  %lock.code64 = sext i32 %lock.code to i64
  store i64 %lock.code64, ptr %code.p
  ret i64 5

failed.record:
  %record.code64 = sext i32 %record.code to i64
  store i64 %record.code64, ptr %code.p
  ret i64 4
}}
"""


class Loop:
    """The compiled loop, for functions at given addresses.

    Args:
        calls: addresses by `CALLS`; those that the work does not need may be left out.
    """

    def __init__(self, calls: dict[str, int]) -> None:
        self._function = _compiled()
        self._calls = array("Q", [calls.get(name, 0) for name in CALLS])

    def __call__(
        self, fd: int, reads: Sequence[Read], slots: Sequence[tuple[int, int, int, bool, int]]
    ) -> BulkFailure | None:
        """Run it.

        Args:
            fd: the file.
            reads: what to do, in order.
            slots: (address, stream, event, whether copies may be under way, address of what is
                known of the window, or 0) of each.
        """
        flat_reads, flat_copies = array("Q"), array("Q")
        for read in reads:
            first = len(flat_copies) // len(Copy._fields)
            flat_reads.extend((fd, read.offset, read.asked, read.needed, first, len(read.copies)))
            if isinstance(read.copies, CopyTable):
                flat_copies.frombytes(read.copies.rows.tobytes())
                continue
            for copy in read.copies:
                flat_copies.extend(copy)
        flat_slots = array("Q", [int(value) for slot in slots for value in slot])
        failed = array("q", (0, 0))
        stage = self._function(
            _address(flat_reads),
            len(reads),
            _address(flat_copies),
            _address(flat_slots),
            len(slots),
            _address(self._calls),
            _address(failed),
        )
        return BulkFailure(failed[0], _STAGES[stage - 1], failed[1]) if stage else None


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


def libc_calls() -> dict[str, int]:
    """Addresses of pread (with an offset of 64 bits), errno's place and madvise: glibc and musl.

    Raises:
        OSError: this C library has them under other names.
    """
    libc = ctypes.CDLL(None)
    try:
        pread = libc.pread64 if hasattr(libc, "pread64") else libc.pread
        functions = {"pread": pread, "errno": libc.__errno_location, "madvise": libc.madvise}
    except AttributeError as error:
        raise OSError(str(error)) from error
    return {
        name: ctypes.cast(function, ctypes.c_void_p).value or 0
        for name, function in functions.items()
    }


@cache
def _compiled() -> Any:
    """The loop's function, which drops the interpreter's lock.

    On x86-64 Linux its machine code, 1 kB, is kept for later processes, which then do without
    llvmlite: to load that library and compile takes 35 to 69 ms of a process's first load, to take
    over what was kept 0.3 ms (medians of 9 fresh processes, three times, on 2 cores).

    Raises:
        ImportError: llvmlite is not installed, and nothing is kept.
        OSError: its library does not load, or the system refuses executable memory.
        RuntimeError: it cannot compile for this machine.
    """
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    prototype = ctypes.CFUNCTYPE(size, pointer, size, pointer, pointer, size, pointer, pointer)
    # the machine's name tells its byte order, too
    depends_on = ("loop", os.uname().machine, _IR) if PLACES_CODE else None
    kept = read_kept(*depends_on) if depends_on is not None else None
    if kept is not None:
        return prototype(place_code(Code.unpack(kept)))
    # for the least CPU of its kind: the loop has no use for more, and other machines may share
    # the folder
    target = replace(host_target(), cpu="", features="")
    image = compile_object(_IR, target)
    needed = undefined_symbols(image)
    if needed:
        raise RuntimeError(f"the compiled loop would call {', '.join(needed)}")
    if depends_on is not None:
        code = movable_code(image, _SYMBOL)
        if code is not None:
            keep(code.pack(), *depends_on)
    function, engine = load_object(image, target, _SYMBOL, prototype)
    function.engine = engine
    return function
