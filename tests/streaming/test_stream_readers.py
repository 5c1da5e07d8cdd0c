"""How shards are read and what becomes of the page cache: chosen, planned, done, and told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from boxes import Boxes
from plan_helpers import plan_of
from recording import RecordingDevice, RecordingFramework
from safetensors_files import write_safetensors

import streamload
from streamload import Budget
from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.core.memory import STAGING, Ledger
from streamload.core.system import filesystem_and_length
from streamload.core.tensors import RowRange, RowTranspose
from streamload.files.folder import DIRECT_FILESYSTEMS
from streamload.files.page_cache import resident_fraction
from streamload.planning.chunks import Chunk, StridedRead
from streamload.planning.moves import DeviceSpec, TensorRequest
from streamload.planning.plan import Plan
from streamload.streaming.loop import stream
from streamload.streaming.sink import ModelTarget
from streamload.streaming.state import StreamStats, Transfer, file_ranges

MIB = 2**20
KIB = 2**10


def write(folder: Path, *shards: int) -> Path:
    """A checkpoint of bytes that differ from place to place, some such numbers for each shard."""
    rng = np.random.default_rng(len(shards))
    for index, nbytes in enumerate(shards):
        thirds = [nbytes // 3, nbytes // 3 + 5, nbytes - 2 * (nbytes // 3) - 5]
        tensors = {
            f"s{index}.t{i}": ("U8", [n], rng.bytes(n)) for i, n in enumerate(thirds) if n > 0
        }
        folder.mkdir(exist_ok=True)
        write_safetensors(folder / f"{index}.safetensors", tensors)
    return folder


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def cool(path: Path) -> Path:
    """Take files out of the page cache; what is on no disk cannot be."""
    for file in files(path) if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        if resident_fraction(file) != 0:
            pytest.skip(f"{file} stays in the page cache")
    return path


def warm(path: Path) -> Path:
    for file in files(path) if path.is_dir() else [path]:
        file.read_bytes()
        if resident_fraction(file) != 1:
            pytest.skip(f"the page cache does not hold {file}")
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    filesystem, _ = filesystem_and_length(tmp_path)
    if filesystem not in DIRECT_FILESYSTEMS:
        pytest.skip(f"the folder for temporary files is on {filesystem}")
    return tmp_path


def plan(path: Path, **arguments: Any) -> Plan:
    arguments = {"device": "cuda:0", "budget": "1GB", "dtype": "checkpoint"} | arguments
    return streamload.plan(path, **arguments)


def run(
    path: Path,
    device: RecordingDevice,
    *,
    reader: Sequence[Any] = ("mmap",),
    wants: Sequence[TensorRequest] | None = None,
    chunk_nbytes: int = 20_000,
    threads: int = 2,
    resident: Sequence[int] = (),
    **arguments: Any,
) -> tuple[Plan, StreamStats]:
    """Stream a checkpoint, of which some shards are resident, and compare every byte."""
    checkpoint = open_checkpoint(path)
    if wants is None:
        wants = [
            TensorRequest(name, info.shape, (RowRange(name, 0, info.shape[0]),))
            for name, info in checkpoint.tensors.items()
        ]
    made = plan_of(
        checkpoint,
        DeviceSpec(device.info, 10**9),
        wants=wants,
        readers=[*reader, *[reader[-1]] * (len(checkpoint.shards) - len(reader))],
        chunk_nbytes=chunk_nbytes,
        threads=threads,
        **arguments,
    )
    expected = {want.name: expected_bytes(checkpoint, want) for want in wants}
    cool(path)
    for shard in resident:
        warm(files(path)[shard])
    ledger = Ledger({device.name: 10**9, STAGING: made.host_nbytes})
    target = ModelTarget(made, RecordingFramework(), {device.name: device}, None, ledger)  # type: ignore[arg-type]
    stats = stream(Transfer(made, checkpoint, {device.name: device}), target, ledger)
    device.check_ended()
    for name, data in expected.items():
        assert target.state_dict[name].data == data, name
        assert target.state_dict[name].written_once, name
    return made, stats


def expected_bytes(checkpoint: Checkpoint, want: TensorRequest) -> bytes:
    parts = []
    for rows in want.source:
        info = checkpoint.tensors[rows.tensor]
        whole = np.frombuffer(info.shard.read_bytes()[info.start : info.stop], np.uint8)
        parts.append(whole.reshape(info.shape)[rows.start : rows.stop])
    out = np.concatenate(parts)
    if want.transpose is not None:
        t = want.transpose
        out = out.reshape(t.groups, t.outer, t.inner, -1).swapaxes(1, 2)
    return out.tobytes()


# --- reader="auto": what is planned ---------------------------------------------------------------


def test_what_is_cold_is_read_past_the_page_cache(disk: Path) -> None:
    """Each shard for itself, and the plan says how and why in a line for all that are alike."""
    path = cool(write(disk / "c", *[4 * MIB] * 4))
    warm(files(path)[2])
    made = plan(path)
    assert made.readers == ("direct", "direct", "mmap", "direct")
    # what the kernel read ahead of their headers is there
    assert all(made.reader_reasons[i].endswith("not in the page cache") for i in (0, 1, 3))
    assert "read by direct: 3 files (on " in str(made)
    assert "read by mmap: 1 file (in the page cache)" in str(made)
    assert made.staging_nbytes == made.slot_nbytes + 2 * 4096
    assert Plan.from_json(made.to_json()) == made
    warm(path)
    assert plan(path).readers == ("mmap",) * 4


def test_planning_leaves_the_page_cache_as_it_is(disk: Path) -> None:
    path = cool(write(disk / "c", 64 * MIB))
    plan(path)
    assert (resident_fraction(files(path)[0]) or 0) < 0.5
    assert plan(path).readers == ("direct",)


def test_auto_is_buffered_for_memory_that_the_cpu_writes(disk: Path) -> None:
    path = cool(write(disk / "c", 4 * MIB))
    made = plan(path, device="CPU")
    assert made.readers == ("mmap",)
    assert "memory that the CPU writes" in made.reader_reasons[0]


@pytest.mark.parametrize(("page_cache", "reader"), [("keep", "mmap"), ("drop", "direct")])
def test_page_cache_that_is_to_be_filled_is_filled(
    disk: Path, page_cache: Any, reader: str
) -> None:
    path = cool(write(disk / "c", 4 * MIB))
    made = plan(path, page_cache=page_cache)
    assert (made.readers, made.page_cache) == ((reader,), page_cache)


@pytest.mark.parametrize("reader", ["mmap", "pread", "direct"])
def test_a_reader_that_is_asked_for_is_had(disk: Path, reader: Any) -> None:
    path = cool(write(disk / "c", 4 * MIB, 10))
    for _ in range(2):
        made = plan(path, reader=reader)
        assert made.readers == (reader, reader)
        assert made.reader_reasons == (f'reader="{reader}" was asked for',) * 2
        warm(path)


def test_little_host_memory_is_kept_to(disk: Path) -> None:
    path = warm(write(disk / "c", 40 * MIB))
    small = plan(path, threads=12, budget=Budget("1GB", host="8MiB"))
    assert 4 * MIB < small.host_nbytes <= 8 * MIB


def test_a_chunk_that_is_asked_for_bounds_slots_too(disk: Path) -> None:
    path = warm(write(disk / "c", 40 * MIB))
    assert plan(path, threads=2, chunk_nbytes=MIB).slot_nbytes == MIB


def test_unknown_choices(disk: Path) -> None:
    """The error names what there is; an option that is gone says so."""
    path = write(disk / "c", 10)
    arguments: dict[str, Any] = {"page_cache": "some"}
    with pytest.raises(ValueError, match="page_cache is one of auto"):
        plan(path, **arguments)
    with pytest.raises(ValueError, match="page_cache is one of auto"):
        streamload.load_state_dict(None, path, device="host", **arguments)
    gone: dict[str, Any] = {"transfer": "mapped"}
    with pytest.raises(TypeError, match="'transfer': write nothing"):
        plan(path, **gone)
    with pytest.raises(TypeError, match="'transfer': write nothing"):
        streamload.load_state_dict(None, path, device="host", **gone)


# --- direct reads: what is done -------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("host_visible", [False, True])
def test_direct_reads_bring_the_right_bytes(disk: Path, host_visible: bool, threads: int) -> None:
    path = write(disk / "c", 150_000, 1, 70_001)
    device = RecordingDevice(host_visible=host_visible, threads=16)
    made, stats = run(path, device, reader=["direct"], threads=threads, chunk_nbytes=20_001)
    assert stats.reader_fallbacks == {}
    assert (stats.page_cache, stats.dropped_nbytes) == ("", 0)
    assert [resident_fraction(file) for file in files(path)] == [0, 0, 0]
    assert {s.view.nbytes for s in device.stagings} == (
        set() if host_visible else {made.staging_nbytes}
    )
    assert sum(s.view.nbytes for s in device.stagings) <= made.host_nbytes


def test_direct_reads_of_rows_in_another_order(disk: Path) -> None:
    rng = np.random.default_rng(3)
    tensors = {f"t{i}": ("U8", [64, 300 + i], rng.bytes(64 * (300 + i))) for i in range(4)}
    disk.joinpath("c").mkdir()
    write_safetensors(disk / "c" / "x.safetensors", tensors)
    wants = [
        TensorRequest("rows", (64, 300), (RowRange("t0", 0, 64),), RowTranspose(2, 4, 8)),
        TensorRequest("part", (20, 301), (RowRange("t1", 11, 31),)),
        TensorRequest("two", (70, 303), (RowRange("t3", 30, 64), RowRange("t3", 0, 36))),
    ]
    for threads in (0, 2):
        for reader in ("direct", "mmap"):
            device = RecordingDevice(seed=threads)
            run(disk / "c", device, reader=[reader], wants=wants, threads=threads)


def test_direct_beside_other_readers(disk: Path) -> None:
    """Shards of one load are read each in its own way."""
    path = write(disk / "c", 100_000, 100_000, 100_000)
    device = RecordingDevice()
    run(path, device, reader=["direct", "pread", "mmap"], page_cache="keep")
    assert [resident_fraction(file) for file in files(path)] == [0, 1, 1]


def test_a_reader_that_falls_back_says_so(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if filesystem_and_length(shared)[0] != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")
    folder = shared / f"streamload-{os.getpid()}"
    try:
        path = write(folder, 1000, 2000)
        report = streamload.load_state_dict(None, path, device="host", reader="direct")
        note = "2 of 2 files: tmpfs is read through the page cache"
        lines = str(report).splitlines()
        assert note in report.notes and any(line.endswith(note) for line in lines)
        assert any(line.split()[:4] == ["read", "by", "direct:", "2"] for line in lines)
        assert json.loads(report.to_json())["reading"] == [
            'direct: 2 files (reader="direct" was asked for)'
        ]
    finally:
        for file in files(folder):
            file.unlink()
        folder.rmdir()


# --- the page cache: what is done -----------------------------------------------------------------


@pytest.mark.parametrize("reader", ["mmap", "pread"])
@pytest.mark.parametrize("host_visible", [False, True])
def test_what_the_load_brought_in_is_dropped(disk: Path, reader: str, host_visible: bool) -> None:
    path = write(disk / "c", 200_000, 150_000, 100_000)
    device = RecordingDevice(host_visible=host_visible)
    _, stats = run(path, device, reader=[reader], page_cache="drop", resident=[1])
    assert [resident_fraction(file) for file in files(path)] == [0, 1, 0]
    assert stats.page_cache == 'page_cache="drop" was asked for'
    assert 300_000 <= stats.dropped_nbytes < 330_000  # the ends of pages, and no header


@pytest.mark.parametrize("reader", ["mmap", "pread"])
@pytest.mark.parametrize(("page_cache", "left"), [("drop", 0), ("keep", 1), ("auto", 1)])
def test_what_becomes_of_the_page_cache(
    disk: Path, reader: str, page_cache: Any, left: int
) -> None:
    """Dropped, kept, or kept since memory is not short; the bytes and the reason are told."""
    path = write(disk / "c", 200_000, 150_000)
    device = RecordingDevice()
    made, stats = run(path, device, reader=[reader], page_cache=page_cache)
    assert made.page_cache == page_cache
    assert [resident_fraction(file) for file in files(path)] == [left, left]
    assert (stats.dropped_nbytes >= 350_000) == (left == 0)
    assert stats.page_cache.startswith("kept" if page_cache == "auto" else "page_cache=")


def test_what_a_failed_load_brought_in_is_dropped_too(disk: Path) -> None:
    from recording import Faults

    path = write(disk / "c", 200_000)
    device = RecordingDevice(faults=Faults({"copy": 5}))
    with pytest.raises(RuntimeError, match="injected"):
        run(path, device, reader=["pread"], page_cache="drop")
    assert resident_fraction(files(path)[0]) == 0


def test_ranges_of_a_unit() -> None:
    """Neighbours are one range, however many: a unit of small tensors is told of once."""
    chunks = tuple(Chunk(i, 0, 0, 10, (StridedRead(100 + 10 * i, 10),)) for i in range(256))
    assert list(file_ranges(chunks)) == [(100, 2660)]
    gap = (chunks[0], Chunk(1, 0, 0, 0, ()), chunks[2], chunks[3])
    assert list(file_ranges(gap)) == [(100, 110), (120, 140)]
    assert list(file_ranges((Chunk(0, 0, 0, 0, ()),))) == []


@pytest.mark.parametrize(
    ("limit_mib", "dropping"), [(420, True), pytest.param(2000, False, marks=pytest.mark.slow)]
)
def test_memory_that_is_short(cgroup: Boxes, disk: Path, limit_mib: int, dropping: bool) -> None:
    """In a cgroup too small for weights and file, the command drops, and its report says so."""
    path = write(disk / "c", 60 * MIB, 60 * MIB)
    command = [sys.executable, "-m", "streamload", "load", path, "--device", "host", "--json"]
    left: list[float] = []
    # its header was read before; the kernel may take some of what is kept whenever it likes
    while not left or not (left[-1] < 0.1 if dropping else left[-1] > 0.9):
        assert len(left) < 5, left
        cool(path)
        done = cgroup.run(
            [*command, "--dtype", "checkpoint", "--no-progress"], limit_mib * MIB, env=os.environ
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["page_cache"].startswith("dropped" if dropping else "kept")
        assert (report["dropped_nbytes"] > 100 * MIB) == dropping
        left.append(resident_fraction(files(path)[1]) or 0)


# --- the commands ---------------------------------------------------------------------------------


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-m", "streamload", *arguments], forked.COMMANDS)


def test_options_of_the_commands(disk: Path) -> None:
    path = write(disk / "c", 100_000)
    ways = ("--reader", "direct", "--page-cache", "drop")
    planned = command("plan", path, "--budget", "1GB", "--dtype", "checkpoint", *ways)
    assert 'read by direct: 1 file (reader="direct" was asked for)' in planned.stdout
    done = command("load", path, "--device", "host", "--no-progress", "--json", *ways)
    report = json.loads(done.stdout)
    assert report["page_cache"] == ""
    assert report["reading"] == ['direct: 1 file (reader="direct" was asked for)']
    wrong = command("load", path, "--device", "host", "--reader", "tape")
    assert wrong.returncode == 2
    assert "tape" in wrong.stderr
