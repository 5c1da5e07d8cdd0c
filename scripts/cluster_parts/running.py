"""Programs that run on the hosts of a cluster: what they say, and how they end."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from cluster_parts.hosts import Cluster
from cluster_parts.launchers import LAUNCHERS, MPI_TAG, Job, Program

#: Called with a rank or a host, "stdout" or "stderr", and a line without its end.
OnLine = Callable[[int, str, str], None]

# How long to read on when programs have ended; what they left behind may hold the pipes open.
_REST_S = 0.5


class Running:
    """A program on all hosts of a cluster, started by one of `launchers.LAUNCHERS`.

    `on_line` is told the number of the host, the stream and the text of every line, one at a time.

    Attributes:
        argv: of each rank.
        programs: that were started.
    """

    def __init__(
        self,
        cluster: Cluster,
        launcher: str,
        argv: Sequence[str],
        *,
        on_line: OnLine = lambda host, stream, line: None,
        per_host: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.argv = list(argv)
        self._on_line = on_line
        self._per_host = per_host
        self._tagged = launcher == "mpirun"
        self._lock = threading.Lock()
        self._all_ended = threading.Event()
        job = Job(cluster, argv, per_host, {"PYTHONUNBUFFERED": "1", **(env or {})})
        self.programs = LAUNCHERS[launcher](job)
        self._readers = [
            self._start(self._read, program, stream, getattr(program.process, stream))
            for program in self.programs
            for stream in program.lines
        ]
        for program in self.programs:
            self._start(self._wait, program)

    def wait(self, timeout_s: float | None = None) -> list[Program]:
        """Wait until all have ended.

        Raises:
            TimeoutError: some have not.
        """
        if not self._all_ended.wait(timeout_s):
            left = [program.host for program in self.programs if program.ended_s == math.inf]
            raise TimeoutError(f"on hosts {left} it did not end within {timeout_s} s")
        deadline_s = time.monotonic() + _REST_S
        for reader in self._readers:
            reader.join(max(0.0, deadline_s - time.monotonic()))
        return self.programs

    @property
    def ended(self) -> bool:
        """Whether all have ended."""
        return self._all_ended.is_set()

    def interrupt(self) -> None:
        """Do to all, and to what they have started, what Ctrl-C at a terminal does."""
        for program in self.programs:
            with suppress(ProcessLookupError):
                os.killpg(program.process.pid, signal.SIGINT)

    def _start(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread

    def _wait(self, program: Program) -> None:
        program.process.wait()
        with self._lock:
            program.ended_s = time.monotonic()
            if all(each.ended_s < math.inf for each in self.programs):
                self._all_ended.set()

    def _read(self, program: Program, stream: str, pipe: IO[bytes]) -> None:
        with pipe:
            for raw in pipe:
                host, of, start = program.host, stream, 0
                if self._tagged and (tag := MPI_TAG.match(raw)):  # a rank's, and not mpirun's own
                    host, start = int(tag[1]) // self._per_host, tag.end()
                    of = tag[2].decode() if tag[2] else stream
                line = raw[start:].decode(errors="replace")
                program.lines[of].append(line)
                self._on_line(host, of, line.rstrip("\n"))
