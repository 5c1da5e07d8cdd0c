"""What befalls clusters: a program on all hosts, and at a moment that it names, a loss."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import needs
import pytest
from boxes import NoBoxesError
from cluster_parts.hosts import Cluster, NoClusterError
from cluster_parts.launchers import Program
from cluster_parts.running import Running

#: What happens to a cluster and the programs on it.
Act = Callable[[Cluster, Running], None]

_LOOK_S = 0.01


@contextmanager
def cluster(count: int, **arguments: Any) -> Iterator[Cluster]:
    """Hosts; see `Cluster`.

    Where none can be made the test is skipped; in CI, as root on Linux, it fails.
    """
    problem = _problem()
    if problem is not None:
        if sys.platform == "linux" and os.geteuid() == 0:
            needs.lacking(problem)
        pytest.skip(problem)
    with Cluster(count, **arguments) as made:
        yield made


@cache
def _problem() -> str | None:
    try:
        Cluster(1).close()
    except (NoClusterError, NoBoxesError, OSError) as error:
        return str(error)
    return None


def sigkill(host: int) -> Act:
    """The ranks on a host are killed, whoever started them; its kernel tells their peers.

    They are known by their arguments: of a script, those of its interpreter.
    """

    def act(cluster: Cluster, running: Running) -> None:
        ranks = [pid for pid in cluster.processes(host) if _argv(pid) == running.argv]
        assert ranks, f"nothing runs {running.argv} on host {host}"
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    return act


def _argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except FileNotFoundError:
        return []


def lose_host(host: int) -> Act:
    """A host goes as in a power cut, with all that runs there: its peers hear nothing more."""
    return lambda cluster, running: cluster.kill(host)


def cut_link(host: int) -> Act:
    """The cable of a host is pulled; what runs there goes on."""
    return lambda cluster, running: cluster.link_down(host)


@dataclass(frozen=True, slots=True)
class Aftermath:
    """How the programs ended."""

    # of what was started; with bare environment variables of every rank, in order
    endings: list[Program]
    happened_s: float  # when it happened, by `time.monotonic`

    def seconds(self, ending: Program) -> float:
        """From what happened until a program had ended."""
        return ending.ended_s - self.happened_s

    def others(self, *lost: int) -> list[Program]:
        """How they ended on the other hosts."""
        return [ending for ending in self.endings if ending.host not in lost]


def play(
    made: Cluster,
    argv: Sequence[str | Path],
    act: Act,
    *,
    when: str,  # is in a line of its output or complaints then
    on: int | None = None,  # the host that says it; None: whichever does first
    launcher: str = "env",  # one of `launchers.LAUNCHERS`
    per_host: int = 1,  # ranks
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,  # until they say it, and from then until all have ended
) -> Aftermath:
    """Run a program on all hosts; when it says so, something happens; wait for all to end."""
    said = threading.Event()

    def listen(host: int, stream: str, line: str) -> None:
        if when in line and on in (None, host):
            said.set()

    running = Running(
        made, launcher, list(map(str, argv)), on_line=listen, per_host=per_host, env=env
    )
    deadline_s = monotonic() + timeout_s
    while not said.wait(_LOOK_S) and not running.ended and monotonic() < deadline_s:
        pass
    if not said.is_set():
        made.close()
        raise AssertionError(f"nobody said {when!r}: {running.wait(timeout_s)}")
    happened_s = monotonic()
    act(made, running)
    return Aftermath(running.wait(timeout_s), happened_s)
