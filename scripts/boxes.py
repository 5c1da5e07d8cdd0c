"""Memory cgroups to run commands in: the small machine that a small device stands for."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

_SEQUENCE = itertools.count()


@dataclass(frozen=True, slots=True)
class BoxRun:
    """How a command in a box ended."""

    returncode: int  # its exit status; negative for a signal
    stdout: str  # what it printed
    stderr: str  # what it complained of
    # the most that the cgroup was charged, page cache included; None where the kernel does not say
    peak_nbytes: int | None
    oom_killed: bool  # the kernel killed a process of the box for memory

    @property
    def outcome(self) -> str:
        """In words."""
        if self.oom_killed:
            return "killed"
        return f"exit {self.returncode}" if self.returncode else "done"

    @property
    def said(self) -> Any:
        """The last line that it printed, as JSON."""
        return json.loads(self.stdout.strip().splitlines()[-1])


@dataclass(frozen=True, slots=True)
class _Files:
    """The names of the controller's files; `memory.stat` and `cgroup.procs` are in both versions.

    Sources: the kernel's admin-guide/cgroup-v1/memory.rst and admin-guide/cgroup-v2.rst.
    """

    limit: str
    limit_with_swap: str
    usage: str
    peak: str
    events: str
    anon: str  # of memory.stat


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
    "rss",
)
_V2 = _Files(
    "memory.max", "memory.swap.max", "memory.current", "memory.peak", "memory.events", "anon"
)


class NoBoxesError(Exception):
    """Memory cgroups cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Box:
    """A memory cgroup."""

    folder: Path  # of the cgroup
    files: _Files  # the names in there

    @property
    def procs(self) -> Path:
        """Where a process writes its id to enter."""
        return self.folder / "cgroup.procs"

    @property
    def enter(self) -> tuple[str | Path, ...]:
        """What a command is an argument of that runs in there."""
        return ("sh", "-c", 'echo $$ >"$0" && exec "$@"', self.procs)

    @property
    def peak_nbytes(self) -> int | None:
        """The most that was charged, page cache included; None where the kernel does not say."""
        peak = self.folder / self.files.peak
        return int(peak.read_text()) if peak.exists() else None

    def memory(self) -> tuple[int, int]:
        """(anonymous and shared memory, each page once; all that is not page cache), in bytes.

        The second is the first, page tables, and what else the kernel takes for its processes.
        """
        usage_nbytes = int((self.folder / self.files.usage).read_text())
        lines = (self.folder / "memory.stat").read_text().splitlines()
        stat = {name: int(number) for name, number in map(str.split, lines)}
        cached_nbytes = stat["inactive_file"] + stat["active_file"]
        return stat[self.files.anon] + stat["shmem"], usage_nbytes - cached_nbytes

    def limit(self, nbytes: int) -> None:
        """Give it another limit; page cache makes way for a smaller one."""
        (self.folder / self.files.limit).write_text(str(nbytes))

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel killed a process of the box for memory."""
        lines = (self.folder / self.files.events).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0)) > 0


class Boxes:
    """Makes memory cgroups below this process's own (v1), or beside or below it (v2)."""

    def __init__(self) -> None:
        problems = []
        for files, parent in _parents():
            try:
                self._files, self._parent = files, parent
                remove(self.make(2**30).folder)
                return
            except OSError as error:
                problems.append(f"{parent}: {error.strerror}")
        raise NoBoxesError("no memory cgroup can be made: " + ("; ".join(problems) or "no mount"))

    def make(self, limit_nbytes: int) -> Box:
        """Make one of ``limit_nbytes`` of memory without swap, to be removed by `remove`."""
        folder = self._parent / f"streamload-{os.getpid()}-{next(_SEQUENCE)}"
        folder.mkdir()
        try:
            (folder / self._files.limit).write_text(str(limit_nbytes))
            swap = folder / self._files.limit_with_swap
            if swap.exists():  # not where the kernel does not account for swap
                swap.write_text("0" if self._files is _V2 else str(limit_nbytes))
        except BaseException:
            remove(folder)
            raise
        return Box(folder, self._files)

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        limit_nbytes: int,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 300,
    ) -> BoxRun:
        """Run a command, and all that it starts, in ``limit_nbytes`` of memory without swap."""
        box = self.make(limit_nbytes)
        try:
            # files, not pipes: a process left behind would hold a pipe open
            with TemporaryFile() as out, TemporaryFile() as err:
                done = subprocess.run(
                    [*box.enter, *argv],
                    env=env,
                    cwd=cwd,
                    timeout=timeout_s,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
                said, complaints = _text(out), _text(err)
                return BoxRun(done.returncode, said, complaints, box.peak_nbytes, box.oom_killed)
        finally:
            remove(box.folder)


def _parents() -> Iterator[tuple[_Files, Path]]:
    """Cgroups below which one with a memory limit may be made, nearest first."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mounted, _, kind = line.partition(" - ")
        root, mount = mounted.split()[3:5]
        fstype, _, options = kind.split(maxsplit=2)
        if fstype == "cgroup" and "memory" in options.split(","):
            yield _V1, _below(Path(mount), root, own.get("memory", "/"))
        elif fstype == "cgroup2":
            inner = _below(Path(mount), root, own.get("", "/"))
            for folder in (inner, *inner.parents):
                if not folder.is_relative_to(mount):
                    break
                with contextlib.suppress(OSError):
                    # processes of its own forbid it to delegate, unless it is the real root
                    (folder / "cgroup.subtree_control").write_text("+memory")
                    yield _V2, folder


def _below(mount: Path, root: str, path: str) -> Path:
    """Where a cgroup shows under a mount of the part of the hierarchy below ``root``."""
    relative = os.path.relpath(path, root)
    return mount if relative.startswith("..") else mount / relative


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def remove(folder: Path) -> None:
    """Remove a box, and end what runs in it."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)  # what the command left behind
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)  # the kernel is still taking its processes apart
    folder.rmdir()
