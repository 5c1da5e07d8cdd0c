"""Many reads and copies in one call, without the interpreter: file to slot to device.

Between two reads of a few megabytes an interpreter has some tens of microseconds of work, in caches
that the read has just emptied, under a lock that every other thread wants as well. On one H200 with
16 cores a load of 16 GB streamed at 28 to 34 GB/s with the stream's own loop in Python and at 33 to
39 with this one; the same reads and copies alone, again and again into the same memory, reach 42 to
48. Loops in Python fell to 14 with more threads or smaller reads, this one did not. It is LLVM IR,
compiled as the casts are; where it cannot be compiled, the stream goes on in Python.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

from streamload.cast.kernels import compile_object, host_target, load_object, undefined_symbols
from streamload.devices.base import BulkFailure, BulkStage, Read

_STAGES: tuple[BulkStage, ...] = ("wait", "read", "end", "copy")

#: What is called, in the order in which their addresses are passed: pread(2), __errno_location,
#: and of the driver a copy to the device, the recording of an event, and the wait for one.
CALLS = ("pread", "errno", "copy", "record", "wait")

_SYMBOL = "streamload_bulk"

# reads:  {fd, offset, bytes to ask for, bytes needed, first copy, copies} each
# copies: {offset in the slot, bytes, device address} each
# slots:  {address, stream, event, busy} each; read i goes to slot i modulo their number
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
  %slot = getelementptr [4 x i64], ptr %slots, i64 %which
  %address = load ptr, ptr %slot
  %stream.p = getelementptr i64, ptr %slot, i64 1
  %stream = load ptr, ptr %stream.p
  %event.p = getelementptr i64, ptr %slot, i64 2
  %event = load ptr, ptr %event.p
  %busy.p = getelementptr i64, ptr %slot, i64 3
  %busy = load i64, ptr %busy.p
  %is.busy = icmp ne i64 %busy, 0
  br i1 %is.busy, label %waiting, label %reading

waiting:
  %waited = call i32 %wait(ptr %event)
  store i64 0, ptr %busy.p
  %wait.failed = icmp ne i32 %waited, 0
  br i1 %wait.failed, label %failed.wait, label %reading

reading:
  %done = phi i64 [ 0, %begin ], [ 0, %waiting ], [ %done1, %got.some ], [ %done, %interrupted ]
  %enough = icmp uge i64 %done, %needed
  br i1 %enough, label %copying, label %read

read:
  %to = getelementptr i8, ptr %address, i64 %done
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
  store i64 1, ptr %busy.p
  br label %copy.next

copy.next:
  %k = phi i64 [ 0, %copying ], [ %k1, %copied ]
  %more.copies = icmp ult i64 %k, %count
  br i1 %more.copies, label %copy.one, label %copies.done

copy.one:
  %c.i = add i64 %first, %k
  %c = getelementptr [3 x i64], ptr %copies, i64 %c.i
  %at = load i64, ptr %c
  %size.p = getelementptr i64, ptr %c, i64 1
  %size = load i64, ptr %size.p
  %target.p = getelementptr i64, ptr %c, i64 2
  %target = load i64, ptr %target.p
  %source = getelementptr i8, ptr %address, i64 %at
  %copy.code = call i32 %copy(i64 %target, ptr %source, i64 %size, ptr %stream)
  %copy.failed = icmp ne i32 %copy.code, 0
  br i1 %copy.failed, label %failed.copy, label %copied

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

failed.record:
  %record.code64 = sext i32 %record.code to i64
  store i64 %record.code64, ptr %code.p
  ret i64 4
}}
"""


class Loop:
    """The compiled loop, for functions at given addresses.

    Args:
        calls: addresses by `CALLS`.
    """

    def __init__(self, calls: dict[str, int]) -> None:
        self._function = _compiled()
        self._calls = array("Q", [calls[name] for name in CALLS])

    def __call__(
        self, fd: int, reads: Sequence[Read], slots: Sequence[tuple[int, int, int, bool]]
    ) -> BulkFailure | None:
        """Run it.

        Args:
            fd: the file.
            reads: what to do, in order.
            slots: (address, stream, event, whether copies may be under way) of each.
        """
        flat_reads, flat_copies = array("Q"), array("Q")
        for read in reads:
            first = len(flat_copies) // 3
            flat_reads.extend((fd, read.offset, read.asked, read.needed, first, len(read.copies)))
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
    """Addresses of pread (with an offset of 64 bits) and of errno's place, in glibc and musl.

    Raises:
        OSError: this C library has them under other names.
    """
    libc = ctypes.CDLL(None)
    try:
        pread = libc.pread64 if hasattr(libc, "pread64") else libc.pread
        functions = {"pread": pread, "errno": libc.__errno_location}
    except AttributeError as error:
        raise OSError(str(error)) from error
    return {
        name: ctypes.cast(function, ctypes.c_void_p).value or 0
        for name, function in functions.items()
    }


@cache
def _compiled() -> Any:
    """The loop's function, which drops the interpreter's lock.

    Raises:
        ImportError: llvmlite is not installed.
        OSError: its library does not load.
        RuntimeError: it cannot compile for this machine.
    """
    target = host_target()
    image = compile_object(_IR, target)
    needed = undefined_symbols(image)
    if needed:
        raise RuntimeError(f"the compiled loop would call {', '.join(needed)}")
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    prototype = ctypes.CFUNCTYPE(size, pointer, size, pointer, pointer, size, pointer, pointer)
    function, engine = load_object(image, target, _SYMBOL, prototype)
    function.engine = engine
    return function
