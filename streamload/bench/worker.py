"""The child process of a measurement: it prepares, and then runs laps (timed calls) on command.

Answers are lines of JSON on stdout; output of libraries goes to stderr. An error is one line,
``{"failed": ...}``, and ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

from streamload.bench.loaders import Load
from streamload.errors import StreamloadError

_MOST_SAID = 300  # most characters of an error
# one lap of a small file is mostly noise: repeat laps for this time, up to this number
_LAPS_S = 0.5
_MOST_LAPS = 50


def main(job: Mapping[str, Any]) -> None:
    """Answer "lap", "again" and "check" from stdin by a job; end the process.

    The job is of `processes.call` or `load_job`. "again" repeats a lap, a short one many times; it
    returns the median seconds.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is no answer
    try:
        if job.get("cores"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["cores"]])
        if job["kind"] == "load":
            made = Load(job["loader"], **job["task"])
        else:
            module, _, name = job["function"].partition(":")
            made = getattr(importlib.import_module(module), name)(**job["arguments"])
        print(json.dumps(getattr(made, "ready", {})), file=answers)
        commands: dict[str, Callable[[], dict[str, Any]]] = {
            "lap": partial(_lap, made),
            "again": partial(_again, made),
            "check": lambda: made.check(),  # most jobs have none
        }
        for line in job.get("commands") or sys.stdin:
            print(json.dumps(commands[line.strip()]()), file=answers)
    except BaseException as error:
        print(json.dumps({"failed": _in_words(error)}), file=answers)
        raise
    if "commands" not in job:  # else exit in order: some engines need that
        os._exit(0)  # freeing tensors takes seconds for some loaders


def _lap(made: Callable[[], Any]) -> dict[str, Any]:
    cpu, wall = time.process_time(), time.perf_counter()
    said = made()
    seconds, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return {"seconds": seconds, "cpu_s": cpu_s, **(said if isinstance(said, dict) else {})}


def _again(made: Callable[[], Any]) -> dict[str, Any]:
    seconds: list[float] = []
    while not seconds or (sum(seconds) < _LAPS_S and len(seconds) < _MOST_LAPS):
        seconds.append(_lap(made)["seconds"])
    return {"seconds": median(seconds), "laps": len(seconds)}


def _in_words(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error}"
    text = " ".join(str(error).split())[:_MOST_SAID]
    return text if isinstance(error, StreamloadError) else f"{type(error).__name__}: {text}"
