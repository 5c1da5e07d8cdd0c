"""The child process of a measurement: it prepares, and then runs laps (timed calls) on command.

Answers are lines of JSON on stdout; output of libraries goes to stderr. An error is one line,
``{"failed": ...}``, and ends the process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from streamload.bench.loaders import CHECKED_NBYTES, LOADERS, RUNTIMES, Loaded, Task, sample
from streamload.bench.machine import installed_version
from streamload.checkpoint.open import open_checkpoint
from streamload.errors import StreamloadError

_MOST_SAID = 300  # most characters of an error
_FEW = 64  # elements of each tensor that is loaded before the measurement
# one lap of a small file is mostly noise: repeat laps for this time, up to this number
_LAPS_S = 0.5
_MOST_LAPS = 50

Job = Mapping[str, Any]
Said = dict[str, Any]


class _Load:
    """A job that measures loads of a loader; each load frees the tensors of the last."""

    def __init__(self, job: Job) -> None:
        self._loader = LOADERS[job["loader"]]
        self._task = Task(**job["task"])
        self._runtime = RUNTIMES[self._task.framework]
        self._loaded: Loaded | None = None

    def prepare(self) -> Said:
        begun = time.perf_counter()
        for name in self._loader.imports:
            importlib.import_module(name)
        imported = time.perf_counter()
        package = self._loader.package
        version = getattr(sys.modules.get(package.replace("-", "_")), "__version__", "")
        self._runtime.open(self._task.device)
        with suppress(Exception):  # the lap raises it, too
            self._load_little()
        return {
            "import_s": imported - begun,
            "open_s": time.perf_counter() - imported,
            "versions": {package: installed_version(package) or version},
        }

    def _load_little(self) -> None:
        """Load a few values of each dtype, so that no lap imports, probes or compiles.

        Else caches of earlier processes would decide the comparison.
        """
        infos = open_checkpoint(self._task.path).tensors.values()
        header: dict[str, Any] = {}
        stop = 0
        for dtype in dict.fromkeys(info.dtype for info in infos):
            start, stop = stop, stop + dtype.nbytes(_FEW)
            offsets = [start, stop]
            header[dtype.code] = {"dtype": dtype.code, "shape": [_FEW], "data_offsets": offsets}
        text = json.dumps(header).encode()
        with TemporaryDirectory() as folder:
            path = Path(folder, "model.safetensors")
            path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(stop))
            task = replace(self._task, path=str(path), files=(str(path),))
            self._runtime.finish(self._loader.load(task).tensors, task.device)

    def lap(self) -> Said:
        self._loaded = None
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        loaded = self._loader.load(self._task)
        self._runtime.finish(loaded.tensors, self._task.device)
        seconds = time.perf_counter() - wall
        cpu_s = time.process_time() - cpu
        self._loaded = loaded
        says = loaded.says | self._runtime.says(self._task.device)
        return {"seconds": seconds, "cpu_s": cpu_s, "tensors": len(loaded.tensors), "says": says}

    def check(self) -> Said:
        assert self._loaded is not None
        infos = open_checkpoint(self._task.path).tensors
        tensors = self._loaded.tensors
        if set(tensors) != set(infos):
            raise ValueError(f"loaded {len(tensors)} tensors of {len(infos)}")
        names, checked = list(infos), 0
        for name in sample(names):
            info = infos[name]
            kept = self._task.dtype in ("checkpoint", info.dtype.name) or info.dtype.kind != "float"
            if not kept or info.nbytes > CHECKED_NBYTES:
                continue
            with open(info.shard, "rb") as file:
                file.seek(info.start)
                if file.read(info.nbytes) != self._runtime.bytes_of(tensors[name]):
                    raise ValueError(f"{name} differs from the file")
            checked += 1
        return {"checked": checked}


class _Call:
    """A job that measures calls of any function; see `processes.call`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def prepare(self) -> Said:
        module, _, name = self._job["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        self._made: Any = function(**self._job["arguments"])
        return {}

    def lap(self) -> Said:
        cpu, wall = time.process_time(), time.perf_counter()
        said = self._made()
        seconds, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        return {"seconds": seconds, "cpu_s": cpu_s, **(said if isinstance(said, dict) else {})}

    def check(self) -> Said:
        said: Said = self._made.check()
        return said


def again(lap: Callable[[], Said]) -> Said:
    """Repeat a lap, a short one many times; return the median seconds and the number of laps."""
    seconds: list[float] = []
    while not seconds or (sum(seconds) < _LAPS_S and len(seconds) < _MOST_LAPS):
        seconds.append(lap()["seconds"])
    return {"seconds": median(seconds), "laps": len(seconds)}


def main(job: Job) -> None:
    """Answer "lap", "again" and "check" from stdin by a job, as JSON lines; end the process."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is no answer
    try:
        if job.get("cores"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["cores"]])
        measured = _Load(job) if job["kind"] == "load" else _Call(job)
        print(json.dumps(measured.prepare()), file=answers)
        commands: dict[str, Callable[[], Said]] = {
            "lap": measured.lap,
            "again": partial(again, measured.lap),
            "check": measured.check,
        }
        for line in job.get("commands") or sys.stdin:
            print(json.dumps(commands[line.strip()]()), file=answers)
    except BaseException as error:
        print(json.dumps({"failed": _in_words(error)}), file=answers)
        raise
    if "commands" not in job:  # else exit in order: some engines need that
        os._exit(0)  # freeing tensors takes seconds for some loaders


def _in_words(error: BaseException) -> str:
    """Return an error as one line for the parent process."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error}"
    text = " ".join(str(error).split())[:_MOST_SAID]
    return text if isinstance(error, StreamloadError) else f"{type(error).__name__}: {text}"
