"""The memory cgroups that other tests run commands in."""

from __future__ import annotations

import sys
from pathlib import Path

from boxes import Boxes

LIMIT_NBYTES = 100_000_000


def test_what_fits_runs_and_is_measured(cgroup: Boxes) -> None:
    run = cgroup.run([sys.executable, "-c", "print(len(b'1' * 50_000_000))"], LIMIT_NBYTES)
    assert (run.returncode, run.stdout, run.oom_killed) == (0, "50000000\n", False)
    assert run.peak_nbytes is None or 50_000_000 < run.peak_nbytes <= LIMIT_NBYTES


def test_what_does_not_fit_is_killed(cgroup: Boxes) -> None:
    run = cgroup.run([sys.executable, "-c", "b'1' * 200_000_000"], LIMIT_NBYTES)
    assert run.returncode == -9
    assert run.oom_killed


def test_nothing_is_left_behind(cgroup: Boxes) -> None:
    run = cgroup.run(["sh", "-c", "sleep 60 & echo $!; exit 3"], LIMIT_NBYTES)
    assert run.returncode == 3
    process = Path("/proc", run.stdout.strip(), "cmdline")
    # gone, or dead and not yet collected by its new parent: then it has no command line
    assert not process.exists() or not process.read_bytes()
