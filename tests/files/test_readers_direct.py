"""Direct reads: every alignment, the ways back to the page cache, and when "auto" chooses them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameters import few

from streamload.bench.compare import forget
from streamload.core.system import direct_memory, filesystem_of
from streamload.errors import CheckpointError, TruncatedFileError
from streamload.files import local as readers
from streamload.files.folder import (
    DIRECT_FILESYSTEMS,
    ResolvedKind,
    choose_reader,
    open_reader,
    resolve_reader,
)
from streamload.files.local import BUFFERED_FILESYSTEMS, MAPPED_FILESYSTEMS, DirectReader
from streamload.files.page_cache import resident_fraction
from streamload.files.reader import Reader

MIB = 2**20
BLOCK = 4096
SIZES = (0, 1, 511, 512, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1)
KINDS: tuple[ResolvedKind, ...] = ("mmap", "pread", "direct")


def write(path: Path, nbytes: int) -> bytes:
    content = np.random.default_rng(nbytes).bytes(nbytes)
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return content


def pages(nbytes: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = b"\xff" * len(memory)
    return memory[:nbytes]


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def up(offset: int, unit: int) -> int:
    """The next multiple."""
    return -(-offset // unit) * unit


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on a filesystem that reads past its page cache."""
    folder = tmp_path_factory.mktemp("direct")
    write(folder / "probe", 2 * BLOCK)
    with DirectReader(folder / "probe", 2 * BLOCK) as reader:
        reader.read_aligned(0, 2 * BLOCK, pages(2 * BLOCK))
        if reader.fallback:
            pytest.skip(f"the folder for temporary files is on another: {reader.fallback}")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, bytes]]:
    folder = tmp_path_factory.mktemp("sizes")
    return {n: (folder / str(n), write(folder / str(n), n)) for n in SIZES}


class Recording(DirectReader):
    """Notes where direct reads go to: (address, bytes)."""

    def __init__(self, path: Path, file_nbytes: int) -> None:
        self.reads: list[tuple[int, int]] = []
        super().__init__(path, file_nbytes)

    def _read_blocks(self, start: int, target: memoryview, nbytes: int) -> None:
        self.reads.append((address(target), target.nbytes))
        super()._read_blocks(start, target, nbytes)


@settings(deadline=None, max_examples=few(400))
@given(data=st.data())
def test_any_range_into_memory_anywhere(
    files: dict[int, tuple[Path, bytes]], data: st.DataObject
) -> None:
    nbytes = data.draw(st.sampled_from(SIZES))
    start = data.draw(st.integers(0, nbytes))
    stop = data.draw(st.integers(start, nbytes) | st.just(nbytes))
    # anywhere, where the file's blocks fall on blocks of the memory, and at a block
    at = data.draw(st.integers(0, BLOCK) | st.just(start % BLOCK) | st.sampled_from((0, 512)))
    path, content = files[nbytes]
    memory = pages(at + stop - start + 7)
    with DirectReader(path, nbytes) as reader:
        reader.read_into(start, memory[at : at + stop - start])
        with reader.view(start, stop) as view:
            assert view == content[start:stop]
    assert bytes(memory) == b"\xff" * at + content[start:stop] + b"\xff" * 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_aligned_ranges(
    files: dict[int, tuple[Path, bytes]], nbytes: int, kind: ResolvedKind
) -> None:
    path, content = files[nbytes]
    with open_reader(path, nbytes, kind) as reader:
        unit = reader.alignment
        assert unit & (unit - 1) == 0 and unit <= mmap.PAGESIZE
        assert kind == "direct" or unit == 1
        step = max(unit, 512)
        for start in range(0, nbytes + 1, step):
            for stop in {*range(start, nbytes, step), up(nbytes, unit), nbytes}:
                if stop < start:
                    continue
                memory = pages(up(stop - start, unit) + 100)
                valid = reader.read_aligned(start, stop, memory)
                assert valid == min(stop, nbytes) - start
                assert memory[:valid] == content[start : start + valid]


@pytest.mark.parametrize("kind", KINDS)
def test_aligned_range_outside_of_the_file(tmp_path: Path, kind: ResolvedKind) -> None:
    """Further than the last block, from behind the end, or into too little: a ValueError."""
    write(tmp_path / "f", 3 * BLOCK - 100)
    reader = open_reader(tmp_path / "f", 3 * BLOCK - 100, kind)
    for start, stop, room in (
        (0, 4 * BLOCK, 4 * BLOCK),
        (4 * BLOCK, 4 * BLOCK, BLOCK),
        (-BLOCK, BLOCK, 2 * BLOCK),
        (BLOCK, 0, BLOCK),
        (0, 2 * BLOCK, BLOCK),
    ):
        with pytest.raises(ValueError) as raised:
            reader.read_aligned(start, stop, pages(room))
        assert not isinstance(raised.value, CheckpointError)
    reader.close()
    with pytest.raises(ValueError):
        reader.read_aligned(0, BLOCK, pages(BLOCK))


@pytest.mark.parametrize("kind", KINDS)
def test_descriptor_reads_what_the_reader_does(tmp_path: Path, kind: ResolvedKind) -> None:
    content = write(tmp_path / "f", 2 * BLOCK + 100)
    with open_reader(tmp_path / "f", 2 * BLOCK + 100, kind) as reader:
        memory = pages(3 * BLOCK)
        assert os.preadv(reader.fileno(), [memory], 0) == 2 * BLOCK + 100
        assert memory[: 2 * BLOCK + 100] == content
        direct = fcntl.fcntl(reader.fileno(), fcntl.F_GETFL) & os.O_DIRECT
        assert bool(direct) == (kind == "direct" and not reader.fallback)
    with pytest.raises(ValueError):
        reader.fileno()


def test_aligned_memory_is_read_without_a_copy(disk: Path) -> None:
    nbytes = 3 * MIB + 100
    content = write(disk / "straight", nbytes)
    with Recording(disk / "straight", nbytes) as reader:
        unit = reader.alignment
        memory = pages(up(nbytes, unit))
        assert reader.read_aligned(0, up(nbytes, unit), memory) == nbytes
        assert reader.reads == [(address(memory), up(nbytes, unit))]
        assert memory[:nbytes] == content

        # the file's own length for an end: there is room for the rest of the block all the same
        assert reader.read_aligned(0, nbytes, memory) == nbytes
        assert reader.reads == 2 * [(address(memory), up(nbytes, unit))]

        reader.reads.clear()
        reader.read_into(unit, memory[: 2 * MIB])
        assert reader.reads == [(address(memory), 2 * MIB)]
        assert memory[: 2 * MIB] == content[unit : unit + 2 * MIB]

        # no room for the rest of the last block: that alone goes through other memory
        reader.reads.clear()
        reader.read_into(0, memory[:nbytes])
        (first, second) = reader.reads
        assert first == (address(memory), nbytes // unit * unit)
        assert second[1] == unit and not 0 <= second[0] - address(memory) < len(memory)
        assert memory[:nbytes] == content

        # where the memory and the file agree, but at neither's block: both ends
        reader.reads.clear()
        part = memory[unit // 2 : 2 * MIB]
        reader.read_into(unit // 2, part)
        assert sorted(size for _, size in reader.reads) == [unit, 2 * MIB - unit]
        assert part == content[unit // 2 : 2 * MIB]


def test_memory_at_odd_addresses_costs_one_megabyte_a_thread(disk: Path) -> None:
    """What is not aligned goes through the thread's own 1 MiB, the same for every reader."""
    nbytes = 5 * MIB + 3
    content = write(disk / "bounced", nbytes)
    with Recording(disk / "bounced", nbytes) as one, Recording(disk / "bounced", nbytes) as other:
        memory = pages(nbytes + 1)[1:]
        one.read_into(0, memory)
        other.read_into(7, memory[7:])
        assert memory == content
        reads = one.reads + other.reads
        assert len({at for at, _ in reads}) == 1
        assert max(size for _, size in reads) == MIB
        tracemalloc.start()
        try:
            one.read_into(7, memory[7:])
            assert tracemalloc.get_traced_memory()[1] < 10_000
        finally:
            tracemalloc.stop()


def test_threads_share_a_direct_reader(disk: Path) -> None:
    nbytes = 16 * MIB + 11
    content = write(disk / "threads", nbytes)
    rng = np.random.default_rng(0)
    starts = rng.integers(0, nbytes, 400)
    ranges = [
        (int(a), int(min(a + n, nbytes)), int(at))
        for a, n, at in zip(
            starts, rng.integers(0, 2 * MIB, 400), rng.integers(0, BLOCK, 400), strict=True
        )
    ]
    barrier = threading.Barrier(8)

    def work(part: int) -> None:
        memory = pages(2 * MIB + 2 * BLOCK)
        barrier.wait()
        for start, stop, at in ranges[part::8]:
            reader.read_into(start, memory[at : at + stop - start])
            assert memory[at : at + stop - start] == content[start:stop]
            first, last = start // BLOCK * BLOCK, up(stop, BLOCK)
            valid = reader.read_aligned(first, min(last, up(nbytes, reader.alignment)), memory)
            assert memory[:valid] == content[first : first + valid]

    with DirectReader(disk / "threads", nbytes) as reader, ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
        assert not reader.fallback


def test_page_cache_stays_as_it_is(disk: Path) -> None:
    write(disk / "cold", 4 * MIB)
    for cold in (True, False):
        if cold:
            forget([disk / "cold"])
        else:
            (disk / "cold").read_bytes()
        with DirectReader(disk / "cold", 4 * MIB) as reader:
            reader.read_aligned(0, 4 * MIB, pages(4 * MIB))
            reader.read_into(1, pages(MIB))
            assert not reader.fallback
        found = resident_fraction(disk / "cold")
        assert found is not None and (found == 0 if cold else found > 0.98)


def test_what_was_just_written_is_read(disk: Path) -> None:
    path = disk / "dirty"
    write(path, MIB)
    with open(path, "r+b", buffering=0) as file:
        for value in range(20):
            file.seek(5000)
            file.write(bytes([value]) * 9000)
            memory = pages(MIB)
            with DirectReader(path, MIB) as reader:
                reader.read_aligned(0, MIB, memory)
            assert memory[5000:14000] == bytes([value]) * 9000


def test_alignment_that_the_kernel_refuses_at_a_read(disk: Path) -> None:
    """EINVAL at a read: the same bytes through the page cache, from then on, and a word of it."""
    content = write(disk / "einval", 3 * BLOCK + 5)
    for unaligned in (False, True):
        with Recording(disk / "einval", 3 * BLOCK + 5) as reader:
            reader.read_into(0, pages(BLOCK))
            assert not reader.fallback
            reader.alignment = 8  # a filesystem that promises what its disk does not keep
            memory = pages(2 * BLOCK)[unaligned:]
            reader.read_into(8, memory[:BLOCK])
            assert memory[:BLOCK] == content[8 : 8 + BLOCK]
            assert os.strerror(errno.EINVAL) in reader.fallback
            assert not fcntl.fcntl(reader.fileno(), fcntl.F_GETFL) & os.O_DIRECT
            reads = len(reader.reads)
            assert reader.read_aligned(8, 3 * BLOCK + 8, pages(4 * BLOCK)) == 3 * BLOCK - 3
            with reader.view(1, 3 * BLOCK + 5) as view:
                assert view == content[1:]
            assert len(reader.reads) == reads


def test_kernel_that_does_not_say_what_it_needs(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.1 a file's alignment is not known: 4096 is right for the usual disks."""
    monkeypatch.setattr(readers, "_STATX_DIOALIGN", 0x4000_0000)  # a bit that no kernel answers
    content = write(disk / "silent", 3 * BLOCK + 5)
    with DirectReader(disk / "silent", 3 * BLOCK + 5) as reader:
        assert reader.alignment == 4096
        memory = pages(4 * BLOCK)
        assert reader.read_aligned(0, 4 * BLOCK, memory) == 3 * BLOCK + 5
        assert memory[: 3 * BLOCK + 5] == content and not reader.fallback


def test_file_that_cannot_be_opened_for_direct_reads() -> None:
    """A file that the kernel makes up as it is read: EINVAL at open is a fallback and no error."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        pytest.skip("no such kernel")
    with DirectReader(path, path.stat().st_size) as reader:
        assert "cannot be opened" in reader.fallback and reader.alignment == 1
        content = path.read_bytes()
        memory = pages(len(content))
        reader.read_into(0, memory)
        assert memory == content


def test_memory_filesystem_is_buffered_from_the_start() -> None:
    """A file in shared memory is read through the page cache, which is all there is of it."""
    path = Path("/dev/shm") / f"streamload-direct-{os.getpid()}"
    if not path.parent.is_dir():
        pytest.skip("no shared memory here")
    try:
        content = write(path, BLOCK + 3)
        with open_reader(path, BLOCK + 3, "direct") as reader:
            assert "tmpfs" in reader.fallback and reader.alignment == 1
            assert reader.read_aligned(1, BLOCK + 3, pages(2 * BLOCK)) == BLOCK + 2
            with reader.view(1, BLOCK) as view:
                assert view == content[1:BLOCK]
    finally:
        path.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_reader_that_does_what_was_asked_has_no_fallback(disk: Path, kind: ResolvedKind) -> None:
    write(disk / "asked", 10)
    with open_reader(disk / "asked", 10, kind) as reader:
        reader.read_into(0, memoryview(bytearray(10)))
        assert reader.fallback == ""


@pytest.fixture
def swapped(disk: Path) -> Iterator[tuple[DirectReader, bytes]]:
    """A reader whose descriptor for direct reads a test may point elsewhere, and what it reads."""
    content = write(disk / "swapped", 4 * BLOCK)
    with DirectReader(disk / "swapped", 4 * BLOCK) as reader:
        yield reader, content


def point_at(reader: DirectReader, path: str | Path, flags: int = 0) -> None:
    """What the kernel now has under the reader's descriptor."""
    assert reader._direct is not None
    fd = os.open(path, os.O_RDONLY | flags)
    os.dup2(fd, reader._direct.fileno())
    os.close(fd)


@pytest.mark.parametrize(
    ("where", "code"), [("/", errno.EISDIR), ("/proc/self/mem", errno.EIO)], ids=["EISDIR", "EIO"]
)
def test_read_error_is_no_reason_to_fall_back(
    swapped: tuple[DirectReader, bytes], where: str, code: int
) -> None:
    """What else goes wrong becomes a CheckpointError, with its cause."""
    reader, _ = swapped
    point_at(reader, where)
    for read in (
        lambda: reader.read_into(0, pages(BLOCK)),
        lambda: reader.read_into(1, pages(BLOCK)),
        lambda: reader.read_aligned(0, BLOCK, pages(BLOCK)),
    ):
        with pytest.raises(CheckpointError) as raised:
            read()
        assert raised.value.path == str(reader.path)
        assert isinstance(raised.value.__cause__, OSError)
        assert raised.value.__cause__.errno == code
    assert not reader.fallback


@pytest.mark.parametrize("there", [0, 1, 511, 512, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK - 1])
def test_short_reads_are_completed(
    swapped: tuple[DirectReader, bytes], disk: Path, there: int
) -> None:
    reader, content = swapped
    (disk / "short").write_bytes(content[:there])
    point_at(reader, disk / "short", os.O_DIRECT)
    memory = pages(4 * BLOCK)
    assert reader.read_aligned(0, 4 * BLOCK, memory) == 4 * BLOCK
    assert memory == content
    memory = pages(4 * BLOCK)
    reader.read_into(3, memory[1 : 4 * BLOCK - 2])
    assert memory[1 : 4 * BLOCK - 2] == content[3:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [0, 1, BLOCK, BLOCK + 100, 2 * BLOCK])
def test_truncated_while_it_is_read(tmp_path: Path, kind: ResolvedKind, left: int) -> None:
    nbytes = 3 * BLOCK - 7
    write(tmp_path / "f", nbytes)
    with (  # a file that is open for writing has no lease
        open(tmp_path / "f", "r+b") as file,
        open_reader(tmp_path / "f", nbytes, kind) as reader,
    ):
        file.truncate(left)
        for start in (0, 2 * BLOCK):
            with pytest.raises(TruncatedFileError) as raised:
                reader.read_aligned(start, up(nbytes, reader.alignment), pages(3 * BLOCK))
            assert (raised.value.expected, raised.value.found) == (nbytes, left)


def test_the_file_that_was_opened_is_read(disk: Path) -> None:
    content = write(disk / "replaced", 2 * BLOCK)
    with DirectReader(disk / "replaced", 2 * BLOCK) as reader:
        write(disk / "other", 2 * BLOCK - 1)
        os.replace(disk / "other", disk / "replaced")
        memory = pages(2 * BLOCK)
        reader.read_aligned(0, 2 * BLOCK, memory)
        assert memory == content and not reader.fallback


SECTORS = """
    import mmap, random, sys
    from pathlib import Path
    from streamload.files.local import DirectReader

    path = Path(sys.argv[1])
    content = random.Random(0).randbytes(100_001)
    path.write_bytes(content)
    memory = memoryview(mmap.mmap(-1, 2**18))
    with DirectReader(path, len(content)) as reader:
        stop = -(-len(content) // reader.alignment) * reader.alignment
        assert reader.read_aligned(0, stop, memory) == len(content)
        assert memory[:100_001] == content
        for start in range(0, 9000, 500):
            for stop in range(start, 20_000, 777):
                for at in (0, 512, start % 4096, 4096):
                    reader.read_into(start, memory[at : at + stop - start])
                    assert memory[at : at + stop - start] == content[start:stop]
        print(reader.alignment, repr(reader.fallback))
"""


@pytest.mark.parametrize("sector_nbytes", [512, 4096])
def test_disk_with_sectors_of(sector_nbytes: int) -> None:
    """Reads are aligned to what the disk needs, where the kernel says it, and stay direct."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("only root may mount")
    # not below pytest's folder: what it removes must not be mounted
    folder = Path(mkdtemp(prefix="streamload-"))
    image, mount = folder / "image", folder / "mount"
    image.touch()
    os.truncate(image, 16 * MIB)
    mount.mkdir()
    # a namespace of its own: the mount and the loop device go with the process
    script = """
        set -e
        loop=$(losetup --find --show --sector-size "$5" "$1")
        trap 'umount "$2" 2>/dev/null || true; losetup --detach "$loop"' EXIT
        mkfs.ext4 -q -b 4096 "$loop" && mount "$loop" "$2" || exit 77
        "$3" -c "$4" "$2/f"
    """
    program = textwrap.dedent(SECTORS)
    try:
        done = subprocess.run(
            [
                *("unshare", "-m", "sh", "-c", script, "sh"),
                *(image, mount, sys.executable, program, str(sector_nbytes)),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except FileNotFoundError as error:
        pytest.skip(str(error))
    finally:
        image.unlink()
        mount.rmdir()
        folder.rmdir()
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"no loop device can be mounted: {done.stderr}")
    assert done.returncode == 0, done.stderr
    version = tuple(map(int, os.uname().release.split(".")[:2]))
    assert done.stdout.strip() == f"{sector_nbytes if version >= (6, 1) else 4096} ''"


def filesystem(path: Path) -> str:
    return filesystem_of(os.path.realpath(path), Path("/proc/self/mountinfo").read_text())


def read_alone(path: Path, nbytes: int) -> None:
    """Bring the first bytes of a file into the page cache, and nothing after them."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(nbytes)


def test_auto_reads_what_is_cold_past_the_page_cache(disk: Path) -> None:
    if filesystem(disk) not in DIRECT_FILESYSTEMS:
        pytest.skip(f"not a local disk: {filesystem(disk)}")
    path = disk / "auto"
    write(path, 16 * MIB)
    path.read_bytes()
    resident = choose_reader(path, "auto")
    assert (resident.kind, resident.reason) == ("mmap", "in the page cache")
    assert resident_fraction(path) == 1
    forget([path])
    cold = choose_reader(path, "auto")
    assert cold.kind == "direct"
    assert cold.reason == f"on {filesystem(disk)}, not in the page cache"
    assert choose_reader(path, "auto", page_cache="drop").kind == "direct"
    assert resident_fraction(path) == 0
    read_alone(path, 12 * MIB)
    most = choose_reader(path, "auto")
    assert (most.kind, most.reason) == ("mmap", "mostly in the page cache")
    forget([path])
    read_alone(path, 4 * MIB)
    least = choose_reader(path, "auto")
    assert least.kind == "direct"
    assert least.reason == f"on {filesystem(disk)}, mostly not in the page cache"


def test_auto_is_never_direct_where_no_whole_slots_are_read(disk: Path) -> None:
    """Memory that the CPU writes is not aligned as the file is: it is read through the cache."""
    write(disk / "cold", MIB)
    forget([disk / "cold"])
    choice = choose_reader(disk / "cold", "auto", whole_slots=False)
    assert choice.kind == resolve_reader(disk / "cold", "auto") != "direct"
    assert filesystem(disk) in choice.reason and resident_fraction(disk / "cold") == 0


def test_auto_is_never_direct_where_the_page_cache_is_kept(disk: Path) -> None:
    write(disk / "kept", MIB)
    forget([disk / "kept"])
    kept = choose_reader(disk / "kept", "auto", page_cache="keep")
    assert kept.kind == resolve_reader(disk / "kept", "auto") != "direct"


def test_auto_where_there_is_no_local_disk(tmp_path: Path) -> None:
    """Memory, unknown filesystems and absent files are not read past the page cache."""
    assert choose_reader("/proc/self/status", "auto").kind == "pread"
    assert "proc" in choose_reader("/proc/self/status", "auto").reason
    absent = choose_reader(tmp_path / "absent", "auto")
    assert absent.kind == "pread" and "unknown" in absent.reason
    if Path("/dev/shm").is_dir():
        assert choose_reader("/dev/shm", "auto").kind == "mmap"


def test_filesystems_are_in_one_list_only() -> None:
    """What is always buffered is never chosen for direct reads; what is chosen can be mapped."""
    assert not DIRECT_FILESYSTEMS & BUFFERED_FILESYSTEMS
    assert DIRECT_FILESYSTEMS < MAPPED_FILESYSTEMS


def test_direct_reader_is_a_reader(disk: Path) -> None:
    write(disk / "protocol", 10)
    reader: Reader = DirectReader(disk / "protocol", 10)
    with reader as entered:
        assert entered is reader and not reader.mapped and reader.path == disk / "protocol"


@pytest.mark.parametrize("nbytes", [1, BLOCK + 1, 2 * MIB - 1, 2 * MIB, 5 * MIB + 1])
def test_memory_for_direct_reads(nbytes: int) -> None:
    """It is as long as asked for and begins at a page, at a huge page if it holds one."""
    memory = direct_memory(nbytes)
    assert memory.nbytes == nbytes and address(memory) % mmap.PAGESIZE == 0
    assert nbytes < 2 * MIB or address(memory) % (2 * MIB) == 0
    memory[:] = b"x" * nbytes
    assert memory[0] == memory[-1] == ord("x")


def test_memory_for_direct_reads_goes_with_its_last_view() -> None:
    def anonymous_kb() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.partition("RssAnon:")[2].split()[0])

    before = anonymous_kb()
    memory = direct_memory(32 * MIB)
    memory[:] = b"x" * len(memory)
    part = memory[5 * MIB : 6 * MIB]
    del memory
    assert bytes(part[-3:]) == b"xxx" and anonymous_kb() - before > 16_000
    del part
    assert anonymous_kb() - before < 16_000
