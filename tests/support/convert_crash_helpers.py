"""Helpers that `test_convert_crash` shares with other tests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from conversions import files_of, quiet, visible
from make_checkpoint import make_checkpoint, many_of_size
from recording import recorded

from streamload.checkpoint.digests import SIDECAR
from streamload.conversion.disk import WORK
from streamload.core.dtypes import BF16
from streamload.core.tensors import TensorInfo

OPTIONS = {"dtype": "float16", "max_shard_size": "5MB"}


# Imports and compiles once; for each line converts in a child of its own, says its pid, and how it
# ended: many processes, each of which is there at once.
SERVER = """
import json, os, sys, warnings
from streamload.codecs.cast_table import make_cast
from streamload.conversion.convert import convert
from streamload.core.dtypes import BF16, F16

make_cast(BF16, F16)
warnings.simplefilter("ignore")
while line := sys.stdin.readline():
    source, destination, options = json.loads(line)
    pid = os.fork()
    if pid == 0:
        convert(source, destination, progress=False, **options)
        os._exit(0)
    print(pid, flush=True)
    sys.stdin.readline()  # the pid is its own until then
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[Path, Path, dict[str, object]], tuple[int, Callable[[], int]]]]:
    """Starts a conversion in a process: gives its pid, and what waits for its exit status."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    lines, commands = server.stdout, server.stdin

    def begin(
        source: Path, destination: Path, options: dict[str, object]
    ) -> tuple[int, Callable[[], int]]:
        print(json.dumps([str(source), str(destination), options]), file=commands, flush=True)
        pid = int(lines.readline())

        def wait() -> int:
            print(file=commands, flush=True)
            return int(lines.readline())

        return pid, wait

    yield begin
    commands.close()
    assert server.wait(60) == 0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    make_checkpoint(out, many_of_size(24_000_000, BF16, 60), shards=3)
    return out


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    quiet(source, out, **OPTIONS)
    return files_of(out)


Start = Callable[[Path, Path, dict[str, object]], tuple[int, Callable[[], int]]]


def await_beginning(out: Path) -> None:
    while not (out / WORK / "journal").exists() and not (out / SIDECAR).exists():
        time.sleep(0.0005)


def journaled(out: Path) -> list[int]:
    path = out / WORK / "journal"
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line)["tensor"][0] for line in lines if '"tensor"' in line]


def read_again(reads: list[tuple[str, int, int]], infos: Iterable[TensorInfo]) -> list[str]:
    """Which of these tensors have bytes in what was read."""
    return [
        info.name
        for info in infos
        if any(n == info.shard.name and a < info.stop and info.start < z for n, a, z in reads)
    ]


def kill_and_resume(
    start: Start,
    source: Path,
    out: Path,
    whole: dict[str, bytes],
    chance: random.Random,
    longest_s: float,
    options: dict[str, object] = OPTIONS,
) -> None:
    """Kill a conversion at random, and every resumption but the last one.

    The last one reads nothing of what is in the journal then.
    """
    for _ in range(chance.randint(1, 3)):
        pid, wait = start(source, out, options | {"resume": True})
        if chance.random() < 0.8:  # else it may not even have begun
            await_beginning(out)
        time.sleep(chance.random() * longest_s)
        os.kill(pid, signal.SIGKILL)
        if wait() == 0:
            break  # it was quicker
        shown = set(visible(out)) if out.exists() else set()
        if shown.intersection(name for name in whole if name.endswith("index.json")):
            assert shown == set(whole)  # it looks finished, and is
        for name in shown:
            assert (out / name).read_bytes() == whole[name]
    plan = quiet(source, out.with_name("nowhere"), **options, dry_run=True).plan
    tensors = [t for file in plan.files for t in file.tensors]
    finished = [info for index in journaled(out) for info in tensors[index].infos]
    with recorded(source) as disk:
        report = quiet(source, out, **options, resume=True)
    assert not read_again(disk.reads, finished)
    assert files_of(out) == whole
    assert report.digests.keys() == {t.name for t in tensors}


def duration(start: Start, source: Path, out: Path, options: dict[str, object] = OPTIONS) -> float:
    """Seconds of a conversion that nothing disturbs, from its journal's first line on."""
    _, wait = start(source, out, options)
    await_beginning(out)
    begun = time.perf_counter()
    assert wait() == 0
    return time.perf_counter() - begun
