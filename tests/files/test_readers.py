"""All readers against real files, threads, truncation and the memory that they take."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import forked
import numpy as np
import pytest
from parameters import few
from safetensors_files import write_safetensors

from streamload.bench.compare import forget
from streamload.core import system
from streamload.core.system import (
    filesystem_in_memory,
    filesystem_of,
    map_privately,
    populate_shared,
)
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError, TruncatedFileError
from streamload.files import page_cache
from streamload.files.folder import choose_reader, open_reader, reader_for, resolve_reader
from streamload.files.local import MAPPED_FILESYSTEMS, MmapReader, PreadReader

Kind = Literal["mmap", "pread", "direct"]
KINDS: tuple[Kind, ...] = ("mmap", "pread", "direct")
MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")

# fmt: off
NOT_MAPPED = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse", "fuse.sshfs", "fuse.s3fs", "fuse.juicefs",
    "fuse.rclone", "fuseblk", "lustre", "gpfs", "beegfs", "fuse.glusterfs", "ceph",
    "fuse.ceph-fuse", "afs", "9p", "virtiofs", "vboxsf", "prl_fs", "drvfs", "zfs", "proc", "",
    "something new",
)
# fmt: on

every_reader = pytest.mark.parametrize("kind", KINDS)


def write(path: Path, nbytes: int) -> bytes:
    content = np.random.default_rng(nbytes).bytes(nbytes)
    path.write_bytes(content)
    return content


def test_local_files_need_no_code_of_servers(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "in" / "model.safetensors", {"a": ("F32", [64], bytes(256))})
    program = """
        import sys, streamload
        path, out = sys.argv[1:]
        streamload.load_state_dict(None, path, device="host", progress=False)
        streamload.convert(path, out, progress=False)
        servers = ("connections", "hub", "remote", "stores")
        print([name for name in servers if f"streamload.files.{name}" in sys.modules])
    """
    assert forked.fresh(program, tmp_path / "in", tmp_path / "out") == "[]\n"


@every_reader
def test_every_alignment(tmp_path: Path, kind: Kind) -> None:
    nbytes = 3 * PAGE + 5
    content = write(tmp_path / "f", nbytes)
    edges = sorted(
        {max(0, min(nbytes, k * PAGE + d)) for k in range(4) for d in (-2, -1, 0, 1, 7, 8)}
        | {nbytes}
    )
    with open_reader(tmp_path / "f", nbytes, kind) as reader:
        assert reader.path == tmp_path / "f"
        assert reader.mapped == (kind == "mmap")
        for i, start in enumerate(edges):
            for stop in edges[i:]:
                with reader.view(start, stop) as view:
                    assert view == content[start:stop]
                    assert view.readonly and view.format == "B" and view.nbytes == stop - start
                out = bytearray(stop - start)
                reader.read_into(start, memoryview(out))
                assert out == content[start:stop]


@every_reader
def test_read_into_any_kind_of_memory(tmp_path: Path, kind: Kind) -> None:
    content = write(tmp_path / "f", 100)
    with open_reader(tmp_path / "f", 100, kind) as reader:
        words = np.zeros(10, np.uint64)
        reader.read_into(3, words.data)
        assert words.tobytes() == content[3:83]
        part = bytearray(20)
        reader.read_into(95, memoryview(part)[5:10])
        assert part == bytes(5) + content[95:] + bytes(10)


@every_reader
def test_range_outside_of_the_file_is_the_callers_mistake(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path / "f", 10)
    reader = open_reader(tmp_path / "f", 10, kind)
    for start, stop in ((-1, 5), (5, 4), (0, 11), (11, 11)):
        with pytest.raises(ValueError) as raised, reader.view(start, stop):
            pass
        assert not isinstance(raised.value, CheckpointError)
    with pytest.raises(ValueError):
        reader.read_into(8, memoryview(bytearray(3)))
    reader.close()
    reader.close()
    with pytest.raises(ValueError), reader.view(0, 1):
        pass
    with pytest.raises(ValueError):
        reader.read_into(0, memoryview(bytearray(1)))


@every_reader
def test_view_kept_too_long_breaks_nothing(tmp_path: Path, kind: Kind) -> None:
    content = write(tmp_path / "f", 3 * PAGE)
    kept: list[object] = []
    reader = open_reader(tmp_path / "f", 3 * PAGE, kind)
    with pytest.raises(KeyError, match="the caller's"), reader.view(7, 2 * PAGE) as view:
        kept.append(np.frombuffer(view, np.uint8))
        kept.append(view[5:100])
        raise KeyError("the caller's")
    reader.close()
    array, part = kept
    assert isinstance(array, np.ndarray) and array.tobytes() == content[7 : 2 * PAGE]
    assert part == content[12:107]


@every_reader
def test_view_cannot_be_used_after_the_with(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path / "f", 10)
    with open_reader(tmp_path / "f", 10, kind) as reader:
        with reader.view(0, 10) as view:
            pass
        if kind == "mmap":
            with pytest.raises(ValueError, match="released"):
                view[0]


@every_reader
def test_threads_share_a_reader(tmp_path: Path, kind: Kind) -> None:
    nbytes = 16 * MIB + 11
    content = write(tmp_path / "f", nbytes)
    rng = np.random.default_rng(0)
    ranges = [
        (int(a), int(min(a + n, nbytes)))
        for a, n in zip(rng.integers(0, nbytes, 300), rng.integers(0, 3 * MIB, 300), strict=True)
    ]
    ranges += [(a, min(a + 100_003, nbytes)) for a in range(0, nbytes, 100_003)]
    start = threading.Barrier(4)

    def work(part: int) -> None:
        start.wait()
        for a, b in ranges[part::4]:
            with reader.view(a, b) as view:
                assert view == content[a:b]

    with open_reader(tmp_path / "f", nbytes, kind) as reader, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@every_reader
def test_length_is_checked_at_open(tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / "f"
    write(path, 100)
    with pytest.raises(TruncatedFileError) as truncated:
        open_reader(path, 101, kind)
    with pytest.raises(HeaderError) as longer:
        open_reader(path, 99, kind)
    for error, expected in ((truncated.value, 101), (longer.value, 99)):
        assert (error.path, error.expected, error.found) == (str(path), expected, 100)


@every_reader
def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path, kind: Kind) -> None:
    """A folder, a FIFO without a writer and nothing at all are errors at once."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, Path("/dev/null")):
        with pytest.raises(CheckpointError) as raised:
            open_reader(path, 100, kind)
        assert (raised.value.path, raised.value.expected) == (str(path), "a regular file")
    with pytest.raises(ShardNotFoundError):
        open_reader(tmp_path / "absent", 100, kind)


def test_empty_file_has_an_empty_view(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with open_reader(tmp_path / "f", 0, "mmap") as reader, reader.view(0, 0) as view:
        assert view.nbytes == 0


def test_file_beyond_the_address_space_cannot_be_mapped(tmp_path: Path) -> None:
    program = """
        import resource, sys
        from pathlib import Path
        from streamload.files.folder import open_reader
        from streamload.errors import CheckpointError

        path, nbytes = Path(sys.argv[1]), int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
        try:
            open_reader(path, nbytes, "mmap")
        except CheckpointError as error:
            print(type(error).__name__, error.path == str(path), error)
        with open_reader(path, nbytes, "pread") as reader, reader.view(nbytes - 1, nbytes) as view:
            print(bytes(view))
    """
    path, nbytes = tmp_path / "f", 2**33
    path.touch()
    os.truncate(path, nbytes)
    refusal, last = forked.fresh(program, path, nbytes).splitlines()
    assert refusal.startswith("CheckpointError True") and 'reader="pread"' in refusal
    assert last == repr(b"\0")


@every_reader
def test_file_truncated_between_reads(tmp_path: Path, kind: Kind) -> None:
    """Any read is a TruncatedFileError with both lengths, also of what is still there."""
    nbytes, left = 10 * PAGE, 5 * PAGE + 100
    content = write(tmp_path / "f", nbytes)
    with (  # a file that is open for writing has no lease
        open(tmp_path / "f", "r+b") as file,
        open_reader(tmp_path / "f", nbytes, kind) as reader,
    ):
        with reader.view(PAGE, left) as view:
            assert view == content[PAGE:left]
        file.truncate(left)
        for start, stop in (
            (PAGE, left),
            (0, left + 1),
            (left, left + 1),
            (left - 1, nbytes),
            (9 * PAGE, nbytes),
        ):
            with pytest.raises(TruncatedFileError) as raised, reader.view(start, stop):
                pass
            assert raised.value.path == str(tmp_path / "f")
            assert (raised.value.expected, raised.value.found) == (nbytes, left)
            with pytest.raises(TruncatedFileError) as raised:
                reader.read_into(start, memoryview(bytearray(stop - start)))
            assert (raised.value.expected, raised.value.found) == (nbytes, left)


@every_reader
def test_no_signal_while_another_process_truncates(tmp_path: Path, kind: Kind) -> None:
    """Taking windows of a file that shrinks and grows all the time never kills the process."""
    nbytes = 64 * PAGE
    write(tmp_path / "f", nbytes)
    program = """
        import os, sys, time
        from pathlib import Path
        from streamload.files.folder import open_reader
        from streamload.errors import CheckpointError

        path, kind, nbytes, page, count = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            while os.getppid() == parent:
                os.truncate(path, page)
                os.truncate(path, nbytes)
        seen = {"read": 0, "cut": 0}
        out = memoryview(bytearray(8 * page))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and min(seen.values()) < count:
            try:
                with open_reader(path, nbytes, kind) as reader:
                    for start in range(0, nbytes, 8 * page):
                        with reader.view(start, start + 8 * page) as view:
                            sum(view[::page])
                        reader.read_into(start, out)
                        seen["read"] += 1
            except CheckpointError as error:  # not always a short file: it grows again
                assert error.path == str(path)
                seen["cut"] += 1
        os.kill(child, 9)
        os.waitpid(child, 0)
        print(*seen.values())
    """
    said = forked.fresh(program, tmp_path / "f", kind, nbytes, PAGE, few(500))
    read, cut = map(int, said.split())
    assert read > 0 and cut > 0


def test_population_past_the_end_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """Where the lease is lost, the kernel's own answer still comes before a touch would kill."""
    program = """
        import fcntl, os, sys
        from pathlib import Path
        from streamload.files.local import FileMap, MmapReader
        from streamload.errors import CheckpointError

        populate = FileMap.populate

        def late(held, start, stop):  # after the lease was looked at, before the map is
            fcntl.fcntl(reader.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.truncate(reader.path, 100)
            return populate(held, start, stop)

        FileMap.populate = late
        reader = MmapReader(Path(sys.argv[1]), 1_000_000)
        try:
            with reader.view(500_000, 600_000) as view:
                print(view[0])
        except CheckpointError as error:
            print(type(error).__name__, error.expected, error.found)
    """
    write(tmp_path / "f", 1_000_000)
    assert forked.fresh(program, tmp_path / "f").strip() == "TruncatedFileError 1000000 100"


def test_kernel_that_cannot_populate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not know the advice, pages are faulted in."""
    monkeypatch.setattr(system, "_MADV_POPULATE_READ", 9999)  # EINVAL, as from an older kernel
    content = write(tmp_path / "f", 5 * PAGE)
    with open_reader(tmp_path / "f", 5 * PAGE, "mmap") as reader:
        assert isinstance(reader, MmapReader)
        for _ in range(2):
            with reader.view(100, 4 * PAGE) as view:
                assert view == content[100 : 4 * PAGE]


def test_read_error_is_ours(tmp_path: Path) -> None:
    """What the operating system says of a read becomes a CheckpointError, with its cause."""
    write(tmp_path / "f", 100)
    with (  # without a lease, of which it is looked at first whether it is there
        open(tmp_path / "f", "r+b"),
        open_reader(tmp_path / "f", 100, "pread") as reader,
    ):
        assert isinstance(reader, PreadReader)
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, reader._file.fileno())  # reading a folder is EISDIR
        os.close(folder)
        with pytest.raises(CheckpointError) as raised:
            reader.read_into(0, memoryview(bytearray(10)))
        assert raised.value.path == str(tmp_path / "f")
        assert isinstance(raised.value.__cause__, IsADirectoryError)
        assert raised.value.found == raised.value.__cause__.strerror


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    path = tmp_path_factory.mktemp("large") / "f"
    block = np.random.default_rng(0).bytes(MIB)
    with open(path, "wb") as file:
        for _ in range(300):
            file.write(block)
        file.write(b"and a bit")
    yield path, 300 * MIB + 9
    path.unlink()


MEMORY = """
    import re, sys, threading
    from pathlib import Path
    from streamload.files.folder import open_reader

    path, kind, nbytes, window, threads = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])

    def rss():
        return dict(re.findall(r"(Rss\\w+):\\s+(\\d+) kB", Path("/proc/self/status").read_text()))

    def used():
        now = rss()
        return [int(now[key]) - int(base[key]) for key in ("RssFile", "RssAnon")]

    peak = [0, 0]
    def work(part):
        out = memoryview(bytearray(window)) if not reader.mapped else None
        for start in range(part * window, nbytes, threads * window):
            stop = min(start + window, nbytes)
            if out is None:
                with reader.view(start, stop) as view:
                    total = sum(view[::4096])
                    peak[:] = map(max, peak, used())
            else:
                reader.read_into(start, out[: stop - start])
                peak[:] = map(max, peak, used())

    base = rss()
    reader = open_reader(path, nbytes, kind)
    crew = [threading.Thread(target=work, args=(part,)) for part in range(threads)]
    for thread in crew: thread.start()
    for thread in crew: thread.join()
    reader.close()
    print(*peak, *used())
"""


@pytest.mark.parametrize(
    ("kind", "window", "threads"),
    [
        ("mmap", 8 * MIB, 1),
        ("mmap", 4 * MIB + 40, 2),
        ("mmap", 300_000, 2),
        ("pread", 4 * MIB, 2),
        ("direct", 4 * MIB, 2),
    ],
)
def test_memory_is_bounded_by_the_windows(
    large_file: tuple[Path, int], kind: Kind, window: int, threads: int
) -> None:
    """300 MB in windows never hold more than the windows, and nothing afterwards.

    A window of a map counts whole blocks of 2 MiB, since the kernel maps as much around a page,
    and a direct reader has 1 MiB a thread, for memory that begins anywhere.
    """
    path, nbytes = large_file
    peak_file, peak_anonymous, after_file, after_anonymous = (
        1024 * int(kb) for kb in forked.fresh(MEMORY, path, kind, nbytes, window, threads).split()
    )
    slack = 4 * MIB  # code and heap of Python that come in during the run
    if kind == "mmap":
        assert peak_file < threads * (window + 4 * MIB) + slack
        assert peak_anonymous < slack
    else:
        assert peak_file < slack
        bounce = MIB if kind == "direct" else 0
        assert peak_anonymous < threads * (window + bounce) + slack
    assert after_file < slack and after_anonymous < slack


def test_closing_under_a_window_leaves_the_window_alone(tmp_path: Path) -> None:
    """A map goes when its last window has: a reader may be closed by another thread."""
    content = write(tmp_path / "f", 3 * MIB)
    reader = open_reader(tmp_path / "f", 3 * MIB, "mmap")
    with pytest.raises(ValueError), reader.view(MIB, 2 * MIB) as view:
        reader.close()
        assert view == content[MIB : 2 * MIB]  # and on leaving, the length cannot be checked
    assert str(tmp_path / "f") not in Path("/proc/self/maps").read_text()


MOUNTINFO = r"""
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:20 / /proc rw - proc proc rw
23 21 0:21 / /mnt rw shared:3 - tmpfs tmpfs rw
24 23 0:22 / /mnt/nfs rw shared:4 master:1 - nfs4 server:/ rw,vers=4.2
25 23 0:23 / /mnt/with\040blank rw - fuse.sshfs host: rw
26 21 0:24 / /data rw - ext4 /dev/vdb rw
27 21 0:25 / /data rw - lustre mgs@tcp:/fs rw
28 21 0:26 /sub /mnt/back\134slash rw - btrfs /dev/vdc rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/", "ext4"),
        ("/home/a", "ext4"),
        ("/mnt", "tmpfs"),
        ("/mnt/a", "tmpfs"),
        ("/mnt/nfs/a", "nfs4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfsx/a", "tmpfs"),
        ("/mnt/with blank/a", "fuse.sshfs"),
        ("/data/a", "lustre"),
        ("/mnt/back\\slash/a", "btrfs"),
    ],
)
def test_filesystem_is_that_of_the_nearest_mount(path: str, filesystem: str) -> None:
    """The longest mount point above a path wins, and of two on one point the later."""
    assert filesystem_of(path, MOUNTINFO) == filesystem
    assert filesystem_of(path, "") == ""


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [("/mnt/a/b", "tmpfs"), ("/home", ""), ("/over/a", "tmpfs"), ("/under/a", ""), ("", "")],
)
def test_files_in_memory_are_known(path: str, filesystem: str) -> None:
    text = MOUNTINFO + (
        "40 1 0:40 / /over rw - overlay none rw,lowerdir=/home,upperdir=/mnt/u,workdir=/mnt/w\n"
        "41 1 0:41 / /under rw - overlay none rw,lowerdir=/mnt,upperdir=/home/u\n"
    )
    assert filesystem_in_memory(path, text) == filesystem
    assert filesystem_in_memory("/mnt", "") == ""


@pytest.mark.parametrize("filesystem", NOT_MAPPED)
def test_auto_reads_network_and_unknown_filesystems_by_pread(filesystem: str) -> None:
    assert reader_for(filesystem, 1000) == "pread"


@pytest.mark.parametrize("filesystem", sorted(MAPPED_FILESYSTEMS))
def test_auto_maps_local_filesystems(filesystem: str) -> None:
    """Local filesystems are mapped, except large shards where addresses have 32 bits."""
    assert reader_for(filesystem, 2**40, address_bits=64) == "mmap"
    assert reader_for(filesystem, 2**30, address_bits=32) == "mmap"
    assert reader_for(filesystem, 2**30 + 1, address_bits=32) == "pread"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere auto is pread")
def test_auto_on_this_machine(tmp_path: Path) -> None:
    """A file in shared memory is mapped, one in /proc is not, and symlinks are followed."""
    shared = Path("/dev/shm") / f"streamload-{os.getpid()}"
    shared.write_bytes(b"x")
    try:
        (tmp_path / "link").symlink_to(shared)
        for path in (shared, tmp_path / "link"):
            assert resolve_reader(path, "auto") == "mmap"
            assert isinstance(open_reader(path, 1), MmapReader)
    finally:
        shared.unlink()
    assert resolve_reader("/proc/self/status", "auto") == "pread"
    assert resolve_reader(tmp_path / "absent", "auto") == "pread"


def test_kinds_are_what_they_say(tmp_path: Path) -> None:
    for kind in KINDS:
        assert resolve_reader(tmp_path / "absent", kind) == kind
        assert choose_reader(tmp_path / "absent", kind).kind == kind
    for resolve in (resolve_reader, choose_reader):
        with pytest.raises(ValueError, match="auto, mmap, pread, direct"):
            resolve(tmp_path, "io_uring")  # type: ignore[arg-type]


# --- without read-ahead ---------------------------------------------------------------------------


@every_reader
def test_nothing_is_read_ahead(tmp_path: Path, kind: Kind) -> None:
    path, at = tmp_path / "file", MIB + 5
    data = write(path, 32 * MIB)
    if choose_reader(path, "auto", whole_slots=False).kind != "mmap":
        pytest.skip("a filesystem with a page cache of its own")
    forget([path])
    with open_reader(path, len(data), kind) as reader:
        reader.stop_ahead()
        out = bytearray(10**6)
        reader.read_into(at, memoryview(out))
        assert out == data[at : at + len(out)]
        with reader.view(at, at + 1000) as view:
            assert view == data[at : at + 1000]
        assert _resident_nbytes(path) <= len(out) + 2 * PAGE
        arrays = [np.zeros(n, np.uint8) for n in (1, 300_000, 4, 0, 200_000, 7)]
        addresses = np.array([array.ctypes.data for array in arrays])
        assert reader.scatter(at, addresses, np.array([array.nbytes for array in arrays]))
        assert b"".join(map(bytes, arrays)) == data[at : at + sum(map(len, arrays))]
        assert _resident_nbytes(path) <= len(out) + 2 * PAGE


def test_pages_of_a_map_come_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = write(path, 32 * MIB)
    if choose_reader(path, "auto", whole_slots=False).kind != "mmap":
        pytest.skip("a filesystem with a page cache of its own")
    forget([path])
    with open(path, "rb") as file, map_privately(file) as memory:  # type: ignore[arg-type]
        memory.madvise(mmap.MADV_RANDOM)
        whole = np.frombuffer(memory, np.uint8)
        first = whole.ctypes.data + 3 * MIB
        assert populate_shared(first, first + 10**6, ahead=False) == 0
        assert bytes(whole[3 * MIB : 3 * MIB + 10**6]) == data[3 * MIB : 3 * MIB + 10**6]
        assert 10**6 <= _resident_nbytes(path) <= 10**6 + 2 * PAGE
        del whole


def test_a_file_longer_than_memory_is_mapped_privately(tmp_path: Path) -> None:
    """Pages that are written take memory, not the map; the kernel refuses to reserve as much."""
    if system.file_text(Path("/proc/sys/vm/overcommit_memory")).strip() == "2":
        pytest.skip("this kernel reserves memory for every map")
    nbytes = 4 * os.sysconf("SC_PHYS_PAGES") * PAGE
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        file.truncate(nbytes)
        with map_privately(file) as memory:  # type: ignore[arg-type]
            memory[nbytes - 1] = 1
            assert len(memory) == nbytes


def _resident_nbytes(path: Path) -> int:
    with open(path, "rb") as file:
        pages = page_cache._resident_pages(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return pages.count(1) * PAGE
