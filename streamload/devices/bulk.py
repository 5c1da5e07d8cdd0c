"""The compiled copy loop: many reads, copies and casts in one call, without the interpreter.

Between two reads the interpreter works for some tens of microseconds, under a lock that all threads
share: docs/measurements.md, "The copy loop". The loop is LLVM IR, compiled like the casts. If it
cannot be compiled, streaming uses its loop in Python.

A slot is filled by pread(2). A cast is a kernel on the copy's stream.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from streamload.codecs import llvm
from streamload.codecs.ptx import BLOCK_THREADS
from streamload.core.disk_cache import keep, read_kept
from streamload.core.system import PLACES_CODE, libc, place_code
from streamload.devices.base import BulkFailure, BulkStage, Copy, CopyTable, Read

_STAGES: tuple[BulkStage, ...] = ("wait", "read", "end", "copy")

#: The functions that the loop calls, in the order of their addresses: pread(2), __errno_location,
#: and the driver's copy to the device, recording of an event, wait for one, and kernel launch.
CALLS = ("pread", "errno", "copy", "record", "wait", "launch")

_SYMBOL = "streamload_bulk"

# reads:  {fd, offset, bytes to ask for, bytes needed, first copy, copies} each
# copies: the fields of a `Copy` each
# slots:  {address, stream, event, busy} each; read i goes to slot i modulo how many
# failed: {index of the read, a call's result}; the loop returns 0 or the stage's number from 1 on


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
    """Return LLVM IR that stores the addresses of loaded fields as a CUDA kernel's parameters."""
    lines = []
    for index, name in enumerate(names):
        lines.append(f"%parameters.{index} = getelementptr ptr, ptr %parameters, i64 {index}")
        lines.append(f"store ptr %{name}.p, ptr %parameters.{index}")
    return "\n  ".join(lines)


def _failed(name: str, stage: BulkStage, code: str) -> str:
    """Return LLVM IR at ``failed.name``: it stores a call's ``code`` and returns ``stage``."""
    return f"""
failed.{name}:
  %code.{name} = sext i32 {code} to i64
  store i64 %code.{name}, ptr %code.p
  ret i64 {_STAGES.index(stage) + 1}
"""


def _checked(name: str, stage: BulkStage, following: str) -> str:
    """Return LLVM IR that jumps to ``following`` if ``%name.code`` is 0, else to `_failed`."""
    return f"""%{name}.failed = icmp ne i32 %{name}.code, 0
  br i1 %{name}.failed, label %failed.{name}, label %{following}
{_failed(name, stage, f"%{name}.code")}"""


_IR = f"""
define i64 @{_SYMBOL}(ptr %reads, i64 %n, ptr %copies, ptr %slots, i64 %nslots, ptr %calls,
                      ptr %failed) {{
entry:
  {_words("%calls", ", ".join(f"ptr {name}" for name in CALLS))}
  %parameters = alloca [6 x ptr]
  %code.p = getelementptr i64, ptr %failed, i64 1
  br label %next

next:
  %i = phi i64 [ 0, %entry ], [ %i1, %recorded ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %begin, label %ok

begin:
  store i64 %i, ptr %failed
  %r = getelementptr [6 x i64], ptr %reads, i64 %i
  {_words("%r", "fd64, offset, asked, needed, first, count")}
  %fd = trunc i64 %fd64 to i32
  %which = urem i64 %i, %nslots
  %slot = getelementptr [4 x i64], ptr %slots, i64 %which
  {_words("%slot", "ptr memory, ptr stream, ptr event, busy")}
  %is.busy = icmp ne i64 %busy, 0
  br i1 %is.busy, label %waiting, label %reading

waiting:
  %wait.code = call i32 %wait(ptr %event)
  store i64 0, ptr %busy.p
  {_checked("wait", "wait", "reading")}

reading:
  %done = phi i64 [ 0, %begin ], [ 0, %waiting ], [ %done1, %got.some ], [ %done, %erred ]
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
  br i1 %is.eintr, label %reading, label %failed.read

copying:
  store i64 1, ptr %busy.p
  br label %copy.next

copy.next:
  %k = phi i64 [ 0, %copying ], [ %k1, %copied ]
  %more.copies = icmp ult i64 %k, %count
  br i1 %more.copies, label %copy.one, label %copies.done

copy.one:
  %c.i = add i64 %first, %k
  %c = getelementptr [10 x i64], ptr %copies, i64 %c.i
  {_words("%c", "at, size, target, ptr kernel, numel, cast, tally, blocks64, statistics, unit")}
  %source = getelementptr i8, ptr %memory, i64 %at
  %copy.code = call i32 %copy(i64 %target, ptr %source, i64 %size, ptr %stream)
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
  %i1 = add i64 %i, 1
  br label %next

ok:
  ret i64 0

{_failed("read", "read", "%code")}
{_failed("end", "end", "0")}
}}
"""


class Loop:
    """The compiled loop of reads and copies, over the addresses of the functions in `CALLS`."""

    def __init__(self, calls: dict[str, int]) -> None:
        self._function = _compiled()
        self._calls = array("Q", [calls.get(name, 0) for name in CALLS])

    def __call__(
        self, fd: int, reads: Sequence[Read], slots: Sequence[tuple[int, int, int, bool]]
    ) -> BulkFailure | None:
        """Read into the slots and start the copies; return the failure, or None.

        Each slot is (address, stream, event, whether copies from it may be running).
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
    """Return the address of an array's first element."""
    return values.buffer_info()[0]


def libc_calls() -> dict[str, int]:
    """Return the addresses of pread (64-bit offsets) and __errno_location, in glibc and musl.

    Raises:
        OSError: this C library has other names for them.
    """
    try:
        return addresses_of({name: getattr(libc(), name) for name in ("pread", "errno")})
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
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    prototype = ctypes.CFUNCTYPE(size, pointer, size, pointer, pointer, size, pointer, pointer)
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
