"""Programs that run on the hosts of a cluster: what they say, and how they end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from cluster_parts.hosts import Cluster
from cluster_parts.launchers import LAUNCHERS, MPI_TAG, Job, Program

#: Called with a rank or a host, "stdout" or "stderr", and a line without its end.
OnLine = Callable[[int, str, str], None]

# How long to read on when programs have ended; what they left behind may hold the pipes open.
_REST_S = 0.5


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended.

    Attributes:
        host: where it ran.
        returncode: its exit status; negative for a signal.
        ended_s: when, by `time.monotonic`.
        stdout: what it printed.
        stderr: what it complained of.
    """

    host: int
    returncode: int
    ended_s: float
    stdout: str
    stderr: str


class Running:
    """A program on all hosts of a cluster.

    Args:
        cluster: the hosts.
        launcher: one of `launchers.LAUNCHERS`.
        argv: the program and its arguments.
        on_line: told of every line, one at a time; of the host's number, whoever started it.
        per_host: ranks of a host.
        env: more environment variables.

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
        self._said: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
        self._ended: dict[int, float] = {}
        self._all_ended = threading.Event()
        job = Job(cluster, argv, per_host, {"PYTHONUNBUFFERED": "1", **(env or {})})
        self.programs = LAUNCHERS[launcher](job)
        self._readers = [
            self._start(self._read, index, stream, pipe)
            for index, program in enumerate(self.programs)
            for stream, pipe in (
                ("stdout", program.process.stdout),
                ("stderr", program.process.stderr),
            )
        ]
        for index, program in enumerate(self.programs):
            self._start(self._wait, index, program)

    def wait(self, timeout_s: float | None = None) -> list[Ending]:
        """Wait until all have ended.

        Raises:
            TimeoutError: some have not.
        """
        if not self._all_ended.wait(timeout_s):
            left = [p.host for i, p in enumerate(self.programs) if i not in self._ended]
            raise TimeoutError(f"on hosts {left} it did not end within {timeout_s} s")
        deadline_s = time.monotonic() + _REST_S
        for reader in self._readers:
            reader.join(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            return [
                Ending(
                    program.host,
                    program.process.returncode,
                    self._ended[index],
                    "".join(self._said[index, "stdout"]),
                    "".join(self._said[index, "stderr"]),
                )
                for index, program in enumerate(self.programs)
            ]

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

    def _wait(self, index: int, program: Program) -> None:
        program.process.wait()
        with self._lock:
            self._ended[index] = time.monotonic()
            if len(self._ended) == len(self.programs):
                self._all_ended.set()

    def _read(self, index: int, stream: str, pipe: IO[bytes]) -> None:
        with pipe:
            for raw in pipe:
                host, of, start = self.programs[index].host, stream, 0
                if self._tagged and (tag := MPI_TAG.match(raw)):  # a rank's, and not mpirun's own
                    host, start = int(tag[1]) // self._per_host, tag.end()
                    of = tag[2].decode() if tag[2] else stream
                line = raw[start:].decode(errors="replace")
                with self._lock:
                    self._said[index, of].append(line)
                self._on_line(host, of, line.rstrip("\n"))
