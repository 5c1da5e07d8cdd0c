"""Removes a cluster when the process that made it has ended, however it ended.

Nothing that is made has a name on the machine but memory cgroups: a network namespace, and the
interfaces in it, go with the last process in it. So it is processes that are removed. The standard
input says what there is to remove, a line a thing, and its end is when:

    namespace net:[4026532298]
    box /sys/fs/cgroup/memory/streamload-4711-0
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from boxes import remove

_PATIENCE_S = 10.0


def namespace(pid: int) -> str:
    """The network namespace of a process, as the kernel names it; "" of one that has gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def inside(namespaces: Collection[str]) -> Iterator[int]:
    """The processes that are in one of these network namespaces."""
    for name in os.listdir("/proc"):
        # that of a process that has ended and is not yet collected is empty
        if name.isdigit() and namespace(int(name)) in namespaces:
            yield int(name)


def kill_inside(namespaces: Collection[str], spared: Collection[int] = ()) -> None:
    """Kill the processes in these network namespaces, and those that they start meanwhile.

    Raises:
        TimeoutError: the kernel does not let some of them go.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while left := [pid for pid in inside(namespaces) if pid not in spared]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} do not end")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def main() -> None:
    """Wait, and remove."""
    # of the terminal's signals, and of those to all of a job, too
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    made: dict[str, list[str]] = {"namespace": [], "box": []}
    for line in sys.stdin:
        kind, _, what = line.rstrip("\n").partition(" ")
        made[kind].append(what)
    kill_inside(made["namespace"])
    for folder in made["box"]:
        with suppress(FileNotFoundError):
            remove(Path(folder))


if __name__ == "__main__":
    main()
