"""Running measurements in processes of their own, and looking at them from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from streamload.bench.processes import process_memory

SCRIPTS = Path(__file__).resolve().parent.parent

_SAMPLE_S = 0.0005


class WorkerError(Exception):
    """A measurement did not come to its end; the message is what it said last."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement.

    Attributes:
        result: what the worker said.
        wall_s: from the start of its process to the end.
        cpu_s: user and system seconds of the whole process.
        peak_nbytes: the most RssAnon + RssShmem that was seen of the process, by the kernel's
            counters; 0 where nobody looked.
    """

    result: dict[str, Any]
    wall_s: float
    cpu_s: float
    peak_nbytes: int = 0

    @property
    def first(self) -> dict[str, float]:
        """Wall and CPU seconds of the first lap."""
        lap: dict[str, float] = self.result["laps"][0]
        return lap


def argv(job: str, **arguments: Any) -> list[str]:
    """The command of a measurement; see `bench_parts.worker`."""
    return [sys.executable, "-m", "bench_parts.worker", json.dumps({"job": job, **arguments})]


def environment() -> dict[str, str]:
    """The environment of a measurement: this checkout's package and scripts come first."""
    paths = [str(SCRIPTS.parent), str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def result_of(stdout: str) -> dict[str, Any]:
    """The result that a worker printed."""
    result: dict[str, Any] = json.loads(stdout.strip().splitlines()[-1])
    return result


def measure(
    job: str, *, sampled: bool = False, env: Mapping[str, str] | None = None, **arguments: Any
) -> Measured:
    """Run one measurement.

    Args:
        job: its name in `bench_parts.worker.JOBS`.
        sampled: look at its memory every half millisecond.
        env: more environment variables.
        **arguments: of the job.

    Raises:
        WorkerError: it failed.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        begun = time.perf_counter()
        process = subprocess.Popen(
            argv(job, **arguments),
            env=environment() | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            peak_nbytes = _watch(process.pid) if sampled else 0
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        wall_s = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            lines = err.read().strip().splitlines() or ["it said nothing"]
            raise WorkerError(f"{job}: exit status {process.returncode}: {lines[-1]}")
        cpu_s = usage.ru_utime + usage.ru_stime
        return Measured(result_of(out.read()), wall_s, cpu_s, peak_nbytes)


def _watch(pid: int) -> int:
    """Sample a child until it ends, without reaping it; returns its peak in bytes."""
    peak_nbytes = 0
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        peak_nbytes = max(peak_nbytes, process_memory(pid).anon_nbytes)
        time.sleep(_SAMPLE_S)
    return peak_nbytes
