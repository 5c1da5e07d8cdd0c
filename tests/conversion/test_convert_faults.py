"""Conversions on disks and from sources that do worse than to stop: no wrong byte is published."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors_files import write_safetensors

import streamload
from streamload.conversion import convert as module
from streamload.conversion import disk
from streamload.conversion.rename import RenamePatterns
from streamload.core.system import sync as real_sync
from streamload.errors import CheckpointError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(7)
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = {
        f"t{i:02}": ("F32", (100_000,), rng.standard_normal(100_000).astype("<f4").tobytes())
        for i in range(20)
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _convert(source: Path, out: Path, **arguments: Any) -> Any:
    return streamload.convert(source, out, dtype="float16", progress=False, **arguments)


def _values(folder: Path) -> dict[str, bytes]:
    return {name: a.tobytes() for name, a in load_file(folder / "model.safetensors").items()}


def test_pages_that_a_disk_lost_are_written_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells of them once, and says that all is well when it is asked again."""
    told = []

    def lossy(fd: int) -> None:
        if not told:
            told.append(fd)
            os.pwrite(fd, bytes(1_000_000), 4096)  # what did not get there
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_sync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync", lossy)
        with pytest.raises(CheckpointError, match="Input/output error"):
            _convert(source, tmp_path / "out")
    _convert(source, tmp_path / "out", resume=True)
    _convert(source, tmp_path / "whole")
    assert _values(tmp_path / "out") == _values(tmp_path / "whole")


def test_what_was_lost_once_stays_lost(source: Path, tmp_path: Path) -> None:
    """A file that was gone is not believed when it is long enough again, and full of holes."""
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="stop"):
        _stopped_before_publishing(source, out)
    journal = out / ".streamload/journal"
    data = out / ".streamload/out/model.safetensors"
    nbytes = data.stat().st_size
    data.unlink()
    # a resumption that was killed as soon as it had noticed, and written something at the end
    conversion = journal.read_text()
    lost = [json.loads(line)["tensor"][0] for line in conversion.splitlines() if '"tensor"' in line]
    with pytest.raises(RuntimeError, match="stop"):
        _stopped_at(source, out, "_write", resume=True)
    assert f'{{"lost": {json.dumps(sorted(lost))}}}' in journal.read_text()
    with open(data, "wb") as file:
        file.truncate(nbytes)
    _convert(source, out, resume=True)
    _convert(source, tmp_path / "whole")
    assert _values(out) == _values(tmp_path / "whole")


def _stopped_before_publishing(source: Path, out: Path) -> None:
    _stopped_at(source, out, "_prepare")


def _stopped_at(source: Path, out: Path, method: str, **arguments: Any) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise RuntimeError("stop")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module._Conversion, method, stop)
        _convert(source, out, **arguments)


def test_a_source_that_is_replaced_while_it_is_planned(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same length and another layout: what was planned is not of this file."""
    path = source / "model.safetensors"
    other = tmp_path / "other.safetensors"
    raw = path.read_bytes()
    nbytes = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:nbytes].replace(b't00"', b'x00"')
    other.write_bytes(raw[:8] + header + raw[nbytes:])
    real = module.plan_conversion

    def replaced(*arguments: Any, **more: Any) -> Any:
        made = real(*arguments, **more)
        shutil.copyfile(other, path)
        return made

    monkeypatch.setattr(module, "plan_conversion", replaced)
    with pytest.raises(CheckpointError, match="has changed since its header was read"):
        _convert(source, tmp_path / "out")
    assert not (tmp_path / "out/model.safetensors").exists()


def test_verify_is_not_forgotten_by_a_resumption(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="stop"):
        _stopped_at(source, out, "_publish")
    data = out / ".streamload/out/model.safetensors"
    with open(data, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(CheckpointError, match="t19"):
        _convert(source, out, resume=True, verify=True)


@pytest.mark.parametrize(
    "line", ['{"tensor": 5}', '{"tensor": [1]}', '{"tensor": [99, "00", 0, 0, 0]}', "[" * 100_000]
)
def test_a_damaged_line_ends_the_journal(source: Path, tmp_path: Path, line: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="stop"):
        _stopped_before_publishing(source, out)
    journal = out / ".streamload/journal"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*lines[:6], line + "\n", *lines[6:]]))
    assert _convert(source, out, resume=True).resumed == 5
    _convert(source, tmp_path / "whole")
    assert _values(out) == _values(tmp_path / "whole")


def test_many_small_files_need_few_open_ones(source: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    rng = np.random.default_rng(1)
    tensors = {f"t{i}": ("F32", (8,), rng.bytes(32)) for i in range(600)}
    many = tmp_path / "many"
    many.mkdir()
    write_safetensors(many / "model.safetensors", tensors)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 200, before[1]))
    try:
        report = streamload.convert(
            many, tmp_path / "out", max_shard_size=1, progress=False, dtype="checkpoint"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(report.plan.files) == 600


def test_a_source_that_the_destination_would_take_away_is_refused(
    source: Path, tmp_path: Path
) -> None:
    """In its working folder, or as the target of a link in the source's folder."""
    out = tmp_path / "out"
    inside = out / ".streamload/out/node"
    shutil.copytree(source, inside)
    with pytest.raises(CheckpointError, match="the source is in"):
        _convert(inside, out, overwrite=True)
    assert (inside / "model.safetensors").exists()

    linked = tmp_path / "linked"
    linked.mkdir()
    rng = np.random.default_rng(2)
    for name in ("a", "b"):
        write_safetensors(
            linked / f"model-{name}.safetensors", {name: ("F32", (4,), rng.bytes(16))}
        )
    shutil.rmtree(out)
    out.mkdir()
    (linked / "model-b.safetensors").rename(out / "model-00002-of-00002.safetensors")
    (linked / "model-b.safetensors").symlink_to(out / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError):
        _convert(linked, out, overwrite=True, select="a")
    assert (out / "model-00002-of-00002.safetensors").exists()


def test_what_may_not_be_written_is_copied_once_more(source: Path, tmp_path: Path) -> None:
    """A file of the source that is read-only is copied so, and a resumption makes it anew."""
    config = source / "config.json"
    config.write_text('{"torch_dtype": "float32"}')
    config.chmod(0o444)
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="stop"):
        _stopped_at(source, out, "_publish")
    prepared = out / ".streamload/out/config.json"
    assert prepared.stat().st_mode & 0o777 == 0o444
    journal = out / ".streamload/journal"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"publish"' not in line))
    with open(prepared) as before:  # open, so that its inode is not given to the new one
        _convert(source, out, resume=True)
        # another file: root could have written to that one as well
        assert (out / "config.json").stat().st_ino != os.fstat(before.fileno()).st_ino


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": {"nomatch*": "float16", "*": "float32"}},
        {"rename": {"nope": "x"}},
        {"rename": RenamePatterns.parse(["model.*=*"])},
        {"select": "nope*"},
    ],
)
def test_a_pattern_that_matches_nothing_is_a_slip(
    source: Path, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="no tensor's name matches"):
        streamload.convert(source, tmp_path / "out", progress=False, **arguments)
    assert not (tmp_path / "out").exists()


def test_a_source_written_in_place_whose_time_was_set_back(source: Path, tmp_path: Path) -> None:
    """A copy that restores times writes the same file: it is noticed, and nothing is mixed."""
    out, path = tmp_path / "out", source / "model.safetensors"
    with pytest.raises(RuntimeError, match="stop"):
        _stopped_before_publishing(source, out)
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"another state of the source's 'model\.safetens"):
        _convert(source, out, resume=True)
    _convert(source, out, overwrite=True)
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match="not of this source"):
        _convert(source, out, resume=True)


def test_a_journal_of_an_earlier_version(source: Path, tmp_path: Path) -> None:
    """It does not say enough to be continued: the error says what it is, and what helps."""
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="stop"):
        _stopped_before_publishing(source, out)
    journal = out / ".streamload/journal"
    first, *rest = journal.read_text().splitlines(keepends=True)
    header = json.loads(first) | {"format": 1}
    for state in header["source"].values():
        del state["ctime_ns"]
    journal.write_text(json.dumps(header) + "\n" + "".join(rest))
    with pytest.raises(CheckpointError, match=r"overwrite begins again.*format of the journal"):
        _convert(source, out, resume=True)
    _convert(source, out, overwrite=True)


def test_a_finished_conversion_reports_what_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is asked for again: by any spelling of the source's path, and from another place."""
    folder = tmp_path / "model"
    folder.mkdir()
    values = np.array([1e9, 1e-12, 1.0001, 1], "<f4")
    write_safetensors(
        folder / "model.safetensors",
        {"a": ("F32", (4,), values.tobytes()), "b": ("F32", (1,), bytes(4))},
    )
    out = tmp_path / "out"
    with pytest.warns(RuntimeWarning, match="1 finite values became infinite"):
        first = _convert(folder, out)
    assert set(first.counts) == {"a"}
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for spelling in (folder, "model", "./model/", "link", tmp_path / "out" / ".." / "model"):
        again = _convert(spelling, out, resume=True)
        assert (again.counts, again.digests) == (first.counts, first.digests)
        assert (again.resumed, again.read_nbytes) == (2, 0)
    folder.rename(tmp_path / "moved")
    assert _convert(tmp_path / "moved", out, resume=True).resumed == 2


@pytest.mark.slow
def test_very_many_tensors_need_little_memory_each(tmp_path: Path) -> None:
    peaks = []
    for count in (1, 4000):
        folder = tmp_path / f"in{count}"
        folder.mkdir()
        names = (f"model.layers.{i // 300}.mlp.experts.{i % 300}.weight" for i in range(count))
        tensors = {name: ("F32", (4, 2), bytes(32)) for name in names}
        write_safetensors(folder / "model.safetensors", tensors)
        del tensors
        tracemalloc.start()
        try:
            _convert(folder, tmp_path / f"out{count}")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    # reading the header takes most of it
    assert peaks[1] - peaks[0] < 4000 * 1900


@pytest.mark.slow
def test_an_interrupt_after_any_open_leaks_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "config.json").write_text('{"model_type": "llama"}')
    real, main = os.open, threading.current_thread()
    left = 0

    def interrupted(*given: Any, **options: Any) -> int:
        nonlocal left
        fd = real(*given, **options)
        if threading.current_thread() is main:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGINT)
        return fd

    def files() -> list[str]:
        found = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sorted(os.readlink(path) for path in found if os.path.lexists(path))

    _convert(source, tmp_path / "first")
    monkeypatch.setattr(os, "open", interrupted)
    tries = ended = 0
    while not ended:
        tries, out = tries + 1, tmp_path / f"out{tries}"
        before, left = files(), tries
        try:
            _convert(source, out)
        except KeyboardInterrupt as error:
            assert files() == before, tries
            left = -1
            _convert(source, out, resume=True)
            del error
        else:
            ended, left = left > 0, -1
        assert _values(out).keys() == _values(tmp_path / "first").keys()
        shutil.rmtree(out)
    assert tries > 20


@pytest.mark.parametrize("url", ["http://localhost/x", "https:/localhost/x"])
def test_a_url_is_no_destination(source: Path, url: str) -> None:
    with pytest.raises(ValueError, match="written to a folder"):
        _convert(source, url)  # type: ignore[arg-type]
