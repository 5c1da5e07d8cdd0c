"""Run measurements in child processes, and observe these from outside.

A child answers once it has imported its framework and opened the device, and then runs laps (timed
calls) on command. Only the parent samples counters of the kernel and of the driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

from streamload.core.memory import proc_fields
from streamload.core.system import python_command
from streamload.devices.cuda import Context
from streamload.errors import DeviceError

# reading a process's status takes 20 microseconds; a loader's buffers live longer than this
SAMPLE_S = 0.004
_SLOW_SAMPLES = 5  # counters of the machine and the driver take locks: read each fifth time
_GOODBYE_S = 20.0  # most time for a child to exit

_CHILD = (
    "import json; job = json.loads(sys.argv[1]); "
    "from streamload.bench.worker import main; main(job)"
)


class MeasurementError(Exception):
    """A measurement failed; the message is one line.

    `status`: exit status of the child, negative for a signal; None if it still runs.
    """

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process and its machine: at one time, a growth, or the peak of each figure."""

    anon_nbytes: int = 0  # the process's RssAnon + RssShmem (proc_pid_status(5))
    file_nbytes: int = 0  # its RssFile: mapped pages of the page cache
    locked_nbytes: int = 0  # its VmLck + VmPin, without pages that drivers lock by other means
    # the machine's memory that is neither free nor page cache: only this counts a driver's memory
    system_nbytes: int = 0
    device_nbytes: int | None = None  # not free on the device, by its driver, if there is one

    def above(self, base: Memory) -> Memory:
        """Return the growth of each figure from ``base``."""
        return self._each(base, lambda a, b: a - b)

    def most(self, other: Memory) -> Memory:
        """Return the larger of each figure."""
        return self._each(other, max)

    def _each(self, other: Memory, of: Callable[[int, int], int]) -> Memory:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Memory(*(a if b is None else b if a is None else of(a, b) for a, b in pairs))


def process_memory(pid: int | str) -> Memory:
    """Return the memory of a process now; zeros once it has ended, and without /proc."""
    found = proc_nbytes(f"/proc/{pid}/status")
    return Memory(
        found.get("RssAnon", 0) + found.get("RssShmem", 0),
        found.get("RssFile", 0),
        found.get("VmLck", 0) + found.get("VmPin", 0),
    )


def system_nbytes() -> int:
    """Return the machine's memory that is neither free nor page cache, in bytes."""
    found = proc_nbytes("/proc/meminfo")
    cached = found.get("Cached", 0) - found.get("Shmem", 0)  # shared memory counts as cache there
    free = found.get("MemFree", 0) + found.get("Buffers", 0) + found.get("SReclaimable", 0)
    return found.get("MemTotal", 0) - free - cached


def proc_nbytes(path: str) -> dict[str, int]:
    """Return the sizes in a file of /proc, in bytes by name; {} if it is missing."""
    return {name: kib * 1024 for name, kib in proc_fields(Path(path)).items()}


def open_context(index: int) -> Context:
    """Return the primary context of a CUDA device; DeviceError if it cannot be opened."""
    try:
        return Context.primary(f"cuda:{index}", index)
    except OSError as error:  # there is no driver
        raise DeviceError(f"cuda:{index}", str(error)) from error


def device_meter(index: int) -> Callable[[], int]:
    """Return a function that returns the bytes that all processes use on a CUDA device now.

    They are the driver's count; DeviceError if the device cannot be opened.
    """
    context = open_context(index)

    def used_nbytes() -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with context.current():
            context.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    return used_nbytes


def call(function: str, **arguments: Any) -> dict[str, Any]:
    """Return a job for `Child`: call "module:function" once, then the returned function each lap.

    A dict that a lap returns is added to the lap's answer, which has "seconds" and "cpu_s". The
    returned function may have an attribute ``ready``, the first answer, and a method ``check``.
    """
    return {"kind": "call", "function": function, "arguments": arguments}


def load_job(loader: str, **task: Any) -> dict[str, Any]:
    """Return a job for `Child` that loads; other versions of this library know its form, too."""
    return {"kind": "load", "loader": loader, "task": task}


def command(
    job: Mapping[str, Any], sites: Sequence[str] = (), *, at_once: bool = False
) -> list[str]:
    """Return the command line of a job's process; see `python_command`.

    With ``at_once`` it runs one lap and ends, else it reads commands from the standard input.
    """
    more = {"commands": ["lap"]} if at_once else {}
    return python_command(_CHILD, json.dumps({**job, **more}), sites=sites)


class Child:
    """The child process of a measurement, which begins to prepare (import, open devices) at once.

    ``device_nbytes`` returns the bytes in use on the device; ``prefix`` comes before the child's
    command, such as a tool that runs it. `peak` is that of its memory while it prepared and ran
    laps.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        *,
        timeout_s: float,
        sites: Sequence[str] = (),
        device_nbytes: Callable[[], int] | None = None,
        prefix: Sequence[str | os.PathLike[str]] = (),
        sample_s: float = SAMPLE_S,
    ) -> None:
        self._timeout_s, self._sample_s = timeout_s, sample_s
        self._device_nbytes = device_nbytes
        self._received = b""
        self._turn = 0
        self.peak = Memory()
        self._errors = TemporaryFile()  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            [*prefix, *command(job, sites)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # `close` ends a loader's processes, too
        )
        self._ready: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(at_once=error is not None)

    def ready(self) -> dict[str, Any]:
        """Wait until the child has prepared; return its answer."""
        if self._ready is None:
            self._ready = self._receive(self._sample)
        return self._ready

    def lap(self, look: Callable[[], None] | None = None) -> tuple[dict[str, Any], Memory]:
        """Run a lap; return its answer, and the growth of memory from its start to its peak.

        ``look`` is called repeatedly in place of measuring memory. Raises MeasurementError.
        """
        self.ready()
        before, base = self.peak, self._memory()
        self.peak = base
        answer = self._ask("lap", look or self._sample)
        lap_peak = self.peak.most(self._memory())
        self.peak = lap_peak.most(before)
        return answer, lap_peak.above(base)

    def again(self) -> dict[str, Any]:
        """Run further laps, short ones many times; return the median of their seconds."""
        return self._ask("again")

    def check(self) -> dict[str, Any]:
        """Compare loaded tensors with the files; return how many, or raise MeasurementError."""
        return self._ask("check")

    def _ask(self, word: str, look: Callable[[], None] | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `_receive` finds out why
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        return self._receive(look)

    def _sample(self) -> None:
        self._turn += 1
        self.peak = self.peak.most(self._memory(all_of_it=self._turn % _SLOW_SAMPLES == 0))

    def _memory(self, *, all_of_it: bool = True) -> Memory:
        held = process_memory(self._process.pid)
        if not all_of_it:
            return held
        device = self._device_nbytes() if self._device_nbytes else None
        return replace(held, system_nbytes=system_nbytes(), device_nbytes=device)

    def _receive(self, look: Callable[[], None] | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        until = time.monotonic() + self._timeout_s
        while b"\n" not in self._received:
            if time.monotonic() > until:
                raise MeasurementError(f"took longer than {self._timeout_s:g} s")
            if look is not None:
                look()
            if select.select([fd], [], [], self._sample_s)[0]:
                more = os.read(fd, 2**16)
                if not more:
                    raise self._end()
                self._received += more
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise MeasurementError(answer["failed"], 1)
        return answer

    def _end(self) -> MeasurementError:
        ended = self._ended(_GOODBYE_S)
        if ended is None:
            return MeasurementError("it closed its output and still runs")
        status, how = ended.si_status, f"exit status {ended.si_status}"
        if ended.si_code != os.CLD_EXITED:
            status, how = -status, f"killed by {signal.Signals(status).name}"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return MeasurementError(": ".join([how, *last]), status)

    def _ended(self, timeout_s: float) -> os.waitid_result | None:
        """Wait for the child's end, without reaping it: its id stays reserved; None if it runs."""
        until = time.monotonic() + timeout_s
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while (ended := os.waitid(os.P_PID, self._process.pid, flags)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(SAMPLE_S)
        return ended

    def kill(self) -> None:
        """End the child and its children, from any thread: an answer awaited is an error."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, *, at_once: bool = False) -> None:
        """End the child and its children, if ``at_once`` without waiting; may be called again."""
        if self._process.returncode is not None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._ended(0 if at_once else _GOODBYE_S)
        finally:
            self.kill()
            self._process.wait()
            self._errors.close()
