"""Conversions that are killed, and continued: what was finished is kept, and not done again."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import needs
import pytest
from conversions import files_of, quiet, tensors_of, visible
from convert_crash_helpers import (
    OPTIONS,
    Start,
    duration,
    journaled,
    kill_and_resume,
    read_again,
    source,
    start,
    whole,
)
from make_checkpoint import make_checkpoint, shape_of_size
from recording import recorded

from streamload.conversion import convert as conversion
from streamload.conversion.disk import WORK
from streamload.core.dtypes import BF16
from streamload.errors import CheckpointError

__all__ = ["source", "start", "whole"]


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_points(
    start: Start, source: Path, whole: dict[str, bytes], tmp_path: Path, kills: int
) -> None:
    """SIGKILL at some points, of the run and of resumptions: the same bytes, nothing read again."""
    chance, longest_s = random.Random(kills), duration(start, source, tmp_path / "first")
    for i in range(kills):
        kill_and_resume(start, source, tmp_path / f"out{i}", whole, chance, longest_s)


def of_no_class(path: Path) -> None:
    """Let config.json name no class of transformers, which is asked in another process else."""
    config = json.loads((path / "config.json").read_text())
    del config["architectures"]
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"quant": "nf4-nested"}, id="nf4-nested"),
        pytest.param({"quant": "q4_k_m", "to": "gguf"}, id="q4_k_m", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "kills", [2, pytest.param(40, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_killed_while_it_quantizes(
    start: Start, tmp_path: Path, kills: int, options: dict[str, object]
) -> None:
    """Weights whose parts are not all there are begun again, with the bytes of a whole run."""
    options = options | {"max_shard_size": "2MB"}
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
        if tensors[index].coding is not None and not tensors[index].is_auxiliary
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
    if done == total:
        raise _StopError


def stop_now(*_: Any, **__: Any) -> None:
    raise _StopError


def unfinished(source: Path, out: Path) -> None:
    """Leave a conversion with everything in the journal and nothing published."""
    with pytest.raises(_StopError):
        quiet(source, out, **OPTIONS, progress=stop_later)


def test_an_error_of_the_caller_keeps_what_is_finished(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
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
    """Ends the command with 130; it says what to write, and that does the rest."""
    folder, out = tmp_path / "in", tmp_path / "out"
    make_checkpoint(folder, shape_of_size(150_000_000, BF16))
    command = [sys.executable, "-m", "streamload", "convert", str(folder), str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (out / WORK / "journal").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    line, ended = said.splitlines()
    before = "streamload: what is finished is kept; this continues: streamload "
    assert line.startswith(before)
    assert ended == "streamload: interrupted"
    again = shlex.split(line.removeprefix(before))
    assert again == ["convert", str(folder), str(out), "--resume"]
    assert not visible(out)
    done = subprocess.run([*command[:3], *again], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tensors_of(out) == tensors_of(folder)
