"""Conversions that are killed, and continued: what was finished is kept, and not done again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from conversions import files_of, quiet, tensors_of, visible
from make_checkpoint import make_checkpoint, many_of_size, shape_of_size
from recording import recorded

from streamload.checkpoint.digests import SIDECAR
from streamload.conversion import convert as conversion
from streamload.conversion.disk import WORK
from streamload.core.dtypes import BF16
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError

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
    """A checkpoint of 60 tensors in 3 shards."""
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    make_checkpoint(out, many_of_size(24_000_000, BF16, 60), shards=3)
    return out


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a conversion that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quiet(source, out, **OPTIONS)
    return files_of(out)


Start = Callable[[Path, Path, dict[str, object]], tuple[int, Callable[[], int]]]


def await_beginning(out: Path) -> None:
    """Wait until a conversion has a journal, or has finished."""
    while not (out / WORK / "journal").exists() and not (out / SIDECAR).exists():
        time.sleep(0.0005)


def journaled(out: Path) -> list[int]:
    """The tensors that a journal has as finished, by whole lines."""
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


def test_killed_at_random_points(
    start: Start, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """SIGKILL at some points, of the run and of resumptions: the same bytes, nothing read again."""
    chance, longest_s = random.Random(5), duration(start, source, tmp_path / "first")
    for i in range(6):
        kill_and_resume(start, source, tmp_path / f"out{i}", whole, chance, longest_s)


@pytest.mark.slow
def test_killed_at_many_random_points(
    start: Start, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The same at 50 points."""
    chance, longest_s = random.Random(50), duration(start, source, tmp_path / "first")
    for i in range(50):
        kill_and_resume(start, source, tmp_path / f"out{i}", whole, chance, longest_s)


def of_no_class(path: Path) -> None:
    """Let config.json name no class of transformers, which is asked in another process else."""
    config = json.loads((path / "config.json").read_text())
    del config["architectures"]
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "kills", [2, pytest.param(40, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_killed_while_it_quantises(start: Start, tmp_path: Path, kills: int) -> None:
    """Weights whose parts are not all there are begun again, with the bytes of a whole run."""
    options: dict[str, object] = {"quant": "nf4-nested", "max_shard_size": "2MB"}
    path = tmp_path / "in"
    make_checkpoint(path, shape_of_size(24_000_000, BF16), shards=3)
    of_no_class(path)
    chance, longest_s = random.Random(7), duration(start, path, tmp_path / "first", options)
    whole = files_of(tmp_path / "first")
    for i in range(kills):
        kill_and_resume(start, path, tmp_path / f"out{i}", whole, chance, longest_s, options)


@pytest.mark.parametrize(
    "kills", [2, pytest.param(30, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_killed_while_it_reads_views(start: Start, tmp_path: Path, kills: int) -> None:
    """A file of torch.save, of tensors that share storages and of transposes, as any other."""
    torch = needs.module("torch")
    path = tmp_path / "in" / "pytorch_model.bin"
    path.parent.mkdir()
    (path.parent / "config.json").write_text("{}")
    wide = torch.randn(1500, 2000).bfloat16()
    plain = {f"layers.{i}": torch.randn(500, 1000).bfloat16() for i in range(10)}
    torch.save({**plain, "wide": wide, "turned": wide.t(), "some": wide[::3, 100:900]}, path)
    options: dict[str, object] = {"dtype": "float16", "max_shard_size": "5MB"}
    chance = random.Random(9)
    longest_s = duration(start, path.parent, tmp_path / "first", options)
    whole = files_of(tmp_path / "first")
    for i in range(kills):
        out = tmp_path / f"out{i}"
        kill_and_resume(start, path.parent, out, whole, chance, longest_s, options)


def test_a_weight_is_whole_in_the_journal_or_begun_again(tmp_path: Path) -> None:
    """A journal that lost the end of a weight's lines: its codes are quantised again."""
    path, out, options = tmp_path / "in", tmp_path / "out", {"quant": "nf4"}
    make_checkpoint(path, shape_of_size(2_000_000, BF16))
    of_no_class(path)
    quiet(path, tmp_path / "whole", **options)
    with pytest.raises(_StopError):
        quiet(path, out, **options, progress=stop_later)
    plan = quiet(path, tmp_path / "nowhere", **options, dry_run=True).plan
    journal = out / WORK / "journal"
    lines = journal.read_text().splitlines(keepends=True)
    tensors = [t for _, _, t in plan.tensors()]
    at, codes = next(
        (i, tensors[index])
        for i, line in enumerate(lines[1:], 1)
        for index in [json.loads(line)["tensor"][0]]
        if tensors[index].coding is not None and not tensors[index].is_beside
    )
    journal.write_text("".join(lines[: at + 2]))
    with recorded(path) as disk:
        report = quiet(path, out, **options, resume=True)
    assert read_again(disk.reads, [codes.info]) == [codes.info.name]
    assert report.resumed == at - 1
    assert files_of(out) == files_of(tmp_path / "whole")


class _StopError(Exception):
    """Raised by a test in the middle of a conversion."""


def stop_later(done: int, total: int) -> None:
    """End a conversion when all is read."""
    if done == total:
        raise _StopError


def stop_now(*_: Any, **__: Any) -> None:
    """End a conversion."""
    raise _StopError


def unfinished(source: Path, out: Path) -> None:
    """Leave a conversion with everything in the journal and nothing published."""
    with pytest.raises(_StopError):
        quiet(source, out, **OPTIONS, progress=stop_later)


def test_an_error_of_the_caller_keeps_what_is_finished(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """An exception ends it in order: what was written is in the journal, and not read again."""
    out = tmp_path / "out"
    unfinished(source, out)
    assert not visible(out)
    with recorded(source) as disk:
        report = quiet(source, out, **OPTIONS, resume=True)
    assert not disk.reads
    assert (report.resumed, report.read_nbytes) == (60, 0)
    assert files_of(out) == whole


@pytest.mark.parametrize("torn", ["half a line", "no line at all", "a line of garbage", "a header"])
def test_a_torn_journal(source: Path, whole: dict[str, bytes], tmp_path: Path, torn: str) -> None:
    """What was not written whole was not written: it is done again, and nothing else is wrong."""
    out = tmp_path / "out"
    unfinished(source, out)
    journal = out / WORK / "journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(
        {
            "half a line": b"".join(lines[:5]) + lines[5][:20],
            "no line at all": b"",
            "a line of garbage": b"".join(lines[:5]) + b"\0\0\0\0\n" + b"".join(lines[5:]),
            "a header": lines[0][:30],
        }[torn]
    )
    report = quiet(source, out, **OPTIONS, resume=True)
    assert report.resumed == (0 if torn in ("no line at all", "a header") else 4)
    assert files_of(out) == whole


@pytest.mark.parametrize("lost", ["removed", "shorter"])
def test_an_output_that_was_lost_is_written_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path, lost: str
) -> None:
    """A file that the journal knows and that is not there, or too short, is done again."""
    out = tmp_path / "out"
    unfinished(source, out)
    file = sorted((out / WORK / "out").glob("*.safetensors"))[0]
    if lost == "removed":
        file.unlink()
    else:
        os.truncate(file, 2_000_000)
    quiet(source, out, **OPTIONS, resume=True, verify=True)
    assert files_of(out) == whole


def test_what_is_on_the_disk_is_verified(source: Path, tmp_path: Path) -> None:
    """A byte that changed on the disk is found by --verify, and nothing is published."""
    out = tmp_path / "out"
    unfinished(source, out)
    file = sorted((out / WORK / "out").glob("*.safetensors"))[0]
    before = len(journaled(out))
    with open(file, "r+b") as data:
        data.seek(file.stat().st_size // 2)
        data.write(b"\x55\xaa\x55\xaa")
    assert before == 60
    with pytest.raises(CheckpointError, match="are not those that were written"):
        quiet(source, out, **OPTIONS, resume=True, verify=True)
    assert not visible(out)


def test_killed_while_files_get_their_names(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """From the first name to the last, the rest is published, and the source is not read."""
    shards = sorted(name for name in whole if name.endswith(".safetensors"))
    prepared = tmp_path / "prepared"
    with pytest.MonkeyPatch.context() as patched, pytest.raises(_StopError):
        patched.setattr(conversion._Conversion, "_publish", stop_now)
        quiet(source, prepared, **OPTIONS)
    journal = prepared / WORK / "journal"
    for count in range(len(shards) + 1):
        out = tmp_path / f"out{count}"
        quiet(source, out, **OPTIONS)
        # what a kill leaves: a journal that says so, and some files not yet named
        work = out / WORK / "out"
        work.mkdir(parents=True)
        shutil.copyfile(journal, out / WORK / "journal")
        index = next(name for name in whole if name.endswith("index.json"))
        for name in (*shards[count:], index):
            (out / name).rename(work / name)
        with pytest.raises(CheckpointError, match="unfinished"):
            quiet(source, out, **OPTIONS)
        with recorded(source) as disk:
            quiet(source, out, **OPTIONS, resume=True)
        assert not disk.reads
        assert files_of(out) == whole


def test_ctrl_c(tmp_path: Path) -> None:
    """Ends the command with 130 and one line; the next call with --resume does the rest."""
    folder, out = tmp_path / "in", tmp_path / "out"
    make_checkpoint(folder, shape_of_size(150_000_000, BF16))
    command = [sys.executable, "-m", "streamload", "convert", str(folder), str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (out / WORK / "journal").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "streamload: interrupted\n")
    assert not visible(out)
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tensors_of(out) == tensors_of(folder)
